"""What `compile_check` compiles of this op: one row and the most rows, for the projections of one real layer."""

from __future__ import annotations

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.row_linear import MAX_ROWS, kernel


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32, with bias, 2048 and 4096 columns."""
    cases = []
    for name in ("bf16", "fp32"):
        signature = dict.fromkeys(("x", "weight", "bias", "out"), f"*{name}") | {"N": "i32"}
        for tokens, depth in ((1, 2048), (MAX_ROWS, 4096)):
            constants = {"T": tokens, "BLOCK_T": tokens, "K": depth, "ROWS": kernel.ROWS, "COLUMNS": kernel.COLUMNS}
            cases.append(CompileCase(f"row_linear {name} {tokens}x{depth}", kernel._row_linear, signature, constants, kernel.WARPS, 3))
    return cases
