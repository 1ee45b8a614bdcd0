"""Triton: RMSNorm and a silu gate in one pass over x, in either order."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Elements of a program where there are many rows; few rows take a program each, so that all multiprocessors take part."""
FEW_ROWS = 512


@triton.jit(do_not_specialize=["rows"])  # it changes from call to call
def _gated_rms_norm(
    x, gate, weight, out, rows, eps, x_token, x_group, gate_token, gate_group,
    GROUPS: tl.constexpr, WEIGHTS: tl.constexpr, N: tl.constexpr, NORM_FIRST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of [tokens * GROUPS, N]; WEIGHTS rows of weights take turns."""
    row, i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    token, group = row // GROUPS, row % GROUPS
    mask = (row[:, None] < rows) & (i[None, :] < N)
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(x + (token * x_token + group * x_group)[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    opening = tl.load(gate + (token * gate_token + group * gate_group)[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    opening = opening / (1.0 + tl.exp(-opening))
    scale = tl.load(weight + (group % WEIGHTS)[:, None] * N + i[None, :], mask=mask, other=0.0).to(tl.float32)
    if not NORM_FIRST:
        value *= opening
    inverse = tl.rsqrt(tl.sum(value * value, 1) / N + eps)[:, None]
    normed = ((value * inverse).to(dtype).to(tl.float32) * scale).to(dtype)
    if NORM_FIRST:
        normed = (normed.to(tl.float32) * opening).to(dtype)
    tl.store(out + row[:, None] * N + i[None, :], normed, mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor, norm_before_gate: bool) -> None:
    """x, gate [T, G, n], elements of a row contiguous, weight [n] or [G, n] and out [T, G, n], contiguous."""
    tokens, groups, n = x.shape
    block = triton.next_power_of_2(n)
    rows = tokens * groups
    block_r = 1 if rows <= FEW_ROWS else max(1, TILE // block)
    _gated_rms_norm[(triton.cdiv(rows, block_r),)](
        x, gate, weight, out, rows, eps, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1),
        GROUPS=groups, WEIGHTS=weight.numel() // n, N=n, NORM_FIRST=norm_before_gate, BLOCK_R=block_r, BLOCK=block,
        num_warps=max(1, min(8, block_r * block // 256)),
    )  # fmt: skip
