"""Triton: a few rows times a large matrix; every program reads some whole rows of the matrix once, for all rows of x."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 2
"""Matrix rows of a program; thousands of programs keep enough loads in flight."""
COLUMNS = 1024
WARPS = 4


@triton.jit
def _row_linear(
    x, weight, bias, out, N,
    T: tl.constexpr, BLOCK_T: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [T, N] = x [T, K] weight [N, K]^T + bias. Grid (ceil(N / ROWS),)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, N - 1).to(tl.int64)
    col, t = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, K, COLUMNS):
        if start + COLUMNS <= K:
            part = tl.load(weight + inside[:, None] * K + (start + col)[None, :])
        else:
            part = tl.load(weight + inside[:, None] * K + (start + col)[None, :], mask=(start + col < K)[None, :], other=0.0)
        keep = (t < T)[:, None] & (start + col < K)[None, :]
        value = tl.load(x + t[:, None] * K + (start + col)[None, :], mask=keep, other=0.0)
        total += value.to(tl.float32)[:, None, :] * part.to(tl.float32)[None, :, :]
    y = tl.sum(total, 2)
    if bias is not None:
        y += tl.load(bias + inside).to(tl.float32)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * N + row[None, :], y.to(out.dtype.element_ty), mask=(t < T)[:, None] & (row < N)[None, :])


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `rimuru_kernels.row_linear.row_linear`; arguments are taken as checked, all contiguous."""
    tokens, depth = x.shape
    n = weight.shape[0]
    columns = min(COLUMNS, triton.next_power_of_2(depth))
    _row_linear[(triton.cdiv(n, ROWS),)](
        x, weight, bias, out, n, T=tokens, BLOCK_T=triton.next_power_of_2(tokens), K=depth, ROWS=ROWS, COLUMNS=columns, num_warps=WARPS
    )  # fmt: skip
