"""What `compile_check` compiles of this op: its kernels for the layers of Qwen3.5-35B-A3B (32 value heads, 16 key heads, all of 128)."""

from __future__ import annotations

from typing import Any

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.gated_delta_rule import chunk_kernel, kernel
from rimuru_kernels.state_pages import ENTRY_BYTES

HEADS, KEY_HEADS, DIM = 32, 16, 128

# Rows of q, k and v are rows of one matrix. As constants, for the launcher too knows that 16 divides them, without which loads are narrow.
_STRIDES = {f"{name}_row": (2 * KEY_HEADS + HEADS) * DIM for name in "qkv"} | {f"{name}_head": DIM for name in "qkv"}


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32; a kernel takes no argument of its signature that it does not name."""
    return [*_cases("bf16", half=True), *_cases("fp32", half=False)]


def _cases(name: str, half: bool) -> list[CompileCase]:
    rows = dict.fromkeys(("q", "k", "v", "w", "u", "out", "noted", "a", "b"), f"*{name}")
    wide = dict.fromkeys(("log_decay", "beta", "states", "totals", "k_scales", "a_log", "dt_bias"), "*fp32")
    numbers = dict.fromkeys(("num_seqs", "tokens", "a_stride", "b_stride", "count"), "i32")
    signature = rows | wide | numbers | {"places": "*i32", "cu_seqlens": "*i32", "scale": "fp32"}
    sizes: dict[str, Any] = {"HEADS": HEADS, "RATIO": HEADS // KEY_HEADS, "DK": DIM, "DV": DIM, "BLOCK_K": DIM}
    unit = {"UNIT": ENTRY_BYTES // 4}
    chunks = sizes | {"PRECISION": chunk_kernel.precision(half)}
    warps = chunk_kernel.warps(half)
    step, scan, output = kernel.STEP_TILES, chunk_kernel.SCAN_COLUMNS, chunk_kernel.output_columns(half)
    cases = [
        CompileCase(f"gates {name}", kernel._gates, signature, {"HEADS": HEADS, "BLOCK": 256}, 2, 3),
        CompileCase(f"step {name}", kernel._step, signature, sizes | unit | {"BLOCK_V": step.columns}, step.warps, 3),
        CompileCase(f"prepare {name}", chunk_kernel._prepare, signature, chunks | {"BLOCK_V": DIM}, warps, 3),
        CompileCase(f"scan {name}", chunk_kernel._scan, signature, chunks | unit | {"BLOCK_V": scan}, warps, chunk_kernel.stages(half)),
        CompileCase(f"output {name}", chunk_kernel._output, signature, chunks | {"BLOCK_V": output}, warps, 3),
    ]
    cases = [case._replace(constants=case.constants | {n: v for n, v in _STRIDES.items() if n in case.kernel.arg_names}) for case in cases]
    # Of the other targets each compiles products of float32 as 8.6 does.
    return cases if half else [case._replace(targets=(86, 90)) for case in cases]
