"""What of a model decides how it fits: its configuration, the formats of its weights, and the bytes of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.memory.geometry import MAX_PAGE_BYTES
from rimuru_kernels.packed_weights.format import PackedFormat, page_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.headers import DTYPE_BITS
from rimuru_models.index import CheckpointIndex
from rimuru_models.layout import EMBEDDING, dense_bytes, expert_bytes, num_parameters
from rimuru_models.quantization.formats import LayerFormats, WeightFormats
from rimuru_models.quantization.precision import Precision, precision_of
from rimuru_models.tensor_map import resolve


class NumberFormat(NamedTuple):
    """A number format by its safetensors name, and its bytes an element."""

    name: str
    itemsize: int


ASSUMED = NumberFormat("BF16", 2)
IN_MEMORY_ON_CPU = NumberFormat("F32", 4)


@dataclass(frozen=True)
class ModelShape:
    """A model as its headers show it.

    Attributes:
        formats: what every weight is stored as.
        stored_bytes: of all tensors in the files.
        from_headers: whether the headers were read; otherwise `formats` is assumed.
    """

    config: ModelConfig
    formats: WeightFormats
    stored_bytes: int
    from_headers: bool

    @property
    def computing(self) -> NumberFormat:
        """What a card computes with, and what plain weights are in its memory."""
        return number_format(self.formats.computing)

    @property
    def precision(self) -> Precision:
        """What the weights are stored as, in words."""
        return precision_of(self.config, self.formats)

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        return len(self.config.moe_layers) * self.config.num_experts

    @property
    def uses_per_token(self) -> int:
        """Experts that a token is routed to, over all layers."""
        return len(self.config.moe_layers) * self.config.top_k

    @property
    def stored_expert_bytes(self) -> int:
        """Bytes of one expert in the files, and so in the pages of a card."""
        return ExpertPages.build(self.config, self.computing.itemsize, self.formats.experts, MAX_PAGE_BYTES).expert_bytes

    @property
    def packed_dense(self) -> Mapping[str, PackedFormat]:
        """Formats of the dense matrices that stay packed on a card."""
        return self.formats.dense

    def read_per_token(self, itemsize: int, packed: Mapping[str, PackedFormat] | None = None) -> int:
        """Bytes of dense weights that a token reads: all but the embeddings, of which it needs a row. A tied table is the output matrix.

        Args:
            packed: formats of the matrices that are packed.
        """
        config = self.config
        total = dense_bytes(config, itemsize, packed)
        if config.tie_word_embeddings:
            return total
        fmt = None if packed is None else packed.get(EMBEDDING)
        cells = config.vocab_size * config.hidden_size
        return total - (cells * itemsize if fmt is None else page_bytes(fmt, config.vocab_size, config.hidden_size))

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with in the layers: not those of the output matrix, which is read once a prompt."""
        config = self.config
        tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
        routed = self.num_experts * expert_bytes(config, 1)
        return num_parameters(config) - routed - tables + self.uses_per_token * expert_bytes(config, 1)


def shape_of(config: ModelConfig, index: CheckpointIndex | None) -> ModelShape:
    """Put configuration and headers together.

    Raises:
        CheckpointError: they contradict each other, or a tensor is missing.
    """
    if index is not None:
        return ModelShape(config, resolve(index, config).formats, index.total_bytes, True)
    shape = ModelShape(config, _assumed(config), 0, False)
    dense = num_parameters(config) - shape.num_experts * expert_bytes(config, 1)
    return replace(shape, stored_bytes=dense * ASSUMED.itemsize + shape.num_experts * shape.stored_expert_bytes)


def number_format(name: str) -> NumberFormat:
    """A number format by its safetensors name."""
    return NumberFormat(name, DTYPE_BITS[name] // 8)


def _assumed(config: ModelConfig) -> WeightFormats:
    """What a configuration without headers is taken to be: experts as its quantization_config says first, all else bfloat16."""
    f, d, layer = config.expert_intermediate, config.hidden_size, None
    if config.quantization is not None and config.quantization.schemes:
        scheme = config.quantization.schemes[0]
        dtypes = {role: part.dtypes[0] for role, part in scheme.parts(f, d).items() if not part.optional}
        layer = LayerFormats(scheme.packed(f, d, dtypes), scheme.packed(d, f, dtypes))
    return WeightFormats(dict.fromkeys(config.moe_layers, layer), {}, ASSUMED.name, ASSUMED.name)
