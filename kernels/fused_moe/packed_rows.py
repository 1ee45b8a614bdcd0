# mypy: ignore-errors
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""The few-pairs kernels of `kernel.py` over packed weights: the same launches and sums, codes turned into numbers on the way.

FMT describes a row tile (see `packed_weights.kernel`). A program holds the activations in registers and goes through BN weight rows with
them, each as UNITS units of SUB bytes in words of WIDE bytes. The columns of a unit's half share their scale, so that sums of a word's
products are scaled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.expert_fetch.kernel import copy_pieces
from rimuru_kernels.packed_weights.kernel import (
    bias_of,
    factor_of,
    first_column,
    lifted,
    load_high,
    load_where,
    load_words,
    numbers,
    scale_of,
    terms,
)


@triton.jit
def page_of(entries_ptr, expert, row, part, ROWS: tl.constexpr, TILES: tl.constexpr, valid):
    """The entry of the page with `row` of a projection, int64, and the row's number in it; `part` 0 is gate, 1 up, 2 down. All broadcast.

    valid: None, or a mask of expert's shape that says which ones there are.
    """
    if TILES == 1:
        entry = load_where(entries_ptr + expert * 3 + part, valid) + row * 0
        local = row
    else:
        TILE_ROWS: tl.constexpr = ROWS // TILES
        entry = load_where(entries_ptr + (expert * 3 + part) * TILES + row // TILE_ROWS, valid)
        local = row % TILE_ROWS
    return entry.to(tl.int64), local


@triton.jit
def _four(x_ptr, quads_ptr, row, word, keep, HALF: tl.constexpr, FMT: tl.constexpr, WIDE: tl.constexpr):
    """The activations of `row` that meet the codes of a half of words, lifted for each of a word's four bytes, and their sum; float32.

    quads_ptr: the same rows as int64, four numbers of two bytes each, or, where they cannot be read so, x_ptr. WIDE 1: the first alone
    counts.
    """
    K: tl.constexpr = FMT[7]
    at = first_column(word, HALF, FMT, WIDE)
    keep = keep & (at * WIDE < K)
    if quads_ptr.dtype.element_ty == tl.int64:
        quads = load_where(quads_ptr + row * (K // 4) + at, keep)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        x_0 = quads.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        x_1 = (quads >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        x_2 = (quads >> 32).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        x_3 = (quads >> 48).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        column = at * WIDE
        x_0 = load_where(x_ptr + row * K + column, keep & (column < K)).to(tl.float32)
        x_1, x_2, x_3 = x_0, x_0, x_0
        if WIDE == 4:
            x_1 = load_where(x_ptr + row * K + column + 1, keep & (column + 1 < K)).to(tl.float32)
            x_2 = load_where(x_ptr + row * K + column + 2, keep & (column + 2 < K)).to(tl.float32)
            x_3 = load_where(x_ptr + row * K + column + 3, keep & (column + 3 < K)).to(tl.float32)
    x_sum = x_0
    if WIDE == 4:
        x_sum = (x_0 + x_1) + (x_2 + x_3)
    return lifted(x_0, 0, HALF, FMT), lifted(x_1, 1, HALF, FMT), lifted(x_2, 2, HALF, FMT), lifted(x_3, 3, HALF, FMT), x_sum


@triton.jit
def _half_row(
    words, high, scale, less, off, x_0, x_1, x_2, x_3, x_sum, HALF: tl.constexpr, FMT: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Scaled products of one half of a row's words with their activations, before they are summed; shape of words."""
    OFFSET: tl.constexpr = FMT[4]
    HAS_B: tl.constexpr = FMT[19]
    a, b = terms(scale, less, off, FMT)
    if HAS_B & (OFFSET != "zero"):
        # What all codes have too much is the same for all rows: the sum begins with it.
        part = x_sum * -bias_of(FMT)
    else:
        part = x_sum * 0.0
    part += numbers(words, high, 0, HALF, FMT) * x_0
    if WIDE == 4:
        part += numbers(words, high, 1, HALF, FMT) * x_1
        part += numbers(words, high, 2, HALF, FMT) * x_2
        part += numbers(words, high, 3, HALF, FMT) * x_3
    part *= a
    if OFFSET == "zero":
        part += b * x_sum
    elif OFFSET != "none":
        part += off * x_sum
    return part


@triton.jit
def _load_row(pool, pool_words, entry, row, word, keep, first_0, first_1, valid, FMT: tl.constexpr, WIDE: tl.constexpr):
    """What a row consists of: words, high bits, scales with all that belongs to them, of both halves (twice the same where there is one).

    first_0, first_1: first columns of each unit's halves; valid: None, or which entries there are.
    """
    KIND: tl.constexpr = FMT[0]
    K: tl.constexpr = FMT[7]
    HALVES: tl.constexpr = FMT[18]
    page = pool + entry * 256
    if WIDE == 4:
        codes = pool_words + entry * 64
    else:
        codes = page
    words = load_words(codes, row, word, keep, FMT, WIDE).to(tl.int32)
    if valid is None:
        known_0, known_1 = first_0 < K, first_1 < K
    else:
        known_0, known_1 = valid & (first_0 < K), valid & (first_1 < K)
    factor = factor_of(page, valid, FMT)
    high_0, high_1 = words, words
    if (KIND == "int5") | (KIND == "int6"):
        high_0 = load_high(codes, row, word, keep, 0, FMT, WIDE)
        high_1 = load_high(codes, row, word, keep, 1, FMT, WIDE)
    scale_0, less_0, off_0 = scale_of(page, row, first_0, known_0, FMT)
    scale_1, less_1, off_1 = scale_0, less_0, off_0
    if HALVES == 2:
        scale_1, less_1, off_1 = scale_of(page, row, first_1, known_1, FMT)
    return words, high_0, high_1, scale_0, less_0, off_0, scale_1, less_1, off_1, factor


@triton.jit
def _row_sum(row, a_0, a_1, a_2, a_3, a_sum, b_0, b_1, b_2, b_3, b_sum, FMT: tl.constexpr, WIDE: tl.constexpr):
    """Products of a row from `_load_row` with the activations of both halves, scaled, before they are summed."""
    HALVES: tl.constexpr = FMT[18]
    total = _half_row(row[0], row[1], row[3], row[4], row[5], a_0, a_1, a_2, a_3, a_sum, 0, FMT, WIDE)
    if HALVES == 2:
        total += _half_row(row[0], row[2], row[6], row[7], row[8], b_0, b_1, b_2, b_3, b_sum, 1, FMT, WIDE)
    return total * row[9]


@triton.jit
def gate_up_rows(
    x_ptr, quads_ptr, ids_ptr, pool, pool_words, entries_ptr, h_ptr, sources, pages, count,
    TOPK: tl.constexpr, F: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr,
    BN: tl.constexpr, UNITS: tl.constexpr, SUB: tl.constexpr, WIDE: tl.constexpr,
    COPIERS: tl.constexpr, WORDS: tl.constexpr, PAGE_WORDS: tl.constexpr,
):  # fmt: skip
    """h [P, f] of a few pairs. Grid (P, COPIERS + ceil(f / BN)), as in `kernel.gate_up_rows`."""
    ROW_BYTES: tl.constexpr = FMT[8]
    HALVES: tl.constexpr = FMT[18]
    pair = tl.program_id(0)
    if COPIERS > 0:  # noqa: SIM102 - known when compiling
        if tl.program_id(1) < COPIERS:
            program = tl.program_id(1) * tl.num_programs(0) + pair
            copy_pieces(
                sources, pages, count, pool, program, tl.num_programs(0) * COPIERS,
                2 * TILES, 3 * TILES, 3 * TILES, PAGE_WORDS, WORDS,
            )  # fmt: skip
            return
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    if expert < 0:
        return
    token = (pair // TOPK).to(tl.int64)
    unit = tl.arange(0, UNITS)
    word = unit[:, None] * (SUB // WIDE) + tl.arange(0, SUB // WIDE)[None, :]
    keep = word < ROW_BYTES // WIDE
    first_0 = first_column(unit * SUB, 0, FMT, 1)[:, None]
    first_1 = first_column(unit * SUB, HALVES - 1, FMT, 1)[:, None]
    a_0, a_1, a_2, a_3, a_sum = _four(x_ptr, quads_ptr, token, word, keep, 0, FMT, WIDE)
    b_0, b_1, b_2, b_3, b_sum = a_0, a_1, a_2, a_3, a_sum
    if HALVES == 2:
        b_0, b_1, b_2, b_3, b_sum = _four(x_ptr, quads_ptr, token, word, keep, 1, FMT, WIDE)
    # All loads come first, so that all are on their way at once.
    rows = ()
    for number in tl.static_range(BN):
        inside = tl.minimum((tl.program_id(1) - COPIERS) * BN + number, F - 1)
        for part in tl.static_range(2):
            entry, local = page_of(entries_ptr, expert, inside, part, F, TILES, None)
            rows = rows + (_load_row(pool, pool_words, entry, local, word, keep, first_0, first_1, None, FMT, WIDE),)  # noqa: RUF005 - the compiler knows no other way
    for number in tl.static_range(BN):
        row = (tl.program_id(1) - COPIERS) * BN + number
        g = _row_sum(rows[2 * number], a_0, a_1, a_2, a_3, a_sum, b_0, b_1, b_2, b_3, b_sum, FMT, WIDE)
        u = _row_sum(rows[2 * number + 1], a_0, a_1, a_2, a_3, a_sum, b_0, b_1, b_2, b_3, b_sum, FMT, WIDE)
        g, u = tl.sum(tl.sum(g, 1), 0), tl.sum(tl.sum(u, 1), 0)
        h = g / (1.0 + tl.exp(-g)) * u
        tl.store(h_ptr + pair * F + row, h.to(h_ptr.dtype.element_ty), mask=row < F)


@triton.jit
def down_rows(
    h_ptr, quads_ptr, ids_ptr, weights_ptr, pool, pool_words, entries_ptr, out_ptr,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, F: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr,
    BN: tl.constexpr, UNITS: tl.constexpr, SUB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [T, d] of a few tokens. Grid (T, ceil(d / BN)), as in `kernel.down_rows`."""
    ROW_BYTES: tl.constexpr = FMT[8]
    HALVES: tl.constexpr = FMT[18]
    token = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    pair = token * TOPK + slot
    expert = tl.load(ids_ptr + pair, mask=slot < TOPK, other=-1).to(tl.int32)
    valid = expert >= 0
    weight = tl.load(weights_ptr + pair, mask=valid, other=0.0)
    expert_3, valid_3, pair_3 = expert[:, None, None], valid[:, None, None], pair[:, None, None]
    unit = tl.arange(0, UNITS)
    word = (unit[:, None] * (SUB // WIDE) + tl.arange(0, SUB // WIDE)[None, :])[None, :, :]
    keep = valid_3 & (word < ROW_BYTES // WIDE)
    first_0 = first_column(unit * SUB, 0, FMT, 1)[None, :, None]
    first_1 = first_column(unit * SUB, HALVES - 1, FMT, 1)[None, :, None]
    a_0, a_1, a_2, a_3, a_sum = _four(h_ptr, quads_ptr, pair_3, word, keep, 0, FMT, WIDE)
    b_0, b_1, b_2, b_3, b_sum = a_0, a_1, a_2, a_3, a_sum
    if HALVES == 2:
        b_0, b_1, b_2, b_3, b_sum = _four(h_ptr, quads_ptr, pair_3, word, keep, 1, FMT, WIDE)
    rows = ()
    for number in tl.static_range(BN):
        inside = tl.minimum(tl.program_id(1) * BN + number, D - 1)
        entry, local = page_of(entries_ptr, expert_3, inside, 2, D, TILES, valid_3)
        rows = rows + (_load_row(pool, pool_words, entry, local, word, keep, first_0, first_1, valid_3, FMT, WIDE),)  # noqa: RUF005 - the compiler knows no other way
    for number in tl.static_range(BN):
        row = tl.program_id(1) * BN + number
        total = _row_sum(rows[number], a_0, a_1, a_2, a_3, a_sum, b_0, b_1, b_2, b_3, b_sum, FMT, WIDE)
        y = tl.sum(tl.sum(tl.sum(total, 2), 1) * weight, 0)
        tl.store(out_ptr + token.to(tl.int64) * D + row, y.to(out_ptr.dtype.element_ty), mask=row < D)
