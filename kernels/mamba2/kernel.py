"""Triton kernels of Mamba-2: the lengths of steps, and the state space for one row a sequence.

Every element of the state is loaded once, used, and stored once.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.softplus_kernel import softplus
from rimuru_kernels.state_pages import Places

ROWS = 32
"""Rows of a head's state [P, N] that a program holds."""
WARPS = 4


@triton.jit(do_not_specialize=["count"])  # it changes from call to call
def _time_steps(dt, dt_bias, out, least, largest, dt_row, count, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """softplus(dt + dt_bias) within limits, flat over [T, HEADS]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row, head = i // HEADS, i % HEADS
    x = tl.load(dt + row * dt_row + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head, mask=inside, other=0.0)
    tl.store(out + i, tl.minimum(tl.maximum(softplus(x), least), largest), mask=inside)


@triton.jit
def _step(
    x, dt, a_log, b, c, d, states, places, cu_seqlens, out, x_row, x_head, b_row, b_group, c_row, c_group,
    HEADS: tl.constexpr, RATIO: tl.constexpr, P: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sequences of one row (all of them without cu_seqlens): S <- exp(dt A) S + dt x bᵀ;  y = S c + D x.

    Grid (ceil(P / BLOCK_P), HEADS, sequences).
    """
    head, seq = tl.program_id(1), tl.program_id(2)
    row = seq.to(tl.int64)
    if cu_seqlens is not None:
        row = tl.load(cu_seqlens + seq).to(tl.int64)
        if tl.load(cu_seqlens + seq + 1) - row != 1:
            return
    i, j = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    out_row = out + (row * HEADS + head) * P + i
    place = tl.load(places + seq).to(tl.int64)
    if place < 0:
        tl.store(out_row, tl.zeros([BLOCK_P], out.dtype.element_ty), mask=i < P)
        return
    tile = states + place * UNIT + head * (P * N) + i[:, None] * N + j[None, :]
    inside = (i[:, None] < P) & (j[None, :] < N)
    state = tl.load(tile, mask=inside, other=0.0)
    value = tl.load(x + row * x_row + head * x_head + i, mask=i < P, other=0.0).to(tl.float32)
    write = tl.load(b + row * b_row + head // RATIO * b_group + j, mask=j < N, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_row + head // RATIO * c_group + j, mask=j < N, other=0.0).to(tl.float32)
    length = tl.load(dt + row * HEADS + head)
    state = state * tl.exp(-tl.exp(tl.load(a_log + head)) * length) + (value * length)[:, None] * write[None, :]
    tl.store(tile, state, mask=inside)
    y = tl.sum(state * read[None, :], 1) + tl.load(d + head) * value
    tl.store(out_row, y.to(out.dtype.element_ty), mask=i < P)


def time_steps(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float], out: Tensor) -> None:
    """dt [T, H], elements of a row contiguous, dt_bias [H] and out [T, H] float32, contiguous."""
    count = dt.numel()
    _time_steps[(triton.cdiv(count, 256),)](dt, dt_bias, out, *limits, dt.stride(0), count, HEADS=dt.shape[1], BLOCK=256, num_warps=2)


def step(
    x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, places: Places, cu_seqlens: Tensor | None, out: Tensor
) -> None:  # fmt: skip
    """The sequences that have one row; x [T, H, P], b, c [T, G, N] (elements of a head or group contiguous), dt [T, H], a_log, d [H], out
    [T, H, P], all contiguous.

    States float32. Rows of sequences whose place is negative become zeros. Arguments are taken as checked.
    """
    (heads, p), (groups, n) = x.shape[1:], b.shape[1:]
    rows = min(ROWS, triton.next_power_of_2(p))
    _step[(triton.cdiv(p, rows), heads, places.offsets.shape[0])](
        x, dt, a_log, b, c, d, places.base, places.offsets, cu_seqlens, out,
        x.stride(0), x.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        HEADS=heads, RATIO=heads // groups, P=p, N=n, UNIT=places.unit, BLOCK_P=rows, BLOCK_N=triton.next_power_of_2(n), num_warps=WARPS,
    )  # fmt: skip
