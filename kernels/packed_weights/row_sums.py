# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows no other way to make a longer tuple
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""Triton helpers that multiply packed rows with a few activations: load both, then sum a group at a time and scale its sum.

A row is taken in units of 16 bytes of codes (see `dots`); a unit's codes of one half share their scale. CHUNKS times UNITS of them lie
side by side in the lanes. Where DOTS, products are sums of integers; else codes become float32 numbers, from words of WIDE bytes: for
activations in float32, floats of 8 bits, and rows that are no whole units. All that is loaded is kept as it is stored until it is used.
Shapes are [units, rows] or, with SLOTS, [units, rows, slots]; words have another dimension behind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.packed_weights.dots import dot, load_quads, load_unit, steps_of, whole
from rimuru_kernels.packed_weights.kernel import LIFT, bias_of, factor_of, first_column, lifted, load_high, load_where, numbers, terms
from rimuru_kernels.packed_weights.unit_scales import load_scales, scale_numbers

FP8_FLOATS = tl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 p, q; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; "
    "mov.b32 {a, b}, p; mov.b32 {c, d}, q; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


@triton.jit
def _words_of(unit, WIDE: tl.constexpr):
    return tl.expand_dims(unit, -1) * (16 // WIDE) + tl.arange(0, 16 // WIDE)


@triton.jit
def load_rows(
    pool, pool_words, pool_longs, entry, row, unit, valid,
    FMT: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
    DOTS: tl.constexpr,
):  # fmt: skip
    """Rows' codes and what belongs to their groups, chunk by chunk, and their pages' factor where there is one.

    pool, pool_words, pool_longs: the pool as bytes, int32 and int64. entry: of the rows' pages, int64; entry, row and valid (None: all)
    broadcast to [1, rows(, slots)]; unit: 0 to UNITS - 1, [units, 1(, 1)].
    """
    EXACT: tl.constexpr = FMT[8] == CHUNKS * UNITS * 16
    KIND: tl.constexpr = FMT[0]
    page = pool + entry * 256
    parts = ()
    for chunk in tl.static_range(CHUNKS):
        now = unit + chunk * UNITS
        if DOTS:
            codes = load_unit(pool_longs + entry * 32, row, chunk * UNITS, valid, UNITS, BN, SLOTS, EXACT, FMT)
        else:
            if WIDE == 4:
                words = tl.expand_dims(pool_words + entry * 64, -1)
            else:
                words = tl.expand_dims(page, -1)
            line, word = tl.expand_dims(row, -1), _words_of(now, WIDE)
            keep = word < FMT[8] // WIDE
            if valid is not None:
                keep = keep & tl.expand_dims(valid, -1)
            codes = (tl.load(words + (line * (FMT[8] // WIDE) + word), mask=keep, other=0, volatile=True),)
            if (KIND == "int5") | (KIND == "int6"):
                codes = codes + (load_high(words, line, word, keep, 0, FMT, WIDE), load_high(words, line, word, keep, 1, FMT, WIDE))
        parts = parts + ((codes, load_scales(page, row, now, valid, EXACT, FMT)),)
    if FMT[6]:
        if SLOTS > 0:
            parts = parts + (factor_of(page + row * 0, valid, FMT),)
        else:  # the page is there even where none of its rows are wanted
            parts = parts + (factor_of(page, None, FMT),)
    return parts


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
def activations(
    x_ptr, quads_ptr, row, unit, valid,
    FMT: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """What rows are multiplied with, for each chunk and half, and what the sums are multiplied with afterwards (float32).

    row: of x, a scalar or broadcast. unit: [units, rows(, 1)], with the rows' dimension, so that activations come to be where codes are.
    """
    HALVES: tl.constexpr = FMT[18]
    EXACT: tl.constexpr = FMT[8] == CHUNKS * UNITS * 16
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    parts = ()
    if DOTS:
        raw = ()
        for chunk in tl.static_range(CHUNKS):
            now = unit + chunk * UNITS
            keep = valid
            if not EXACT:
                keep = now < FMT[8] // 16
                if valid is not None:
                    keep = keep & valid
            for half in tl.static_range(HALVES):
                raw = raw + (load_quads(quads_ptr, row, now, keep, half, FMT),)
        inverse, step = steps_of(raw, CHUNKS * HALVES, dtype)
        if FMT[0] == "fp4":
            step *= 0.5  # sums are doubled
        for number in tl.static_range(CHUNKS * HALVES):
            parts = parts + (whole(raw[number], inverse, number % HALVES, FMT, dtype),)
    else:
        step = 1.0
        if len(row.shape) > 0:
            line = tl.expand_dims(row, -1)
        else:
            line = row
        for chunk in tl.static_range(CHUNKS):
            word = _words_of(unit + chunk * UNITS, WIDE)
            keep = word < FMT[8] // WIDE
            if valid is not None:
                keep = keep & tl.expand_dims(valid, -1)
            for half in tl.static_range(HALVES):
                parts = parts + (_four(x_ptr, quads_ptr, line, word, keep, half, FMT, WIDE),)
    return parts, step


@triton.jit
def _numbers_sum(codes, x, scale, zero, off, HALF: tl.constexpr, FMT: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr):
    """Scaled products of one half of units' codes, as numbers, with their activations."""
    KIND: tl.constexpr = FMT[0]
    OFFSET: tl.constexpr = FMT[4]
    BIAS: tl.constexpr = FMT[5]
    HAS_B: tl.constexpr = FMT[19]
    words = codes[0].to(tl.int32)
    if FAST:
        w_0, w_1, w_2, w_3 = tl.inline_asm_elementwise(
            FP8_FLOATS, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
        )
        total = tl.sum(w_0 * x[0] + w_1 * x[1] + w_2 * x[2] + w_3 * x[3], -1) * (scale * (1.0 / LIFT))
    else:
        high = words
        if (KIND == "int5") | (KIND == "int6"):
            high = codes[1 + HALF]
        if HAS_B & (OFFSET != "zero"):
            # What all codes have too much is the same for all rows: the sum begins with it.
            part = x[4] * -bias_of(FMT)
        else:
            part = x[4] * 0.0
        part += numbers(words, high, 0, HALF, FMT) * x[0]
        if WIDE == 4:
            part += numbers(words, high, 1, HALF, FMT) * x[1]
            part += numbers(words, high, 2, HALF, FMT) * x[2]
            part += numbers(words, high, 3, HALF, FMT) * x[3]
        a, b = terms(scale, zero + BIAS, off, FMT)
        total = tl.sum(part, -1) * a
        if OFFSET == "zero":
            total += b * tl.sum(x[4], -1)
        elif OFFSET != "none":
            total += off * tl.sum(x[4], -1)
    return total


@triton.jit
def sum_rows(
    rows, x, step, unit,
    FMT: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, DOTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Products of rows from `load_rows` with `activations`, scaled, float32 [units, rows(, slots)]: still to be summed over units.

    FAST: the machine converts floats of 8 bits.
    """
    OFFSET: tl.constexpr = FMT[4]
    BIAS: tl.constexpr = FMT[5]
    HALVES: tl.constexpr = FMT[18]
    total = 0.0
    for chunk in tl.static_range(CHUNKS):
        now = unit + chunk * UNITS
        for half in tl.static_range(HALVES):
            a = x[chunk * HALVES + half]
            scale, zero, off = scale_numbers(rows[chunk][1], now, a[10] if DOTS else now * 0, half, FMT)
            if DOTS:
                sums = dot(rows[chunk][0], a, now, half, FMT)
                if OFFSET == "zero":
                    sums -= (zero + BIAS) * a[9]
                elif OFFSET != "none":
                    total += off * a[9]
                total += scale * sums
            else:
                total += _numbers_sum(rows[chunk][0], a, scale, zero, off, half, FMT, WIDE, FAST)
    if FMT[6]:
        total = total * rows[CHUNKS]
    return total * step
