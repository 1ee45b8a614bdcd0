"""Triton: the gated activation in one pass, its result contiguous."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_and_mul(x, out, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, ceil(WIDTH / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded in between, as in torch
    tl.store(out + row * WIDTH + i, (opened * up).to(dtype), mask=i < WIDTH)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """x [R, 2f], elements of a row contiguous, out [R, f] contiguous."""
    rows, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _silu_and_mul[(rows, triton.cdiv(width, block))](x, out, x.stride(0), WIDTH=width, BLOCK=block, num_warps=max(1, min(4, block // 256)))
