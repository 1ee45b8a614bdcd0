"""What `compile_check` compiles of this op: rows of Qwen3.5-35B-A3B and of 397B-A17B."""

from __future__ import annotations

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.shared_gate import kernel


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32."""
    rows = {"x_row": "i32", "shared_row": "i32", "routed_row": "i32"}
    return [
        CompileCase(
            f"{width} {name}",
            kernel._add_shared,
            dict.fromkeys(("x", "gate", "shared", "routed", "out"), f"*{name}") | rows,
            {"WIDTH": width, "BLOCK": width},
            kernel.warps(width),
            3,
        )
        for name in ("bf16", "fp32")
        for width in (2048, 4096)
    ]
