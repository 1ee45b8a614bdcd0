# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows no other way to make a longer tuple
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""Triton helpers that multiply packed rows with a few activations in integers, without making a number of every code.

The machine multiplies four bytes with four others and adds them up in one instruction. Activations of 16 bits become integers of 16 bits,
relative to the largest that a thread holds, and each of these two bytes: x = step · (256 · high + low), with an error of at most step / 2,
2^-16 of that largest. Codes of up to 8 bits are such bytes already, and so are floats of 4 bits, doubled. What is summed is exact; a
group's sum then becomes a float32 and is scaled.

A unit is 16 bytes of a row's codes: two int64, near and far. Its codes of one half are 16 neighbouring columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.packed_weights.format import PackedFormat, page_parts
from rimuru_kernels.packed_weights.kernel import INTERPRETED, first_column, load_where

UNIT = 16
STEPS = tl.constexpr(32512.0)
"""The largest activation as an integer; its high byte is 127."""
ROUNDS = tl.constexpr(12582912.0)
"""1.5 · 2^23: a float32 that is added to it has its integer in the lowest bits."""
SMALLEST = tl.constexpr(1e-30)


def multiplies_integers(fmt: PackedFormat, rows: int, columns: int, itemsize: int) -> bool:
    """Whether `dot` can be used: whole units, activations of two bytes that are read four at a time, and codes that are integers."""
    whole = page_parts(fmt, rows, columns).values.row_bytes % UNIT == 0 and columns % (UNIT if fmt.values == "int8" else 64) == 0
    return whole and itemsize == 2 and fmt.values != "fp8"


def _dot(codes: str, kind: str) -> str:
    """PTX: $3 and the sum of 16 products of near and far ($1, $2) with high bytes ($4 to $7) and low ones; `codes` makes c0 to c3 bytes."""
    high = " ".join(f"dp4a.{kind}.s32 t, c{i}, ${4 + i}, {'t' if i else '0'};" for i in range(4))
    low = " ".join(f"dp4a.{kind}.u32 t, c{i}, ${8 + i}, t;" for i in range(4))
    parts = "mov.b64 {c0, c1}, $1; mov.b64 {c2, c3}, $2;"
    return f"{{ .reg .b32 c<4>, m<4>, p, q, r, s, t; {parts} {codes} {high} mad.lo.s32 t, t, 256, $3; {low} mov.b32 $0, t; }}"


def _nibbles(half: int, more: int = 0) -> str:
    """PTX: codes of one half of bytes; more: mask of what comes from $12 and $13, the high bits, whose half 0 lies four bits too low."""
    lines = ["mov.b64 {m0, m1}, $12; mov.b64 {m2, m3}, $13;"] if more else []
    for i in range(4):
        if half:
            lines.append(f"shr.b32 c{i}, c{i}, 4;")
        elif more:
            lines.append(f"shl.b32 m{i}, m{i}, 4;")
        lines.append(f"and.b32 c{i}, c{i}, 0x0F0F0F0F;")
        if more:
            lines.append(f"lop3.b32 c{i}, m{i}, {more}, c{i}, 0xEA;")
    return " ".join(lines)


def _table(half: int) -> str:
    """PTX: floats of 4 bits, doubled, plus 128, as bytes: looked up four at a time.

    A number of four bits that picks a byte picks its highest bit instead, eight times, where its own fourth bit is set. So from a table of
    2 · size negative codes get 0, and from one of 128 - size, with that bit cleared, all get something: the sum is 128 plus the number.
    $12 and $13 hold the tables of small codes, those of large ones are in the instructions; $14 is one, so that the sum is no work for the
    units that permute bytes.
    """
    order = 0x7531 if half else 0x6420
    lines = []
    for i in range(4):
        lines += [f"and.b32 r, c{i}, 0x77777777;", f"mov.b32 s, c{i};"]
        for target in ("p", "q"):
            lines += ["prmt.b32 m0, $12, 0x18100C08, s;", "prmt.b32 m1, $13, 0x74787A7C, r;", f"mad.lo.u32 {target}, m0, $14, m1;"]
            if target == "p":
                lines += ["shr.b32 r, r, 16;", "shr.b32 s, s, 16;"]
        lines.append(f"prmt.b32 c{i}, p, q, {order};")
    return " ".join(lines)


