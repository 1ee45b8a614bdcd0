"""What `compile_check` compiles of this op: the shared experts of Qwen3.5-35B-A3B and Qwen1.5-MoE-A2.7B."""

from __future__ import annotations

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.silu_and_mul import kernel


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32."""
    return [
        CompileCase(
            f"{width} {name}",
            kernel._silu_and_mul,
            {"x": f"*{name}", "out": f"*{name}", "x_row": "i32"},
            {"WIDTH": width, "BLOCK": min(kernel.BLOCK, width)},
            max(1, min(4, width // 256)),
            3,
        )
        for name in ("bf16", "fp32")
        for width in (512, 5632)
    ]
