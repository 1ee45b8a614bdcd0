"""Quantised matrices and tiny quantised checkpoints, encoded and decoded by code that nobody here wrote.

Oracles: FP8 and MXFP4 blocks: transformers (`Fp8Dequantize`, `convert_moe_packed_tensors`). GPTQ: neural-compressor
(`INCWeightOnlyLinear` in optimum's format). AWQ: compressed-tensors' converter of AutoAWQ files. Everything of compressed-tensors: itself.
modelopt: its formula over compressed-tensors' unpacking. A decoder works in the precision of its scales; with `wide` they are float32.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_checkpoints import tiny_config, tiny_tensors
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
Tensors = dict[str, Tensor]


@contextmanager
def foreign_imports() -> Iterator[None]:
    """Import with the checkout off sys.path: transformers would take our kernels/ folder for the package `kernels`."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != REPOSITORY]
    try:
        yield
    finally:
        sys.path[:] = before


@dataclass(frozen=True)
class Kind:
    """One way to keep a matrix.

    config: its quantization_config. encode: float32 [N, K] -> suffix after the module's name -> tensor. decode: such tensors and [N, K] ->
    what the library makes of them, in its dtype, or in float32 if wide. multiples: N and K must be multiples of these. least_rows: of
    zero points of fewer, compressed-tensors 0.20 makes nonsense (it takes a column for contiguous).
    """

    config: dict[str, Any]
    encode: Callable[[Tensor], Tensors]
    decode: Callable[[Tensors, tuple[int, int], bool], Tensor]
    multiples: tuple[int, int] = (1, 1)
    least_rows: int = 1


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether float32 numbers are, in the other's dtype, the same bits (NaN like NaN)."""
    assert ours.dtype is torch.float32
    rounded = ours.to(theirs.dtype)
    return bool(((rounded == theirs) | (rounded.isnan() & theirs.isnan())).all()) and rounded.shape == theirs.shape


# FP8 in blocks


