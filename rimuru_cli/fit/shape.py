"""What of a model decides how it fits: its configuration, the number format of its weights, and the bytes of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rimuru_models.config import ModelConfig
from rimuru_models.headers import DTYPE_BITS
from rimuru_models.index import CheckpointIndex
from rimuru_models.layout import dense_bytes, expert_bytes, num_parameters
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
        stored: format of the experts in the files.
        stored_bytes: of all tensors in the files.
        from_headers: whether the headers were read; otherwise `stored` is assumed.
    """

    config: ModelConfig
    stored: NumberFormat
    stored_bytes: int
    from_headers: bool

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
        """Bytes of one expert in the files."""
        return expert_bytes(self.config, self.stored.itemsize)

    def read_per_token(self, itemsize: int) -> int:
        """Bytes of dense weights that a token reads: all but the embeddings, of which it needs a row. A tied table is the output matrix."""
        config = self.config
        table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * itemsize
        return dense_bytes(config, itemsize) - table

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
    if index is None:
        return ModelShape(config, ASSUMED, num_parameters(config) * ASSUMED.itemsize, False)
    name = resolve(index, config).expert_dtype
    return ModelShape(config, NumberFormat(name, DTYPE_BITS[name] // 8), index.total_bytes, True)