DOT_INT8 = tl.constexpr(_dot("", "s32"))
# The codes of half 1 stay where they are, sixteen times too large.
DOT_INT4 = tl.constexpr(tuple(_dot(" ".join(f"and.b32 c{i}, c{i}, {mask};" for i in range(4)), "u32") for mask in (0x0F0F0F0F, 0xF0F0F0F0)))
DOT_INT5 = tl.constexpr((_dot(_nibbles(0, 0x10101010), "u32"), _dot(_nibbles(1, 0x10101010), "u32")))
DOT_INT6 = tl.constexpr((_dot(_nibbles(0, 0x30303030), "u32"), _dot(_nibbles(1, 0x30303030), "u32")))
DOT_FP4 = tl.constexpr((_dot(_table(0), "u32"), _dot(_table(1), "u32")))
_IN = "=r,l,l,r,r,r,r,r,r,r,r,r"
PLAIN_DOT = tl.constexpr(_IN)
DOT_WITH_BITS = tl.constexpr(_IN + ",l,l")
DOT_WITH_TABLE = tl.constexpr(_IN + ",r,r,r")


def _whole(convert: str) -> str:
    """PTX: four numbers in $2, times $3, as integers: high bytes and low ones."""
    sums = " ".join(f"fma.rn.f32 x{i}, x{i}, $3, 0f4B400000; mov.b32 t{i}, x{i};" for i in range(4))
    bytes_of = "prmt.b32 a, t0, t1, 0x5140; prmt.b32 b, t2, t3, 0x5140; prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, a, b, 0x5410;"
    return f"{{ .reg .b32 a, b, t<4>; .reg .f32 x<4>; mov.b64 {{a, b}}, $2; {convert} {sums} {bytes_of} }}"


WHOLE_BF16 = tl.constexpr(
    _whole(
        "shl.b32 t0, a, 16; and.b32 t1, a, 0xFFFF0000; shl.b32 t2, b, 16; and.b32 t3, b, 0xFFFF0000; "
        + " ".join(f"mov.b32 x{i}, t{i};" for i in range(4))
    )
)
WHOLE_F16 = tl.constexpr(
    _whole("{ .reg .b16 h<4>; mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b; " + " ".join(f"cvt.f32.f16 x{i}, h{i};" for i in range(4)) + " }")
)
_LARGEST = (
    "{{ .reg .b32 a, b; mov.b64 {{a, b}}, $1; and.b32 a, a, 0x7FFF7FFF; and.b32 b, b, 0x7FFF7FFF; "
    "max.NaN.{kind} a, a, b; max.NaN.{kind} $0, a, $2; }}"
)
LARGEST_BF16 = tl.constexpr(_LARGEST.format(kind="bf16x2"))
LARGEST_F16 = tl.constexpr(_LARGEST.format(kind="f16x2"))


@triton.jit
def load_in_turn(places, keep):
    """What lies at these places; anything where not `keep` (None: everywhere). In the order written, which the assembler would change."""
    if keep is None:
        values = tl.load(places, volatile=True)
    else:
        values = tl.load(places, mask=keep, volatile=True)
    return values


