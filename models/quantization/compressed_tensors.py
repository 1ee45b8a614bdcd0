"""The quantization_config of compressed-tensors (llm-compressor, vLLM, Red Hat). `quant_method: compressed-tensors`.

Groups of modules (`config_groups`) have one kind of weight each; which module is of which group, the tensors show: their names, dtypes and
shapes leave no choice. So patterns of module names, programs from a stranger, are read and never run.
"""

from __future__ import annotations

from typing import Any

from rimuru_models.fields import Fields
from rimuru_models.headers import brief
from rimuru_models.quantization.compressed_ints import PackedInts, PlainInts
from rimuru_models.quantization.fp4 import Mxfp4, Nvfp4
from rimuru_models.quantization.fp8 import MAX_BLOCK, Float8
from rimuru_models.quantization.gptq import MAX_GROUP
from rimuru_models.quantization.scheme import Scheme

_MAX_GROUPS = 256
_MAX_PATTERNS = 1 << 16
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)


def read_compressed_tensors(fields: Fields) -> tuple[Scheme, ...]:
    """All kinds of weights that its groups have.

    Raises:
        CheckpointError: a kind that is not supported, sparsity, or transforms of activations.
    """
    whole = fields.text("format", "dense")
    _known(fields, whole)
    if fields.mapping("transform_config").get("config_groups"):
        raise fields.error("transform_config rotates activations (QuIP, SpinQuant), which is not supported.")
    sparse = fields.mapping("sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise fields.error(f"sparsity_config has the format {brief(sparse)}, which is not supported; 'dense' is.")
    fields.list_of("ignore", str, _MAX_PATTERNS)
    groups = fields.mapping("config_groups")
    if len(groups) > _MAX_GROUPS:
        raise fields.error(f"config_groups has {len(groups)} groups; at most {_MAX_GROUPS} are read.")
    found: dict[Scheme, None] = {}
    for name, group in groups.items():
        where = f"{fields.where}: config_groups: {name[:40]!r}"
        if not isinstance(group, dict):
            raise fields.error(f"config_groups: {name[:40]!r} is {brief(group)}, expected an object.")
        inner = Fields(group, where)
        inner.list_of("targets", str, _MAX_PATTERNS)
        own = inner.text("format", whole)
        _known(inner, own)
        if inner.present("weights"):
            found |= dict.fromkeys(_schemes(Fields(inner.mapping("weights"), f"{where}: weights"), own))
    return tuple(found)


def _known(fields: Fields, name: str) -> None:
    if name not in _FORMATS:
        raise fields.error(f"the format {name[:40]!r} is not supported; {', '.join(map(repr, _FORMATS))} are.")


def _schemes(weights: Fields, name: str) -> tuple[Scheme, ...]:
    bits = weights.integer("num_bits", 1, 64, 8)
    kind = weights.text("type", "int")
    symmetric = weights.flag("symmetric", True)
    group = weights.integer("group_size", -1, MAX_GROUP, None)
    strategy = weights.text("strategy", None) or ("tensor" if group is None else "channel" if group == -1 else "group")
    if weights.values.get("actorder") in (True, "group"):
        raise weights.error("actorder 'group' (inputs out of order) is not supported; 'weight' and 'static' are.")
    if strategy in ("group", "tensor_group") and (group is None or group < 1):
        raise weights.error(f"group_size is {brief(group)}, but the strategy is {strategy!r}: a size from 1 is needed.")
    columns = group if strategy in ("group", "tensor_group") else 0
    described = f"weights of type {kind[:20]!r} with {bits} bits, strategy {strategy[:20]!r}, format {name!r}"
    if kind == "int" and strategy in ("group", "channel", "tensor"):
        if bits == 8:
            return (PlainInts(columns, symmetric), PackedInts(8, columns, symmetric))
        if bits == 4:
            return (PackedInts(4, columns, symmetric),)
    if kind == "float" and bits == 8 and symmetric:
        if strategy == "block":
            return (Float8(*_block(weights), ".weight_scale"),)
        if strategy in ("group", "channel", "tensor"):
            return (Float8(1, columns, ".weight_scale"),)
    if kind == "float" and bits == 4 and symmetric:
        if columns == 16:
            return (Nvfp4("compressed-tensors"),)
        if columns == 32:
            return (Mxfp4(blocks=False),)
    raise weights.error(
        f"{described} are not supported.",
        hint="Supported: int4 and int8 in groups or whole rows, FP8 in blocks, groups or whole rows, NVFP4 and MXFP4.",
    )


def _block(weights: Fields) -> tuple[int, int]:
    block: Any = weights.list_of("block_structure", int, 2)
    if block is None or len(block) != 2 or not all(0 < size <= MAX_BLOCK for size in block):
        raise weights.error(f"block_structure must be two sizes from 1 to {MAX_BLOCK}.")
    return block[0], block[1]
