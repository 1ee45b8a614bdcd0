"""What `compile_check` compiles of this op: the step of Granite-4.0-H-Small (128 heads of 64, one group, states of 128)."""

from __future__ import annotations

from rimuru_kernels.compile_check import CompileCase
from rimuru_kernels.mamba2 import chunk_kernel, kernel
from rimuru_kernels.state_pages import ENTRY_BYTES

HEADS, P, N = 128, 64, 128


def compile_cases() -> list[CompileCase]:
    """bfloat16 and float32."""
    inner = HEADS * P + 2 * N
    constants = {"x_row": inner, "x_head": P, "b_row": inner, "b_group": N, "c_row": inner, "c_group": N}
    constants |= {"HEADS": HEADS, "RATIO": HEADS, "P": P, "N": N, "UNIT": ENTRY_BYTES // 4, "BLOCK_P": kernel.ROWS, "BLOCK_N": N}
    wide = dict.fromkeys(("dt", "a_log", "d", "states"), "*fp32") | {"places": "*i32", "cu_seqlens": "*i32"}
    chunks = {name: value for name, value in constants.items() if name != "BLOCK_P"} | {"BLOCK_P": chunk_kernel.ROWS}
    lengths = {"dt": "*bf16", "dt_bias": "*fp32", "out": "*fp32", "least": "fp32", "largest": "fp32", "dt_row": "i32", "count": "i32"}
    return [
        CompileCase("time steps", kernel._time_steps, lengths, {"HEADS": HEADS, "BLOCK": 256}, 2, 3),
        *(
            CompileCase(f"step {name}", kernel._step, dict.fromkeys(("x", "b", "c", "out"), f"*{name}") | wide, constants, kernel.WARPS, 3)
            for name in ("bf16", "fp32")
        ),
        *(
            CompileCase(
                f"chunks {name}",
                chunk_kernel._chunks,
                dict.fromkeys(("x", "b", "c", "out"), f"*{name}") | wide,
                chunks | {"PRECISION": chunk_kernel.precision(half)},
                chunk_kernel.warps(half),
                chunk_kernel.stages(half),
            )
            for name, half in (("bf16", True), ("fp32", False))
        ),
    ]
