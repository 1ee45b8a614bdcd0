"""What `compile_check` compiles of this op: its kernels for the layers of Qwen3.5-35B-A3B (8192 channels, 4 taps)."""

from __future__ import annotations

from typing import Any

from rimuru_kernels.causal_conv1d import kernel
from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.state_pages import ENTRY_BYTES

C, TAPS = 8192, 4


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32, states in the same dtype."""
    cases = []
    for name, itemsize in (("bf16", 2), ("fp32", 4)):
        signature = dict.fromkeys(("x", "weight", "bias", "out", "states"), f"*{name}")
        signature |= {"places": "*i32", "cu_seqlens": "*i32", "num_seqs": "i32"}
        sizes: dict[str, Any] = {"C": C, "KEPT": TAPS - 1, "UNIT": ENTRY_BYTES // itemsize, "x_row": C}
        few = sizes | {"BLOCK_K": TAPS, "BLOCK": kernel.STEP_CHANNELS}
        many = sizes | {"ROWS": kernel.TILE_ROWS, "BLOCK": kernel.CHANNELS}
        cases += [
            CompileCase(f"step {name}", kernel._step, signature, few, kernel.WARPS, 3),
            CompileCase(f"rows {name}", kernel._rows, signature, many, kernel.WARPS, 3),
            CompileCase(f"keep {name}", kernel._keep, signature, few, kernel.WARPS, 3),
        ]
    return cases
