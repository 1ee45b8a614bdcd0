# mypy: ignore-errors
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""The grouped product of `kernel.py` over packed weights: sorted pairs times weight rows whose codes become numbers in the K loop.

FMT describes a row tile (see `packed_weights.kernel`). A chunk is CHUNK bytes of a row, of which each SAME share their scale (of one half);
each of its halves is a product of its own, with CHUNK columns of the activations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.fused_moe.kernel import TILE_FIELDS
from rimuru_kernels.fused_moe.packed_rows import page_of
from rimuru_kernels.packed_weights.kernel import (
    INTERPRETED,
    factor_of,
    first_column,
    lifted,
    load_high,
    load_words,
    numbers,
    scale_of,
    scale_pair,
    scaled,
    spread,
    terms,
)


@triton.jit
def _scale(page, row, start, HALF: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr):
    """`scale_of` the group that byte `start` begins or lies in, each [BN, 1]."""
    COLUMNS: tl.constexpr = FMT[7]
    column = first_column(start, HALF, FMT, 1)
    if WHOLE:
        scale, less, off = scale_of(page, row, column, None, FMT)
    else:
        scale, less, off = scale_of(page, row, column, row * 0 + column < COLUMNS, FMT)
    return scale[:, None], less[:, None], off[:, None]


@triton.jit
def _scales(page, row, start, FMT: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, SAME: tl.constexpr):
    """`scale_of` the codes of a chunk, for its first half and for its second (or the same again), each [BN, 1] or [BN, CHUNK]."""
    HALVES: tl.constexpr = FMT[18]
    BIAS: tl.constexpr = FMT[5]
    PAIRS: tl.constexpr = FMT[20]
    if PAIRS & (CHUNK == 32) & WHOLE:
        scale_0, scale_1 = scale_pair(page, row, start, FMT)
        less = tl.zeros_like(scale_0)[:, None]
        first = scale_0[:, None], less + BIAS, less
        second = scale_1[:, None], less + BIAS, less
    else:
        first = _half_scales(page, row, start, 0, FMT, WHOLE, CHUNK, SAME)
        second = first
        if HALVES == 2:
            second = _half_scales(page, row, start, 1, FMT, WHOLE, CHUNK, SAME)
    return first, second


@triton.jit
def _half_scales(
    page, row, start, HALF: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, SAME: tl.constexpr
):  # fmt: skip
    scale, less, off = _scale(page, row, start, HALF, FMT, WHOLE)
    byte = tl.arange(0, CHUNK)[None, :]
    for later in tl.static_range(SAME, CHUNK, SAME):
        scale_2, less_2, off_2 = _scale(page, row, start + later, HALF, FMT, WHOLE)
        scale = tl.where(byte < later, scale, scale_2)
        less = tl.where(byte < later, less, less_2)
        off = tl.where(byte < later, off, off_2)
    return scale, less, off


