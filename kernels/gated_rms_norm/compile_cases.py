"""What `compile_check` compiles of this op: the norms of Qwen3.5-35B-A3B (heads of 128) and Granite 4.0 H small (one group of 8192)."""

from __future__ import annotations

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.gated_rms_norm import kernel


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32, few rows and many."""
    cases = []
    for name in ("bf16", "fp32"):
        signature = dict.fromkeys(("x", "gate", "weight", "out"), f"*{name}") | {"rows": "i32", "eps": "fp32"}
        strides = {"x_token": 4096, "x_group": 128, "gate_token": 12352, "gate_group": 128}
        for groups, n, first, rows in ((32, 128, True, 1), (32, 128, True, kernel.TILE // 128), (1, 8192, False, 1)):
            sizes = {"GROUPS": groups, "WEIGHTS": 1, "N": n, "NORM_FIRST": first, "BLOCK_R": rows, "BLOCK": n}
            warps = max(1, min(8, rows * n // 256))
            cases.append(CompileCase(f"norm {n} x {rows} {name}", kernel._gated_rms_norm, signature, sizes | strides, warps, 3))
    return cases
