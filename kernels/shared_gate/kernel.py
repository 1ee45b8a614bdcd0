"""Triton: the gate of a shared expert, and its sum with the routed ones, one token a program."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_shared(x, gate, shared, routed, out, x_row, shared_row, routed_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < WIDTH
    weight = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    opening = tl.sum(tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32) * weight, 0)
    opening = 1.0 / (1.0 + tl.exp(-opening))
    value = tl.load(shared + row * shared_row + i, mask=inside, other=0.0).to(tl.float32) * opening
    value += tl.load(routed + row * routed_row + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), mask=inside)


def warps(width: int) -> int:
    """Warps of a program for rows of so many elements."""
    return int(max(1, min(8, triton.next_power_of_2(width) // 256)))


def add_shared(x: Tensor, gate: Tensor, shared: Tensor, routed: Tensor, out: Tensor) -> None:
    """x, shared, routed [T, d], elements of a row contiguous, gate [1, d] and out [T, d] contiguous."""
    tokens, width = x.shape
    _add_shared[(tokens,)](
        x, gate, shared, routed, out, x.stride(0), shared.stride(0), routed.stride(0),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=warps(width),
    )  # fmt: skip
