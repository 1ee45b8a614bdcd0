"""Triton kernels of the causal convolution over row pages: one row a sequence in a single launch, several rows in two.

The state of a sequence is KEPT rows of C channels, each a page of its own. With several rows a sequence is computed by many programs,
the first of which read the pages; only the next launch overwrites them.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.state_pages import Places
from rimuru_kernels.varlen_kernel import find_tile, num_tiles

TILE_ROWS = 32
CHANNELS = 128
"""Channels of a program that computes many rows; of one that computes or keeps few: STEP_CHANNELS."""
STEP_CHANNELS = 256
WARPS = 4


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _step(
    x, weight, bias, states, places, out, x_row,
    C: tl.constexpr, KEPT: tl.constexpr, UNIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a sequence: its output, and the state's rows moved up by one. Grid (ceil(C / BLOCK), sequences)."""
    seq = tl.program_id(1).to(tl.int64)
    i, c = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    place = tl.load(places + seq * KEPT + i, mask=i < KEPT, other=0).to(tl.int64)
    if tl.min(place, 0) < 0:
        tl.store(out + seq * C + c, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)
        return
    kept = tl.load(states + (place * UNIT)[:, None] + c[None, :], mask=(i < KEPT)[:, None] & inside[None, :], other=0.0)
    newest = tl.load(x + seq * x_row + c, mask=inside, other=0.0)
    taps = tl.load(weight + i[:, None] * C + c[None, :], mask=(i <= KEPT)[:, None] & inside[None, :], other=0.0)
    window = tl.where((i == KEPT)[:, None], newest.to(tl.float32)[None, :], kept.to(tl.float32))
    total = tl.sum(window * taps.to(tl.float32), 0)
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + seq * C + c, _silu(total).to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # every row has been read before one is overwritten
    above = (i >= 1) & (i <= KEPT)
    target = tl.load(places + seq * KEPT + i - 1, mask=above, other=0).to(tl.int64)
    tl.store(states + (target * UNIT)[:, None] + c[None, :], window.to(states.dtype.element_ty), mask=above[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_seqs"])  # it changes from call to call
def _rows(
    x, weight, bias, states, places, cu_seqlens, out, num_seqs, x_row,
    C: tl.constexpr, KEPT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one sequence; the states are only read. Grid (ceil(C / BLOCK), tiles)."""
    seq, start, length, first = find_tile(cu_seqlens, num_seqs, tl.program_id(1), ROWS)
    if first >= length:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = first + tl.arange(0, ROWS)
    row, inside = (start + local).to(tl.int64), (local < length)[:, None] & (c < C)[None, :]
    table = places + seq.to(tl.int64) * KEPT
    target = out + row[:, None] * C + c[None, :]
    if tl.load(table) < 0:
        tl.store(target, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), mask=inside)
        return
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(KEPT + 1):
        source = local - KEPT + tap
        taps = tl.load(weight + tap * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        here = x + (start + source).to(tl.int64)[:, None] * x_row + c[None, :]
        total += tl.load(here, mask=inside & (source >= 0)[:, None], other=0.0).to(tl.float32) * taps
        if first < KEPT:
            before = source < 0
            place = tl.load(table + KEPT + source, mask=before, other=0).to(tl.int64)
            kept = tl.load(states + (place * UNIT)[:, None] + c[None, :], mask=inside & before[:, None], other=0.0)
            total += kept.to(tl.float32) * taps
    tl.store(target, _silu(total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep(
    x, states, places, cu_seqlens, x_row,
    C: tl.constexpr, KEPT: tl.constexpr, UNIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each sequence's last KEPT rows into its pages, those of fewer rows after what stays of the old. Grid (ceil(C / BLOCK), sequences)."""
    seq = tl.program_id(1).to(tl.int64)
    start = tl.load(cu_seqlens + seq).to(tl.int64)
    length = tl.load(cu_seqlens + seq + 1) - start
    table = places + seq * KEPT
    if length == 0:
        return
    if tl.load(table) < 0:
        return
    i, c = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source, inside = length - KEPT + i, (i < KEPT)[:, None] & (c < C)[None, :]
    old = tl.load(table + length + i, mask=(source < 0) & (i < KEPT), other=0).to(tl.int64)
    kept = tl.load(states + (old * UNIT)[:, None] + c[None, :], mask=inside & (source < 0)[:, None], other=0.0)
    new = tl.load(x + (start + source)[:, None] * x_row + c[None, :], mask=inside & (source >= 0)[:, None], other=0.0)
    value = tl.where((source < 0)[:, None], kept.to(tl.float32), new.to(tl.float32)).to(states.dtype.element_ty)
    tl.debug_barrier()  # every row has been read before one is overwritten
    target = tl.load(table + i, mask=i < KEPT, other=0).to(tl.int64)
    tl.store(states + (target * UNIT)[:, None] + c[None, :], value, mask=inside)


def step(x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, out: Tensor) -> None:
    """One row a sequence: x [S, C], its channels contiguous, weight [K, C], bias [C], places of S * (K - 1) rows, out [S, C], contiguous.

    Rows of sequences with a negative place become zeros. Arguments are taken as checked.
    """
    kernel, channels = weight.shape
    block = min(STEP_CHANNELS, triton.next_power_of_2(channels))
    _step[(triton.cdiv(channels, block), x.shape[0])](
        x, weight, bias, places.base, places.offsets, out, x.stride(0),
        C=channels, KEPT=kernel - 1, UNIT=places.unit, BLOCK_K=triton.next_power_of_2(kernel), BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


def rows(x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, cu_seqlens: Tensor, out: Tensor) -> None:
    """Any number of rows a sequence; a sequence whose first place is negative has none of them. Otherwise as `step`."""
    (kernel, channels), seqs = weight.shape, cu_seqlens.shape[0] - 1
    block, step_block = (min(size, triton.next_power_of_2(channels)) for size in (CHANNELS, STEP_CHANNELS))
    _rows[(triton.cdiv(channels, block), num_tiles(x.shape[0], seqs, TILE_ROWS))](
        x, weight, bias, places.base, places.offsets, cu_seqlens, out, seqs, x.stride(0),
        C=channels, KEPT=kernel - 1, UNIT=places.unit, ROWS=TILE_ROWS, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    _keep[(triton.cdiv(channels, step_block), seqs)](
        x, places.base, places.offsets, cu_seqlens, x.stride(0),
        C=channels, KEPT=kernel - 1, UNIT=places.unit, BLOCK_K=triton.next_power_of_2(kernel - 1), BLOCK=step_block, num_warps=WARPS,
    )  # fmt: skip
