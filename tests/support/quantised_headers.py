"""Headers of released quantised checkpoints, written down by hand as the hub has them: names, dtypes and shapes, no data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rimuru_models.config import ModelConfig
from rimuru_models.headers import DTYPE_BITS, SafetensorsHeader, TensorInfo
from rimuru_models.index import CheckpointIndex
from rimuru_models.layout import dense_shapes

Entries = dict[str, tuple[str, tuple[int, ...]]]


def fp8(base: str, rows: int, columns: int) -> Entries:
    """Qwen's FP8: blocks of 128, bfloat16 scales."""
    scales = (-(-rows // 128), -(-columns // 128))
    return {f"{base}.weight": ("F8_E4M3", (rows, columns)), f"{base}.weight_scale_inv": ("BF16", scales)}


def gptq(base: str, rows: int, columns: int) -> Entries:
    """GPTQ with 4 bits, groups of 128."""
    groups = columns // 128
    return {
        f"{base}.qweight": ("I32", (columns // 8, rows)),
        f"{base}.qzeros": ("I32", (groups, rows // 8)),
        f"{base}.scales": ("F16", (groups, rows)),
        f"{base}.g_idx": ("I32", (columns,)),
    }


def nvfp4(base: str, rows: int, columns: int) -> Entries:
    """NVFP4 of llm-compressor, with a scale for activations."""
    return {
        f"{base}.weight_packed": ("U8", (rows, columns // 2)),
        f"{base}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{base}.weight_global_scale": ("F32", (1,)),
        f"{base}.input_global_scale": ("F32", (1,)),
    }


MAKERS = {"fp8": fp8, "gptq": gptq, "nvfp4": nvfp4}


def released_index(config: ModelConfig, kind: str, *, router: bool = False, plain: str = "BF16") -> CheckpointIndex:
    """Headers of a model whose experts and attention are quantised, and perhaps its routers.

    Args:
        kind: a key of `MAKERS`.
        plain: dtype of everything else.
    """
    make, entries = MAKERS[kind], dict[str, Any]()
    for name, shape in dense_shapes(config).items():
        quantised = ("_proj.weight" in name and len(shape) == 2 and shape[0] % 8 == 0) or (router and name.endswith("mlp.gate.weight"))
        entries |= make(name.removesuffix(".weight"), *shape) if quantised else {name: (plain, shape)}
    f, d = config.expert_intermediate, config.hidden_size
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            for part, (rows, columns) in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
                entries |= make(f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj", rows, columns)
    path, start, tensors = Path("model") / "model.safetensors", 0, {}
    for name, (dtype, shape) in entries.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        tensors[name] = TensorInfo(dtype, shape, start, start + size)
        start += size
    return CheckpointIndex(Path("model"), {name: (path, info) for name, info in tensors.items()}, {path: SafetensorsHeader(tensors, 8, {})})
