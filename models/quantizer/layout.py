"""What a quantised copy of a checkpoint consists of: its shards, and what its config.json says. No weights are read here.

The first shard has everything that is not a routed expert, byte for byte; every further one the experts of one sparse layer, one tensor
triple a matrix: `X.weight_packed` I32 [N, ceil(K bits / 32)], `X.weight_scale` [N, groups], `X.weight_shape` I64 [2].
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rimuru_models.config import ModelConfig
from rimuru_models.errors import UsageError
from rimuru_models.quantizer.groups import group_of
from rimuru_models.quantizer.shards import NAMES, Promised
from rimuru_models.weights import CheckpointReader

Bits = Literal[4, 8]
GROUPS = (32, 64, 128)
DEFAULT_GROUP: dict[int, int] = {4: 32, 8: 128}


@dataclass(frozen=True)
class Recipe:
    """What to make.

    Attributes:
        bits: of a code.
        group: weights that share a scale; fewer where rows are no multiples of them (`fitting`).
        feedback: rounding errors are made up for (see `feedback`), which needs a calibration text.
    """

    bits: Bits
    group: int
    feedback: bool

    @classmethod
    def of(cls, to: str, group: int | None = None) -> Recipe:
        """From the words int8 or int4; 4 bits are rounded with feedback, 8 bits need none.

        Raises:
            UsageError: anything else.
        """
        if to not in ("int8", "int4"):
            raise UsageError(f"{to!r} is nothing that can be quantised to.", hint="--to takes int8 or int4.")
        bits: Bits = 8 if to == "int8" else 4
        if group is not None and group not in GROUPS:
            raise UsageError(f"Groups of {group} weights are not made.", hint=f"--group takes {', '.join(map(str, GROUPS))}.")
        return cls(bits, group or DEFAULT_GROUP[bits], feedback=bits == 4)

    @property
    def name(self) -> str:
        """int8 or int4."""
        return f"int{self.bits}"

    def fitting(self, config: ModelConfig) -> Recipe:
        """For experts of this shape: groups fill the rows of gate, up and down exactly, and are of one size in all of them.

        Readers of the format expect that: compressed-tensors refuses broken groups, and transformers takes one scheme for all experts.
        """
        return replace(self, group=group_of(math.gcd(config.hidden_size, config.expert_intermediate), self.group))


class Projection(NamedTuple):
    """One matrix of an expert: its name without `.weight`, and its shape."""

    module: str
    rows: int
    columns: int


def expert_projections(reader: CheckpointReader, layer: int, expert: int) -> tuple[Projection, Projection, Projection]:
    """gate, up and down of one expert; experts that lie fused on disk get names of their own, as most checkpoints have them."""
    config, tensors = reader.config, reader.expert_tensors(layer)
    hidden, width = config.hidden_size, config.expert_intermediate
    if tensors.fused is None:
        names = [str(piece).removesuffix(".weight") for piece in tensors.per_expert[expert]]
    else:
        # Granite's fused matrices are not called experts: `block_sparse_moe.input_linear.weight`.
        block = re.sub(r"\.experts\.gate_up_proj(\.weight)?$", "", tensors.fused[0]).replace(
            ".block_sparse_moe.input_linear.weight", ".mlp"
        )
        names = [f"{block}.experts.{expert}.{part}_proj" for part in ("gate", "up", "down")]
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (Projection(name, *shape) for name, shape in zip(names, shapes, strict=True))
    return gate, up, down


def layer_tensors(reader: CheckpointReader, layer: int, recipe: Recipe) -> dict[str, Promised]:
    """All tensors of the shard of one sparse layer, in the order in which they are written; `recipe` is fitting."""
    tensors: dict[str, Promised] = {}
    scale = NAMES[reader.expert_dtype]
    for expert in range(reader.config.num_experts):
        for module, rows, columns in expert_projections(reader, layer, expert):
            tensors[f"{module}.weight_packed"] = Promised("I32", (rows, -(-columns * recipe.bits // 32)))
            tensors[f"{module}.weight_scale"] = Promised(scale, (rows, columns // recipe.group))
            tensors[f"{module}.weight_shape"] = Promised("I64", (2,))
    return tensors


def dense_tensors(reader: CheckpointReader) -> dict[str, Promised]:
    """All tensors that are copied as they are, in the order of their names."""
    taken = {str(piece) for layer in reader.config.moe_layers for piece in reader.expert_tensors(layer).pieces()}
    left = sorted(reader.index.tensors.keys() - taken)
    return {name: Promised(info.dtype, info.shape) for name in left for _, info in (reader.index.tensors[name],)}


def shard_name(number: int, count: int) -> str:
    """The file name of shard `number`, from 1."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def quantization_config(reader: CheckpointReader, recipe: Recipe) -> dict[str, Any]:
    """What config.json says, in the words of compressed-tensors; `recipe` is fitting."""
    names = [part.module.rsplit(".", 1)[1] for part in expert_projections(reader, reader.config.moe_layers[0], 0)]
    weights: dict[str, Any] = {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": recipe.group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "mse",
        "observer_kwargs": {},
    }
    target = rf"re:.*\.experts\.\d+\.({'|'.join(names)})$"
    group = {"targets": [target], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": untouched(reader),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def untouched(reader: CheckpointReader) -> list[str]:
    """Modules with a matrix that stay as they are: attention, router, shared experts, embeddings, lm_head, parts that are not used."""
    return [
        name.removesuffix(".weight") for name, entry in dense_tensors(reader).items() if len(entry.shape) > 1 and name.endswith(".weight")
    ]


def check_source(reader: object, where: Path) -> CheckpointReader:
    """The reader, if what it reads can be quantised.

    Raises:
        UsageError: a GGUF file, or weights that are quantised already.
    """
    if not isinstance(reader, CheckpointReader):
        raise UsageError(f"{where} is a GGUF file; only folders of safetensors are quantised.", hint="Start from the original model.")
    if reader.formats.quantised_experts or reader.formats.dense:
        raise UsageError(f"{where} is quantised already; doing it twice would lose twice.", hint="Start from the original model.")
    return reader
