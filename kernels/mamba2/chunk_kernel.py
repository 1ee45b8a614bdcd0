"""Triton kernel of the Mamba-2 state space for sequences of several rows, in chunks of 64 (letters as in reference.py).

A program holds some rows of one head's state in registers and goes from chunk to chunk: what the rows of a chunk read from one another,
what they read from the state before it, and the state behind it. b and c are shared by many heads; c bᵀ is cheaper computed anew than kept.

Products of half-precision inputs take x, b and c as they are and are summed in float32; decays and lengths of steps scale the factors. The
state itself stays in float32, and is rounded for the product with c.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.state_pages import Places

CHUNK = 64
ROWS = 32
"""Rows of a head's state [P, N] that a program holds; also the narrowest product, see `gated_delta_rule.chunk_kernel`."""
MAX_STATE = 256
"""Longest rows of a state whose tiles fit the shared memory of every GPU."""
_C: tl.constexpr = tl.constexpr(CHUNK)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """Rounds; float16 takes its largest number for what is larger."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit
def _chunks(
    x, dt, a_log, b, c, d, states, places, cu_seqlens, out, x_row, x_head, b_row, b_group, c_row, c_group,
    HEADS: tl.constexpr, RATIO: tl.constexpr, P: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sequences of more than one row. Grid (ceil(P / BLOCK_P), HEADS, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - start
    if length <= 1:
        return
    i, p, n = tl.arange(0, _C), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    place = tl.load(places + seq).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    if place < 0:
        for first in range(0, length, _C):
            row = (start + first + i).to(tl.int64)
            keep = (first + i < length)[:, None] & (p[None, :] < P)
            tl.store(out + (row[:, None] * HEADS + head) * P + p[None, :], tl.zeros([_C, BLOCK_P], dtype), mask=keep)
        return
    inside = (p[:, None] < P) & (n[None, :] < N)
    page = states + place * UNIT + head * (P * N) + p[:, None] * N + n[None, :]
    state = tl.load(page, mask=inside, other=0.0)
    rate = -tl.exp(tl.load(a_log + head))
    skip = tl.load(d + head)
    for first in range(0, length, _C):
        row, valid = (start + first + i).to(tl.int64), first + i < length
        steps = tl.load(dt + row * HEADS + head, mask=valid, other=0.0)
        total = tl.cumsum(steps * rate, 0)
        last = tl.sum(steps * rate, 0)
        vectors = valid[:, None] & (n[None, :] < N)
        write = tl.load(b + row[:, None] * b_row + head // RATIO * b_group + n[None, :], mask=vectors, other=0.0)
        read = tl.load(c + row[:, None] * c_row + head // RATIO * c_group + n[None, :], mask=vectors, other=0.0)
        keep = valid[:, None] & (p[None, :] < P)
        value = tl.load(x + row[:, None] * x_row + head * x_head + p[None, :], mask=keep, other=0.0)
        scores = tl.dot(read, tl.trans(write), input_precision=PRECISION)
        # Above the diagonal the differences are positive and might overflow.
        visible = (i[:, None] >= i[None, :]) & valid[:, None]
        scores *= tl.exp(tl.where(visible, total[:, None] - total[None, :], float("-inf"))) * steps[None, :]
        y = tl.dot(read, tl.trans(_narrow(state, dtype)), input_precision=PRECISION) * tl.exp(total)[:, None]
        y = tl.dot(_narrow(scores, dtype), value, y, input_precision=PRECISION)
        y += skip * value.to(tl.float32)
        tl.store(out + (row[:, None] * HEADS + head) * P + p[None, :], _narrow(y, dtype), mask=keep)
        weighed = value.to(tl.float32) * (tl.exp(last - total) * steps)[:, None]
        state = tl.dot(tl.trans(_narrow(weighed, dtype)), write, state * tl.exp(last), input_precision=PRECISION)
    tl.store(page, state, mask=inside)


def precision(half: bool) -> str:
    """Of products of float32; those of half precision take none."""
    return "tf32" if half else "tf32x3"


def warps(half: bool) -> int:
    """Warps of a program, for inputs of 2 bytes or of 4."""
    return 4 if half else 8


def stages(half: bool) -> int:
    """Chunks whose x, b and c are in shared memory at once."""
    return 2 if half else 1


def chunks(
    x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, places: Places, cu_seqlens: Tensor, out: Tensor
) -> None:  # fmt: skip
    """The sequences that have several rows; arguments as for `kernel.step`, which computes those that have one."""
    (heads, size), (groups, width) = x.shape[1:], b.shape[1:]
    half = out.dtype.itemsize < 4
    _chunks[(triton.cdiv(size, ROWS), heads, places.offsets.shape[0])](
        x, dt, a_log, b, c, d, places.base, places.offsets, cu_seqlens, out,
        x.stride(0), x.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        HEADS=heads, RATIO=heads // groups, P=size, N=width, UNIT=places.unit, BLOCK_P=ROWS,
        BLOCK_N=max(ROWS, triton.next_power_of_2(width)), PRECISION=precision(half), num_warps=warps(half), num_stages=stages(half),
    )  # fmt: skip