def _fp8(weight: Tensor, rows: int, columns: int, scale_dtype: torch.dtype) -> Tensors:
    n, k = weight.shape
    padded = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns)
    padded[:n, :k] = weight
    blocks = padded.view(-(-n // rows), rows, -(-k // columns), columns)
    scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-12)
    if scale_dtype is torch.float8_e8m0fnu:
        scale = torch.exp2(scale.log2().ceil())
    stored = scale.to(scale_dtype)
    codes = (blocks / stored.float()[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)[:n, :k].contiguous()
    return {".weight": codes, ".weight_scale_inv": stored}


def _fp8_decode(tensors: Tensors, shape: tuple[int, int], wide: bool) -> Tensor:
    with foreign_imports():
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scale = tensors[".weight"], tensors[".weight_scale_inv"]
    rows, columns = 128, 128  # the oracle wants whole blocks
    padded = torch.zeros(scale.shape[0] * rows, scale.shape[1] * columns).to(torch.float8_e4m3fn)
    padded.view(torch.uint8)[: shape[0], : shape[1]] = codes.view(torch.uint8)
    return Fp8Dequantize(None)._dequantize_one(padded, scale, torch.float32)[: shape[0], : shape[1]]


def fp8(scale_dtype: torch.dtype) -> Kind:
    """Blocks of 128 by 128."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    if scale_dtype is torch.float8_e8m0fnu:
        config["scale_fmt"] = "ue8m0"
    return Kind(config, lambda weight: _fp8(weight, 128, 128, scale_dtype), _fp8_decode)


# GPTQ


def _rounded(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] and, for each group, scale and zero point [N, groups]; unsigned codes."""
    n, k = weight.shape
    group = group if group > 0 else k
    groups, top = -(-k // group), 2**bits - 1
    padded = torch.nn.functional.pad(weight, (0, groups * group - k)).view(n, groups, group)
    low, high = padded.amin(2).clamp_max(0), padded.amax(2).clamp_min(0)
    if symmetric:
        scale = torch.maximum(-low, high).clamp_min(1e-6) / (top // 2)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        scale = (high - low).clamp_min(1e-6) / top
        zero = (-low / scale).round().clamp(0, top)
    codes = (padded / scale[..., None] + zero[..., None]).round().clamp(0, top).view(n, -1)[:, :k]
    return codes, scale, zero


def _gptq_layer(n: int, k: int, bits: int, group: int) -> Any:
    with foreign_imports():
        logging.getLogger("neural_compressor").setLevel(logging.ERROR)
        from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear

    return INCWeightOnlyLinear(k, n, bits=bits, group_size=group if group > 0 else k, zp=True, use_optimum_format=True)


def _gptq_encode(weight: Tensor, bits: int, group: int, symmetric: bool, version: int) -> Tensors:
    n, k = weight.shape
    codes, scale, zero = _rounded(weight, group, bits, symmetric)
    layer = _gptq_layer(n, k, bits, group)
    layer.pack(codes.to(torch.int32), scale, zero.to(torch.int32) + (version == 2), None)
    order = (torch.arange(k) // (group if group > 0 else k)).to(torch.int32)
    return {".qweight": layer.qweight, ".qzeros": layer.qzeros, ".scales": layer.scales, ".g_idx": order}


def _gptq_decode(tensors: Tensors, shape: tuple[int, int], wide: bool, bits: int, group: int, version: int) -> Tensor:
    layer = _gptq_layer(*shape, bits, group)
    layer.qweight, layer.scales, layer.qzeros = tensors[".qweight"], tensors[".scales"], tensors[".qzeros"]
    if wide:
        layer.float_type, layer.scales = torch.float32, layer.scales.float()
    if version == 1:
        return layer.recover()
    # the oracle reads version 1: to it, zero points that are stored as they are lie one too high
    unpacked = layer.unpack()
    zero = (unpacked["zp"].to(torch.int32) - 1) % 2**bits
    spread = zero.repeat_interleave(group if group > 0 else shape[1], 1)[:, : shape[1]]
    scale = unpacked["scales"].repeat_interleave(group if group > 0 else shape[1], 1)[:, : shape[1]]
    return (unpacked["int_weight"] - spread).to(scale.dtype) * scale


def gptq(bits: int = 4, group: int = 32, *, symmetric: bool = True, version: int = 1) -> Kind:
    """Version 1 or 2 of the arrangement."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Kind(
        config,
        lambda weight: _gptq_encode(weight, bits, group, symmetric, version),
        lambda tensors, shape, wide: _gptq_decode(tensors, shape, wide, bits, group, version),
        (32 // bits, 32 // bits),
    )


# AWQ


def _awq_pack(codes: Tensor) -> Tensor:
    """[rows, N] codes -> int32 [rows, N / 8] in AWQ's order."""
    nibbles = codes.to(torch.int64).view(codes.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return (nibbles << torch.arange(0, 32, 4)).sum(2).to(torch.int32)


def _awq_encode(weight: Tensor, group: int, dtype: torch.dtype) -> Tensors:
    codes, scale, zero = _rounded(weight, group, 4, False)
    return {".qweight": _awq_pack(codes.t()), ".qzeros": _awq_pack(zero.t()), ".scales": scale.t().contiguous().to(dtype)}


def _awq_decode(tensors: Tensors, wide: bool, group: int) -> Tensor:
    with foreign_imports():
        from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    converter = AutoAWQConverter.from_autoawq_config({"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"})
    converted = converter.process({f"x{suffix}": tensor for suffix, tensor in tensors.items()})
    return compressed_decode(
        {name.removeprefix("x"): tensor for name, tensor in converted.items()}, pack(4, group if group > 0 else None, False).config, wide
    )


def awq(group: int = 32, dtype: torch.dtype = torch.float16) -> Kind:
    """With zero points."""
    config: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    encode = partial(_awq_encode, group=group, dtype=dtype)
    return Kind(config, encode, lambda tensors, shape, wide: _awq_decode(tensors, wide, group), (8, max(1, group)), 16)


# compressed-tensors


def _scheme(config: dict[str, Any]) -> tuple[Any, Any]:
    with foreign_imports():
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    return scheme, BaseCompressor.get_value_from_registry(config["format"])


def _qparams(weight: Tensor, args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    n, k = weight.shape
    whole = None
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns)
        padded[:n, :k] = weight
        pieces = padded.view(-(-n // rows), rows, -(-k // columns), columns)
        low, high = pieces.amin((1, 3)), pieces.amax((1, 3))
    elif args.strategy == "tensor":
        low, high = weight.min().view(1), weight.max().view(1)
    else:
        pieces = weight.view(n, -1, args.group_size or k)
        low, high = pieces.amin(2), pieces.amax(2)
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    return scale, zero, whole


def _compressed_encode(weight: Tensor, config: dict[str, Any], scale_dtype: torch.dtype) -> Tensors:
    scheme, compressor = _scheme(config)
    scale, zero, whole = _qparams(weight, scheme.weights)
    if scheme.weights.type == "int" or (scheme.weights.num_bits == 8 and scheme.weights.scale_dtype is None):
        scale = scale.to(scale_dtype)
    state = {"weight": weight, "weight_scale": scale}
    if not scheme.weights.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    if whole is not None:
        state["weight_global_scale"] = whole
    return {f".{name}": tensor for name, tensor in compressor.compress(state, scheme).items()}


def compressed_decode(tensors: Tensors, config: dict[str, Any], wide: bool) -> Tensor:
    """What compressed-tensors makes of the tensors of one matrix."""
    scheme, compressor = _scheme(config)
    state = {suffix[1:]: tensor for suffix, tensor in tensors.items()}
    if wide and scheme.weights.type == "float" and scheme.weights.num_bits == 4:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        rows, half = state["weight_packed"].shape
        values = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, torch.float32)
        scale = compressor._decompress_scale(state["weight_scale"], torch.float32)
        found: Tensor = dequantize(values, scale, args=scheme.weights, global_scale=state.get("weight_global_scale"))
        return found
    if wide and state["weight_scale"].dtype is not torch.uint8:
        state["weight_scale"] = state["weight_scale"].float()
    weight: Tensor = compressor.decompress(state, scheme)["weight"]
    return weight


def _compressed(
    fmt: str,
    weights: dict[str, Any],
    scale_dtype: torch.dtype = torch.bfloat16,
    multiples: tuple[int, int] = (1, 1),
    least_rows: int = 1,
) -> Kind:
    config = {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}},
    }
    return Kind(
        config,
        lambda weight: _compressed_encode(weight, config, scale_dtype),
        lambda tensors, shape, wide: compressed_decode(tensors, config, wide),
        multiples,
        least_rows,
    )


def _width(group: int | None) -> dict[str, Any]:
    return {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}


def pack(bits: int, group: int | None, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16) -> Kind:
    """pack-quantized integers; group None: one scale a row."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **_width(group)}
    return _compressed("pack-quantized", weights, scale_dtype, (1, group or 1), 1 if symmetric else 16)


def plain_ints(group: int | None, symmetric: bool = True) -> Kind:
    """int-quantized."""
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, **_width(group)}
    return _compressed("int-quantized", weights, torch.float32, (1, group or 1))


def floats(strategy: str) -> Kind:
    """float-quantized: FP8 by tensor, channel, or block."""
    extra: dict[str, Any] = {"block_structure": [16, 32]} if strategy == "block" else {}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **extra}
    return _compressed("float-quantized", weights, torch.bfloat16, (16, 32) if strategy == "block" else (1, 1))


def nvfp4() -> Kind:
    """nvfp4-pack-quantized."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return _compressed("nvfp4-pack-quantized", weights, multiples=(1, 16))


def mxfp4() -> Kind:
    """mxfp4-pack-quantized."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return _compressed("mxfp4-pack-quantized", weights, multiples=(1, 32))


def mxfp8() -> Kind:
    """mxfp8-quantized."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return _compressed("mxfp8-quantized", weights, multiples=(1, 32))


# modelopt


def _modelopt_encode(weight: Tensor) -> Tensors:
    tensors = nvfp4().encode(weight)
    factor = 1 / tensors[".weight_global_scale"].reshape(())
    return {".weight": tensors[".weight_packed"], ".weight_scale": tensors[".weight_scale"], ".weight_scale_2": factor}


def _modelopt_decode(tensors: Tensors, shape: tuple[int, int], wide: bool) -> Tensor:
    with foreign_imports():
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    values = unpack_fp4_from_uint8(tensors[".weight"], shape[0], shape[1], torch.float32)
    scales = tensors[".weight_scale"].float() * tensors[".weight_scale_2"]
    return values * scales.repeat_interleave(16, 1)


def modelopt() -> Kind:
    """NVFP4 of modelopt: its own order of multiplications (scale by scale, then code)."""
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    return Kind(config, _modelopt_encode, _modelopt_decode, (1, 16))


# gpt-oss


def _blocks_encode(weight: Tensor) -> Tensors:
    tensors = mxfp4().encode(weight)
    packed = tensors[".weight_packed"]
    return {"_blocks": packed.view(len(packed), -1, 16), "_scales": tensors[".weight_scale"]}


def _blocks_decode(tensors: Tensors, shape: tuple[int, int], wide: bool) -> Tensor:
    with foreign_imports():
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(tensors["_blocks"][None], tensors["_scales"][None], dtype=torch.float32)[0].t()


def mxfp4_blocks() -> Kind:
    """As gpt-oss: experts only, all of a layer in one tensor."""
    return Kind({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, _blocks_encode, _blocks_decode, (1, 32))


KINDS: dict[str, Kind] = {
    "fp8-f32": fp8(torch.float32),
    "fp8-bf16": fp8(torch.bfloat16),
    "fp8-e8m0": fp8(torch.float8_e8m0fnu),
    "gptq": gptq(),
    "gptq-asymmetric": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, version=2),
    "gptq-whole-rows": gptq(group=-1),
    "gptq-int8": gptq(8),
    "awq": awq(),
    "awq-whole-rows": awq(-1),
    "int4": pack(4, 32),
    "int4-asymmetric": pack(4, 32, False),
    "int4-channel": pack(4, None),
    "int4-channel-asymmetric": pack(4, None, False, torch.float16),
    "int8-packed": pack(8, 32),
    "int8-packed-asymmetric": pack(8, 32, False),
    "int8": plain_ints(None),
    "int8-asymmetric": plain_ints(None, False),
    "int8-groups": plain_ints(32),
    "fp8-channel": floats("channel"),
    "fp8-tensor": floats("tensor"),
    "fp8-block": floats("block"),
    "nvfp4": nvfp4(),
    "mxfp4": mxfp4(),
    "mxfp8": mxfp8(),
    "modelopt": modelopt(),
}
"""What keeps matrices one by one."""

_KEPT = ("embed_tokens", "lm_head", "shared_expert_gate", "conv1d", "in_proj_a.", "in_proj_b.")


def write_quantised_checkpoint(
    folder: Path,
    family: str,
    kind: Kind,
    *,
    seed: int = 0,
    router: bool = False,
    keep: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> tuple[Path, Path]:
    """A tiny checkpoint with quantised matrices, and beside it the plain one that its library makes of it.

    Args:
        router: quantise routers as well.
        keep: names of matrices that stay plain, beyond those that no format quantises.
        options: of `tiny_config`.

    Returns:
        Folders of the quantised and the plain checkpoint.
    """
    config = tiny_config(family, **options)
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tiny_tensors(config, family, seed=seed).items():
        base = name.removesuffix(".weight")
        kept = tensor.ndim != 2 or any(piece in name for piece in _KEPT) or (not router and name.endswith("mlp.gate.weight")) or keep(name)
        if kept or len(tensor) < kind.least_rows or any(size % least for size, least in zip(tensor.shape, kind.multiples, strict=True)):
            stored[name] = plain[name] = tensor
            continue
        parts = kind.encode(tensor)
        stored |= {base + suffix: part.contiguous() for suffix, part in parts.items()}
        plain[name] = kind.decode(parts, (tensor.shape[0], tensor.shape[1]), True).float()
    return (
        _write(folder / "quantised", config | {"quantization_config": kind.config}, stored),
        _write(folder / "plain", config, plain),
    )


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
