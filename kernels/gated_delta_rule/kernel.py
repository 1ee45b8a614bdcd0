"""Triton kernels of the gated delta rule: its gates, and one row a sequence, the state updated in place (several rows: chunk_kernel.py).

A program of the step holds BLOCK_V columns of one head's state [dk, dv] in registers. It reads both products with the old state at once,

    o = Sᵀ q̂ = e^g (S_oldᵀ q̂) + (q̂ · k̂) u        u = β (v - e^g (S_oldᵀ k̂)),

so that every element is loaded once, used, and stored once.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.softplus_kernel import softplus
from rimuru_kernels.state_pages import Places

EPS: tl.constexpr = tl.constexpr(1e-6)
"""Added to the sums of squares of q and k; `reference.py` has the same."""


class StepTiles(NamedTuple):
    """Columns of a state that a program of the step holds, and its warps."""

    columns: int = 32
    warps: int = 2


STEP_TILES = StepTiles()


@triton.jit(do_not_specialize=["count"])  # it changes from call to call
def _gates(a, b, a_log, dt_bias, log_decay, beta, a_stride, b_stride, count, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """log decay = -exp(a_log) softplus(a + dt_bias) and β = sigmoid(b), flat over [T, HEADS]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row, head = i // HEADS, i % HEADS
    x = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head, mask=inside, other=0.0)
    tl.store(log_decay + i, -tl.exp(tl.load(a_log + head, mask=inside, other=0.0)) * softplus(x), mask=inside)
    y = tl.load(b + row * b_stride + head, mask=inside, other=0.0)
    tl.store(beta + i, (1.0 / (1.0 + tl.exp(-y.to(tl.float32)))).to(y.dtype).to(tl.float32), mask=inside)


@triton.jit
def _step(
    q, k, v, log_decay, beta, states, places, cu_seqlens, out, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sequences of one row (all of them without cu_seqlens). Grid (ceil(DV / BLOCK_V), HEADS, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    row = seq.to(tl.int64)
    if cu_seqlens is not None:
        row = tl.load(cu_seqlens + seq).to(tl.int64)
        if tl.load(cu_seqlens + seq + 1) - row != 1:
            return
    i, j = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    out_row = out + (row * HEADS + head) * DV + j
    place = tl.load(places + seq).to(tl.int64)
    if place < 0:
        tl.store(out_row, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=j < DV)
        return
    tile = states + place * UNIT + head * (DK * DV) + i[:, None] * DV + j[None, :]
    inside = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.load(tile, mask=inside, other=0.0)
    query = tl.load(q + row * q_row + head // RATIO * q_head + i, mask=i < DK, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_row + head // RATIO * k_head + i, mask=i < DK, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_row + head * v_head + j, mask=j < DV, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(log_decay + row * HEADS + head))
    strength = tl.load(beta + row * HEADS + head)
    query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
    asked = tl.sum(state * query[:, None], 0) * decay
    u = strength * (value - tl.sum(state * key[:, None], 0) * decay)
    tl.store(tile, state * decay + key[:, None] * u[None, :], mask=inside)
    tl.store(out_row, (asked + tl.sum(query * key, 0) * u).to(out.dtype.element_ty), mask=j < DV)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, log_decay: Tensor, beta: Tensor) -> None:
    """See `rimuru_kernels.gated_delta_rule.delta_gates`, float32; heads of a and b contiguous, log_decay and beta [T, Hv] contiguous."""
    count = a.numel()
    _gates[(triton.cdiv(count, 256),)](
        a, b, a_log, dt_bias, log_decay, beta, a.stride(0), b.stride(0), count, HEADS=a.shape[1], BLOCK=256, num_warps=2
    )  # fmt: skip


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, places: Places, cu_seqlens: Tensor | None, out: Tensor,
    tiles: StepTiles = STEP_TILES,
) -> None:  # fmt: skip
    """The sequences that have one row; states float32, gates contiguous, elements of a head contiguous, out [T, Hv, dv] contiguous.

    Rows of sequences whose place is negative become zeros. Arguments are taken as checked.
    """
    (key_heads, dk), (heads, dv) = q.shape[1:], v.shape[1:]
    columns = min(tiles.columns, triton.next_power_of_2(dv))
    _step[(triton.cdiv(dv, columns), heads, places.offsets.shape[0])](
        q, k, v, log_decay, beta, places.base, places.offsets, cu_seqlens, out, dk**-0.5,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, RATIO=heads // key_heads, DK=dk, DV=dv, UNIT=places.unit, BLOCK_K=triton.next_power_of_2(dk), BLOCK_V=columns,
        num_warps=tiles.warps,
    )  # fmt: skip