@triton.jit
def _weights(
    page, row, start, codes, spread_codes, scales, keep, HALF: tl.constexpr, FMT: tl.constexpr, CHUNK: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """The weights of one half of a chunk, [BN, CHUNK] of `dtype`; page and row [BN], start: of the chunk, in bytes.

    spread_codes: of `spread`, where it is used; scales: of `_scales`.
    """
    HAS_B: tl.constexpr = FMT[19]
    byte = tl.arange(0, CHUNK)[None, :]
    if HALF == 0:
        scale, less, off = scales[0]
    else:
        scale, less, off = scales[1]
    if spread_codes is None:
        a, b = terms(scale, less, off, FMT)
        v = numbers(codes.to(tl.int32), load_high(page[:, None], row[:, None], start + byte, keep, HALF, FMT, 1), 0, HALF, FMT)
        v = lifted(v, 0, HALF, FMT)
        if HAS_B:
            w = (v * a + b).to(dtype)
        else:
            w = (v * a).to(dtype)
    else:
        if HALF == 0:
            v = spread_codes[0]
        else:
            v = spread_codes[1]
        w = scaled(v, scale, less, off, FMT, dtype)
    return w


@triton.jit
def _spread(codes, FMT: tl.constexpr, dtype: tl.constexpr):
    """`spread`, where it can be used: codes of 4 and 8 bits to become two-byte numbers."""
    KIND: tl.constexpr = FMT[0]
    if (KIND != "int5") & (KIND != "int6") & (dtype.primitive_bitwidth == 16) & (not INTERPRETED):
        halves = spread(codes, FMT, dtype)
    else:
        halves = None
    return halves


@triton.jit
def _product(x, w, acc, PRECISION: tl.constexpr, SWAP: tl.constexpr):
    """acc + x [BM, K] w [BN, K]^T; SWAP: acc is [BN, BM], and w the first operand."""
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _across(factor, FMT: tl.constexpr, SWAP: tl.constexpr):
    """Factors of BN rows beside an accumulator; 1 where a format has none."""
    FACTOR: tl.constexpr = FMT[6]
    if not FACTOR:
        across = 1.0
    elif SWAP:
        across = factor[:, None]
    else:
        across = factor[None, :]
    return across


@triton.jit
def _multiply_tile(
    a, pool, out_ptr, sorted_ptr, entries_ptr, begin, end, expert, block,
    TOPK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, SAME: tl.constexpr, REPEAT: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Sorted rows begin … begin + BM - 1, as far as they are below `end`, times BN weight rows (of gate and of up)."""
    ROW_BYTES: tl.constexpr = FMT[8]
    HALVES: tl.constexpr = FMT[18]
    WHOLE: tl.constexpr = (ROW_BYTES % (CHUNK * REPEAT) == 0) & (ROW_BYTES * HALVES == K)
    row = begin + tl.arange(0, BM)
    # Rows past the end repeat the last one: always readable, never stored.
    inside = tl.minimum(row, end - 1)
    pair = tl.load(sorted_ptr + inside)
    a_row = pair // TOPK if GATED else inside
    a_place = a + a_row.to(tl.int64)[:, None] * K
    n = block * BN + tl.arange(0, BN)
    feature = tl.minimum(n, N - 1)
    entry, local = page_of(entries_ptr, expert, feature, 0 if GATED else 2, N, TILES, None)
    page = pool + entry * 256
    if GATED:
        entry, local = page_of(entries_ptr, expert, feature, 1, N, TILES, None)
        up_page = pool + entry * 256
    byte = tl.arange(0, CHUNK)
    dtype: tl.constexpr = a.dtype.element_ty
    if SWAP:
        g = tl.zeros([BN, BM], tl.float32)
        u = tl.zeros([BN, BM], tl.float32)
    else:
        g = tl.zeros([BM, BN], tl.float32)
        u = tl.zeros([BM, BN], tl.float32)
    for step in range(0, ROW_BYTES, CHUNK * REPEAT):
        for part in tl.static_range(REPEAT):
            start = step + part * CHUNK
            place = start + byte
            if WHOLE:
                keep = None
            else:
                keep = (place < ROW_BYTES)[None, :]
            codes = load_words(page[:, None], local[:, None], place[None, :], keep, FMT, 1)
            spread_codes = _spread(codes, FMT, dtype)
            scales = _scales(page, local, start, FMT, WHOLE, CHUNK, SAME)
            if GATED:
                up_codes = load_words(up_page[:, None], local[:, None], place[None, :], keep, FMT, 1)
                up_spread_codes = _spread(up_codes, FMT, dtype)
                up_scales = _scales(up_page, local, start, FMT, WHOLE, CHUNK, SAME)
            for half in tl.static_range(HALVES):
                column = first_column(place, half, FMT, 1)
                if WHOLE:
                    x = tl.load(a_place + column[None, :])
                else:
                    x = tl.load(a_place + column[None, :], mask=(column < K)[None, :], other=0.0)
                w = _weights(page, local, start, codes, spread_codes, scales, keep, half, FMT, CHUNK, dtype)
                g = _product(x, w, g, PRECISION, SWAP)
                if GATED:
                    w = _weights(up_page, local, start, up_codes, up_spread_codes, up_scales, keep, half, FMT, CHUNK, dtype)
                    u = _product(x, w, u, PRECISION, SWAP)
    if GATED:
        g *= _across(factor_of(page, None, FMT), FMT, SWAP)
        u *= _across(factor_of(up_page, None, FMT), FMT, SWAP)
        result = g / (1.0 + tl.exp(-g)) * u
        out_row = row
    else:
        result = g * _across(factor_of(page, None, FMT), FMT, SWAP)
        out_row = pair
    result = result.to(out_ptr.dtype.element_ty)
    if SWAP:
        result = tl.trans(result)
    keep = (row < end)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + out_row.to(tl.int64)[:, None] * N + n[None, :], result, mask=keep)


@triton.jit(do_not_specialize=["max_tiles"])
def grouped_gemm(
    a, pool, out_ptr, sorted_ptr, table_ptr, entries_ptr, max_tiles,
    TOPK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, SAME: tl.constexpr, REPEAT: tl.constexpr,
    GROUP: tl.constexpr, HALVES: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One tile of BM pairs of one expert times BN weight rows (where GATED, of gate and of up); see `kernel.grouped_gemm`."""
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    group = tl.program_id(0) // (GROUP * BLOCKS)
    within = tl.program_id(0) % (GROUP * BLOCKS)
    group_tiles = tl.minimum(max_tiles - group * GROUP, GROUP)
    tile = group * GROUP + within % group_tiles
    block = within // group_tiles
    info = table_ptr + tile * TILE_FIELDS
    begin = tl.load(info)
    end = tl.load(info + 1)
    expert = tl.load(info + 2)
    if begin >= end:
        return
    if HALVES:  # noqa: SIM102 - known when compiling
        if end - begin <= BM // 2:
            _multiply_tile(
                a, pool, out_ptr, sorted_ptr, entries_ptr, begin, end, expert, block,
                TOPK, N, K, TILES, FMT, BM // 2, BN, CHUNK, SAME, REPEAT, GATED, PRECISION, SWAP,
            )  # fmt: skip
            return
    _multiply_tile(
        a, pool, out_ptr, sorted_ptr, entries_ptr, begin, end, expert, block,
        TOPK, N, K, TILES, FMT, BM, BN, CHUNK, SAME, REPEAT, GATED, PRECISION, SWAP,
    )  # fmt: skip