@triton.jit
def _floats(quads, dtype: tl.constexpr):
    x_0 = quads.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    x_1 = (quads >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    x_2 = (quads >> 32).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    x_3 = (quads >> 48).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x_0, x_1, x_2, x_3


@triton.jit
def load_quads(quads_ptr, row, unit, keep, HALF: tl.constexpr, FMT: tl.constexpr):
    """The 16 activations of `row` that meet a unit's codes of one half: four times int64, four numbers of two bytes each."""
    K: tl.constexpr = FMT[7]
    at = row * (K // 4) + first_column(unit * 16, HALF, FMT, 1) // 4
    q_0 = load_where(quads_ptr + at, keep)
    q_1 = load_where(quads_ptr + at + 1, keep)
    q_2 = load_where(quads_ptr + at + 2, keep)
    q_3 = load_where(quads_ptr + at + 3, keep)
    return q_0, q_1, q_2, q_3


@triton.jit
def _larger(quads, so_far, dtype: tl.constexpr):
    """The largest absolute values so far, two in an int32; in the interpreter one, a float32. NaN where there is one."""
    if INTERPRETED:
        ALL: tl.constexpr = tl.PropagateNan.ALL
        x_0, x_1, x_2, x_3 = _floats(quads, dtype)
        pair = tl.maximum(tl.maximum(tl.abs(x_0), tl.abs(x_1), ALL), tl.maximum(tl.abs(x_2), tl.abs(x_3), ALL), ALL)
        pair = tl.maximum(pair, so_far, ALL)
    elif dtype == tl.bfloat16:
        pair = tl.inline_asm_elementwise(LARGEST_BF16, "=r,l,r", [quads, so_far], dtype=tl.int32, is_pure=True, pack=1)
    else:
        pair = tl.inline_asm_elementwise(LARGEST_F16, "=r,l,r", [quads, so_far], dtype=tl.int32, is_pure=True, pack=1)
    return pair


@triton.jit
def steps_of(raw, COUNT: tl.constexpr, dtype: tl.constexpr):
    """How many integers there are to one, and its reciprocal, for activations of `load_quads`, COUNT times."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    pair = raw[0][0].to(tl.int32) * 0
    if INTERPRETED:
        pair = pair.to(tl.float32)
    for number in tl.static_range(COUNT):
        for four in tl.static_range(4):
            pair = _larger(raw[number][four], pair, dtype)
    if INTERPRETED:
        top = pair
    else:
        low = pair.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        top = tl.maximum(low, (pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32), ALL)
    top = tl.maximum(top, SMALLEST, ALL)
    step = top * (1.0 / STEPS)
    return 1.0 / step, step


@triton.jit
def _bytes(quads, inverse, dtype: tl.constexpr):
    """Four activations as high bytes and low bytes, int32 each."""
    if INTERPRETED:
        x_0, x_1, x_2, x_3 = _floats(quads, dtype)
        t_0 = (x_0 * inverse + ROUNDS).to(tl.int32, bitcast=True)
        t_1 = (x_1 * inverse + ROUNDS).to(tl.int32, bitcast=True)
        t_2 = (x_2 * inverse + ROUNDS).to(tl.int32, bitcast=True)
        t_3 = (x_3 * inverse + ROUNDS).to(tl.int32, bitcast=True)
        low = (t_0 & 255) | ((t_1 & 255) << 8) | ((t_2 & 255) << 16) | (t_3 << 24)
        high = ((t_0 >> 8) & 255) | (t_1 & 0xFF00) | ((t_2 & 0xFF00) << 8) | ((t_3 & 0xFF00) << 16)
    elif dtype == tl.bfloat16:
        high, low = tl.inline_asm_elementwise(WHOLE_BF16, "=r,=r,l,f", [quads, inverse], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        high, low = tl.inline_asm_elementwise(WHOLE_F16, "=r,=r,l,f", [quads, inverse], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    return high, low


@triton.jit
def whole(quads, inverse, HALF: tl.constexpr, FMT: tl.constexpr, dtype: tl.constexpr):
    """Activations of `load_quads` times `inverse` as integers: four times high bytes, four times low bytes, where sums begin (what all
    codes have too much), all int32; their sum, float32; and a zero, int32, that the compiler cannot know."""
    KIND: tl.constexpr = FMT[0]
    OFFSET: tl.constexpr = FMT[4]
    BIAS: tl.constexpr = FMT[5]
    h_0, l_0 = _bytes(quads[0], inverse, dtype)
    h_1, l_1 = _bytes(quads[1], inverse, dtype)
    h_2, l_2 = _bytes(quads[2], inverse, dtype)
    h_3, l_3 = _bytes(quads[3], inverse, dtype)
    zero = (inverse.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    start = h_0 * 0
    total = start.to(tl.float32)
    if (BIAS != 0) | (OFFSET != "none") | (KIND == "fp4"):
        ones = quads[0] * 0 + 0x0101010101010101
        sums = _dot_bytes(ones, ones, (h_0, h_1, h_2, h_3, l_0, l_1, l_2, l_3, start))
        total = sums.to(tl.float32)
        if KIND == "fp4":
            start = sums * -128
        elif OFFSET != "zero":
            start = sums * (-16 * BIAS if (KIND == "int4") & (HALF == 1) else -BIAS)
    return h_0, h_1, h_2, h_3, l_0, l_1, l_2, l_3, start, total, zero


@triton.jit
def _dot_bytes(near, far, x):
    if INTERPRETED:
        total = x[8]
        for byte in tl.static_range(8):
            WORD: tl.constexpr = byte // 4
            PLACE: tl.constexpr = byte % 4 * 8
            for part in tl.static_range(2):
                codes = near if part == 0 else far
                code = (((codes >> (8 * byte)).to(tl.int32) & 255) ^ 128) - 128
                high = (((x[2 * part + WORD] >> PLACE) & 255) ^ 128) - 128
                total += code * (high * 256 + ((x[4 + 2 * part + WORD] >> PLACE) & 255))
    else:
        args = [near, far, x[8], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
        total = tl.inline_asm_elementwise(DOT_INT8, PLAIN_DOT, args, dtype=tl.int32, is_pure=True, pack=1)
    return total


@triton.jit
def _codes(words, high, HALF: tl.constexpr, KIND: tl.constexpr):
    """The codes of a half as signed bytes of an int64; what the machine's instructions do in `dot`."""
    codes = (words >> (4 * HALF)) & 0x0F0F0F0F0F0F0F0F
    if KIND == "int5":
        codes |= (high << (4 - 4 * HALF)) & 0x1010101010101010
    if KIND == "int6":
        codes |= (high << (4 - 4 * HALF)) & 0x3030303030303030
    if KIND == "fp4":
        told = codes * 0
        for byte in tl.static_range(8):
            code = (codes >> (8 * byte)) & 15
            exponent, last = (code >> 1) & 3, code & 1
            size = tl.where(exponent == 0, last, (2 + last) << tl.maximum(exponent - 1, 0))
            told |= (tl.where(code >= 8, -size, size) & 255) << (8 * byte)
        codes = told
    return codes


@triton.jit
def dot(unit, x, number, HALF: tl.constexpr, FMT: tl.constexpr):
    """The sum of products of a unit's codes of one half (less the bias) with activations of `whole`, float32; doubled for floats of 4 bits.

    unit: of `load_unit`; number: which one of its row it is.
    """
    KIND: tl.constexpr = FMT[0]
    if KIND == "int8":
        total = _dot_bytes(unit[0], unit[1], x)
    elif INTERPRETED:
        bits = unit_bits(unit, number, FMT)
        zero = (x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8] * 0)
        total = _dot_bytes(_codes(unit[0], bits[0], HALF, KIND), _codes(unit[1], bits[1], HALF, KIND), zero)
        if KIND != "fp4":
            total = total * (16 if (KIND == "int4") & (HALF == 1) else 1) + x[8]
    else:
        args = [unit[0], unit[1], x[8], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
        if KIND == "int4":
            total = tl.inline_asm_elementwise(DOT_INT4[HALF], PLAIN_DOT, args, dtype=tl.int32, is_pure=True, pack=1)
        elif KIND == "fp4":
            # Twice 0, 1, 2, 3; 128 less 0, 1, 2, 3; one. As sums with a zero they stay in registers.
            args = args + [x[10] + 0x06040200, x[10] + 0x7D7E7F80, x[10] + 1]
            total = tl.inline_asm_elementwise(DOT_FP4[HALF], DOT_WITH_TABLE, args, dtype=tl.int32, is_pure=True, pack=1)
        else:
            bits = unit_bits(unit, number, FMT)
            args = args + [bits[0], bits[1]]
            if KIND == "int5":
                total = tl.inline_asm_elementwise(DOT_INT5[HALF], DOT_WITH_BITS, args, dtype=tl.int32, is_pure=True, pack=1)
            else:
                total = tl.inline_asm_elementwise(DOT_INT6[HALF], DOT_WITH_BITS, args, dtype=tl.int32, is_pure=True, pack=1)
    sums = total.to(tl.float32)
    if (KIND == "int4") & (HALF == 1):
        sums *= 0.0625
    return sums


@triton.jit
def unit_bits(unit, number, FMT: tl.constexpr):
    """The high bits of near and far of `load_unit`, int64; half 1's lie where they belong."""
    KIND: tl.constexpr = FMT[0]
    near, far = unit[0], unit[1]
    if KIND == "int6":
        near, far = unit[2] >> (number % 2 * 2), unit[3] >> (number % 2 * 2)
    if KIND == "int5":
        near = unit[2] >> (number % 2 * 2)
        far = near >> 1
    return near, far


@triton.jit
def load_unit(
    longs, row, start, valid,
    UNITS: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, EXACT: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    """UNITS units of `row` from `start` on: near, far, and what high bits there are; int64.

    longs: where the page begins, of int64; longs, row and valid (None: all) broadcast to [units, rows] or, with SLOTS, [units, rows,
    slots]. Units come first, so that neighbouring lanes get neighbours. EXACT: all units are within the row.
    """
    KIND: tl.constexpr = FMT[0]
    at = _first(tl.arange(0, 2 * UNITS) + start * 2, SLOTS)
    keep = valid
    if not EXACT:
        keep = at < FMT[8] // 8
        if valid is not None:
            keep = keep & valid
    near, far = _pairs(longs + row * (FMT[8] // 8) + at, keep, UNITS, BN, SLOTS)
    unit = (near, far)
    if (KIND == "int6") | (KIND == "int5"):
        bits = longs + (FMT[9] // 8) + row * (FMT[10] // 8)
        if KIND == "int6":
            high_near, high_far = _pairs(bits + (at // 4 * 2 + at % 2), keep, UNITS, BN, SLOTS)
            unit = (near, far, high_near, high_far)
        else:
            own = _first(tl.arange(0, UNITS) + start, SLOTS)
            keep = valid
            if not EXACT:
                keep = own < FMT[8] // 16
                if valid is not None:
                    keep = keep & valid
            unit = (near, far, load_in_turn(bits + own // 2, keep))
    return unit


@triton.jit
def _first(values, SLOTS: tl.constexpr):
    """A vector as the first of two or, with SLOTS, three dimensions."""
    if SLOTS > 0:
        result = values[:, None, None]
    else:
        result = values[:, None]
    return result


@triton.jit
def _pairs(places, keep, UNITS: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr):
    """What lies at [2 units, rows(, slots)], int64, the two of each unit apart: one load brings both. Anything where not `keep`."""
    values = load_in_turn(places, keep)
    if SLOTS > 0:
        near, far = tl.split(tl.permute(tl.reshape(values, [UNITS, 2, BN, SLOTS]), [0, 2, 3, 1]))
    else:
        near, far = tl.split(tl.permute(tl.reshape(values, [UNITS, 2, BN]), [0, 2, 1]))
    return near, far
