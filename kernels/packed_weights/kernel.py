# mypy: ignore-errors
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""Triton helpers that read a packed matrix where it lies in its page; other kernels call them, with a description made by `described`.

Every format is read in one way. A code becomes a float32 number v by moving its bits, without a conversion, and with the numbers of its
group

    w = a · v + b

where v is the code's own bits, masked, somewhere in the lower part of a float32: an integer as the mantissa of a denormal number, a float
of 8 or 4 bits with its exponent's lowest bit where a float32 has it, so that small ones need no repair either. Such a v is far too small.
Whoever uses it multiplies it, or what it is multiplied with, by a power of two first (`lifted`); a holds the rest of the factor.

Where codes are to become numbers of 16 bits for the matrix units, `spread` and `scaled` do the same two at a time. `dots` makes no numbers
of them at all.

Codes are taken from words: a byte, or four neighbouring bytes as an int32. Where two codes share a byte, HALF says which: byte c of a row
has column 64 · (c // 32) + c % 32 in half 0 and the one 32 further in half 1.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from rimuru_kernels.packed_weights.format import BLOCK, LOW_BITS, SUPER_GROUP, PackedFormat, page_parts

LIFT = tl.constexpr(2.0**64)
LIFT_INTEGER = tl.constexpr(2.0**90)
INTEGER_REST = tl.constexpr(2.0**59)
"""An integer in the lowest bits of a float32 is 2^149 too small."""
FP8_REST = tl.constexpr(2.0**56)
"""e4m3 has 120 less in its exponents than float32."""
FP4_REST = tl.constexpr(2.0**62)
"""e2m1 has 126 less."""

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter knows no machine instructions, so there `numbers` does what `spread` and `scaled` do elsewhere."""


def _spread_code(left: int, mask: int, one: int, sign: int | None = None) -> str:
    """PTX: four bytes to eight codes, two in each register: moved `left` (the high ones of a byte four less), masked, `one` put on top.

    sign: how far the code's fourth bit moves, to become the sign of a float.
    """
    lines = ["prmt.b32 a, $4, 0, 0x4140;", "prmt.b32 b, $4, 0, 0x4342;"]
    for target, (source, back) in enumerate((("a", 0), ("b", 0), ("a", 4), ("b", 4))):
        lines.append(_shift(f"${target}", source, left - back))
        if sign is None:
            lines.append(f"lop3.b32 ${target}, ${target}, {mask}, {one}, 0xEA;")
        else:
            lines += [f"and.b32 ${target}, ${target}, {mask};", _shift("t", source, sign - back)]
            lines.append(f"lop3.b32 ${target}, t, 0x80008000, ${target}, 0xEA;")
    return "{ .reg .b32 a, b, t; " + " ".join(lines) + " }"


def _shift(target: str, source: str, left: int) -> str:
    return f"shl.b32 {target}, {source}, {left};" if left >= 0 else f"shr.b32 {target}, {source}, {-left};"


def _spread_float(right: int, mask: int) -> str:
    """PTX: four bytes that are floats of 8 bits to four of 16: the sign to the top, the rest to where exponents end."""
    lines = ["prmt.b32 a, $2, 0, 0x1404;", "prmt.b32 b, $2, 0, 0x3424;"]
    for target, source in (("$0", "a"), ("$1", "b")):
        lines += [f"shr.b32 t, {source}, {right};", f"and.b32 t, t, {mask};", f"lop3.b32 {target}, {source}, 0x80008000, t, 0xEA;"]
    return "{ .reg .b32 a, b, t; " + " ".join(lines) + " }"


SPREAD_INT4_BF16 = tl.constexpr(_spread_code(3, 0x00780078, 0x3F803F80))
SPREAD_INT4_F16 = tl.constexpr(_spread_code(6, 0x03C003C0, 0x3C003C00))
SPREAD_FP4_BF16 = tl.constexpr(_spread_code(6, 0x01C001C0, 0, 12))
SPREAD_FP4_F16 = tl.constexpr(_spread_code(9, 0x0E000E00, 0, 12))
SPREAD_FP8_BF16 = tl.constexpr(_spread_float(4, 0x07F007F0))
SPREAD_FP8_F16 = tl.constexpr(_spread_float(1, 0x3F803F80))
# An integer under the bits of 2^23 (float32) or 2^10 (float16) is a number without a conversion.
SPREAD_INT8_BF16 = tl.constexpr(
    "{ .reg .b32 u, a, b, c, d; xor.b32 u, $2, 0x80808080; "
    + " ".join(f"prmt.b32 {name}, u, 0x4B000000, {0x7440 + byte}; sub.f32 {name}, {name}, 0f4B000080;" for byte, name in enumerate("abcd"))
    + " cvt.rn.bf16x2.f32 $0, b, a; cvt.rn.bf16x2.f32 $1, d, c; }"
)
SPREAD_INT8_F16 = tl.constexpr(
    "{ .reg .b32 u, a, b, o, c; xor.b32 u, $2, 0x80808080; mov.b32 o, 0x3C003C00; mov.b32 c, 0xE480E480; "
    "prmt.b32 a, u, 0x64646464, 0x4140; prmt.b32 b, u, 0x64646464, 0x4342; fma.rn.f16x2 $0, a, o, c; fma.rn.f16x2 $1, b, o, c; }"
)
_SCALED = "{{ .reg .b32 l, t; mov.b32 l, {lift}; fma.rn.{kind} t, $1, l, $2; fma.rn.{kind} $0, t, $3, $4; }}"
SCALED_INT4_BF16 = tl.constexpr(_SCALED.format(lift=0x3F803F80, kind="bf16x2"))
SCALED_INT4_F16 = tl.constexpr(_SCALED.format(lift=0x3C003C00, kind="f16x2"))
SCALED_FP8_F16 = tl.constexpr(_SCALED.format(lift=0x5C005C00, kind="f16x2"))
SCALED_FP4_BF16 = tl.constexpr(_SCALED.format(lift=0x5F805F80, kind="bf16x2"))
SCALED_FP4_F16 = tl.constexpr(_SCALED.format(lift=0x74007400, kind="f16x2"))


def described(fmt: PackedFormat, rows: int, columns: int) -> tuple[object, ...]:
    """What the helpers have to know about a packed matrix [rows, columns] when they are compiled; their argument FMT."""
    parts = page_parts(fmt, rows, columns)
    floats = fmt.values in ("fp8", "fp4")
    return (
        fmt.values, fmt.group, fmt.group_rows, fmt.scale, fmt.offset, fmt.bias, fmt.factor, columns, parts.values.row_bytes,
        parts.high.start, parts.high.row_bytes, parts.scales.start, parts.super_scales.start, parts.offsets.start,
        parts.super_offsets.start, parts.factor.start, fmt.groups(columns), -(-columns // SUPER_GROUP),
        1 if LOW_BITS[fmt.values] == 8 else 2, not floats and (fmt.values == "int8" or bool(fmt.bias) or fmt.offset != "none"),
        has_pairs(fmt, columns), scales_together(fmt, columns),
    )  # fmt: skip


assert BLOCK == 64


def has_pairs(fmt: PackedFormat, columns: int) -> bool:
    """Whether the two scales that belong to 32 bytes of 4-bit codes lie side by side, with nothing else to know about their groups."""
    plain = fmt.scale in ("f16", "bf16", "e8m0") and fmt.offset == "none"
    return LOW_BITS[fmt.values] == 4 and fmt.group == 32 and plain and not columns % BLOCK


def scales_together(fmt: PackedFormat, columns: int) -> int:
    """How scales of both halves of the same bytes lie: 1: they are one (or there is one half); 2: two in a word that holds nothing else;
    4: two of four in a word; 0: apart."""
    if LOW_BITS[fmt.values] == 8 or not fmt.group % BLOCK:
        return 1
    whole, bytes_each = not columns % BLOCK and fmt.offset in ("none", "u8*f16"), fmt.scale not in ("f32", "f16", "bf16")
    if whole and fmt.group == 32 and fmt.scale != "f32":
        return 2
    return 4 if whole and fmt.group == 16 and bytes_each and fmt.offset == "none" else 0


@triton.jit
def load_where(places, keep):
    """What lies at these places; 0 where not `keep` (None: everywhere)."""
    if keep is None:
        values = tl.load(places)
    else:
        values = tl.load(places, mask=keep, other=0)
    return values


@triton.jit
def first_column(word, HALF: tl.constexpr, FMT: tl.constexpr, WIDE: tl.constexpr):
    """The first column of the codes in a word, counted in WIDE columns; a word's WIDE codes of one half are neighbours."""
    HALVES: tl.constexpr = FMT[18]
    WORDS: tl.constexpr = 32 // WIDE
    if HALVES == 1:
        column = word
    else:
        column = word // WORDS * (2 * WORDS) + word % WORDS + WORDS * HALF
    return column


@triton.jit
def load_words(page, row, word, keep, FMT: tl.constexpr, WIDE: tl.constexpr):
    """Words of `row`: int32 where WIDE is 4, else bytes. page: where it begins, of int32 or of bytes accordingly."""
    ROW_BYTES: tl.constexpr = FMT[8]
    return load_where(page + (row * (ROW_BYTES // WIDE) + word), keep)


@triton.jit
def load_high(page, row, word, keep, HALF: tl.constexpr, FMT: tl.constexpr, WIDE: tl.constexpr):
    """The high bits of the codes of a word, at the bottom of its bytes; int32. None where codes have none. See `load_words`."""
    KIND: tl.constexpr = FMT[0]
    HIGH: tl.constexpr = FMT[9]
    ROW_BYTES: tl.constexpr = FMT[10]
    if (KIND == "int5") | (KIND == "int6"):
        WORDS: tl.constexpr = 32 // WIDE
        OWN: tl.constexpr = (8 if KIND == "int5" else 16) // WIDE
        BITS: tl.constexpr = 1 if KIND == "int5" else 2
        at = word // WORDS * OWN + word % OWN
        high = load_where(page + (HIGH // WIDE + row * (ROW_BYTES // WIDE) + at), keep).to(tl.int32)
        high = high >> (4 * HALF + word % WORDS // OWN * BITS)
    else:
        high = None
    return high


@triton.jit
def numbers(words, high, BYTE: tl.constexpr, HALF: tl.constexpr, FMT: tl.constexpr):
    """float32 v of the codes in one byte of these words; see the top. high: of `load_high`."""
    KIND: tl.constexpr = FMT[0]
    AT: tl.constexpr = 8 * (BYTE % 2) + 4 * HALF
    TOP: tl.constexpr = -(2**31)
    if (KIND == "fp8") | (KIND == "fp4"):
        # The sign comes to the top, and stays there when the rest moves down to where exponents end.
        if KIND == "fp8":
            bits = ((words << (24 - 8 * BYTE)) >> 4) & (TOP + 0x07F00000)
        else:
            bits = ((words << (28 - 8 * BYTE - 4 * HALF)) >> 6) & (TOP + 0x01C00000)
    else:
        if KIND == "int8":
            words = words ^ -2139062144  # 0x80808080: adds 128 to each
        if BYTE >= 2:
            words = words >> 16
        if KIND == "int8":
            bits = words & (0xFF << AT)
        else:
            bits = words & (0x0F << AT)
        if (KIND == "int5") | (KIND == "int6"):
            if BYTE >= 2:
                high = high >> 16
            MORE: tl.constexpr = 1 if KIND == "int5" else 3
            bits = bits | ((high << (4 + 4 * HALF)) & (MORE << (AT + 4)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def lifted(x, BYTE: tl.constexpr, HALF: tl.constexpr, FMT: tl.constexpr):
    """x times what `numbers` of this byte and half lack (but for what is left to a): x is v, or what v will be multiplied with."""
    KIND: tl.constexpr = FMT[0]
    if (KIND == "fp8") | (KIND == "fp4"):
        y = x * LIFT
    elif BYTE % 2 == 0:
        y = x * (LIFT_INTEGER if HALF == 0 else LIFT_INTEGER / 16)
    else:
        y = x * (LIFT_INTEGER / 256 if HALF == 0 else LIFT_INTEGER / 4096)
    return y


@triton.jit
def load_typed(page, START: tl.constexpr, index, dtype: tl.constexpr, keep):
    """Item `index` of those of `dtype` that begin at byte START of a page; 0 where not `keep` (None: everywhere)."""
    return load_where((page + START).to(tl.pointer_type(dtype)) + index, keep)


@triton.jit
def _supers(page, START: tl.constexpr, row, column, keep, FMT: tl.constexpr):
    SUPERS: tl.constexpr = FMT[17]
    return load_typed(page, START, row * SUPERS + column // 256, tl.float16, keep).to(tl.float32)


@triton.jit
def scale_of(page, row, column, keep, FMT: tl.constexpr):
    """Of the groups that hold `column` of `row`, in float32: the scale, what is subtracted from codes before, and what is added afterwards.

    page, row, column and keep (None: everywhere) are broadcast. The factor of a whole matrix is not in them.
    """
    KIND: tl.constexpr = FMT[0]
    GROUP: tl.constexpr = FMT[1]
    GROUP_ROWS: tl.constexpr = FMT[2]
    SCALE: tl.constexpr = FMT[3]
    OFFSET: tl.constexpr = FMT[4]
    BIAS: tl.constexpr = FMT[5]
    SCALES: tl.constexpr = FMT[11]
    SUPER_SCALES: tl.constexpr = FMT[12]
    OFFSETS: tl.constexpr = FMT[13]
    SUPER_OFFSETS: tl.constexpr = FMT[14]
    GROUPS: tl.constexpr = FMT[16]
    if GROUP > 0:
        group = column // GROUP
    else:
        group = column * 0
    index = row // GROUP_ROWS * GROUPS + group
    if SCALE == "f32":
        scale = load_typed(page, SCALES, index, tl.float32, keep)
    elif SCALE == "f16":
        scale = load_typed(page, SCALES, index, tl.float16, keep).to(tl.float32)
    elif SCALE == "bf16":
        scale = load_typed(page, SCALES, index, tl.bfloat16, keep).to(tl.float32)
    elif SCALE == "i8*f16":
        scale = load_typed(page, SCALES, index, tl.int8, keep).to(tl.float32) * _supers(page, SUPER_SCALES, row, column, keep, FMT)
    else:
        code = load_where(page + SCALES + index, keep).to(tl.int32)
        if SCALE == "e8m0":
            scale = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
        elif SCALE == "e4m3":
            scale = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            scale = code.to(tl.float32) * _supers(page, SUPER_SCALES, row, column, keep, FMT)
    off = tl.zeros_like(scale)
    less = off + BIAS
    if OFFSET == "zero":
        if KIND == "int8":
            less += load_typed(page, OFFSETS, index, tl.int8, keep).to(tl.float32)
        else:
            less += load_where(page + OFFSETS + index, keep).to(tl.float32)
    elif OFFSET == "min":
        off = load_typed(page, OFFSETS, index, tl.float16, keep).to(tl.float32)
    elif OFFSET == "u8*f16":
        off = -load_where(page + OFFSETS + index, keep).to(tl.float32) * _supers(page, SUPER_OFFSETS, row, column, keep, FMT)
    return scale, less, off


@triton.jit
def scale_pair(page, row, start, FMT: tl.constexpr):
    """Scales of both halves' codes in the 32 bytes from `start` on, read as one word; float32. Only where `has_pairs`."""
    SCALE: tl.constexpr = FMT[3]
    SCALES: tl.constexpr = FMT[11]
    GROUPS: tl.constexpr = FMT[16]
    index = row * (GROUPS // 2) + start // 32
    if SCALE == "e8m0":
        pair = tl.load((page + SCALES).to(tl.pointer_type(tl.int16)) + index).to(tl.int32)
        low, high = pair & 0xFF, (pair >> 8) & 0xFF
        scale_0 = tl.where(low == 0, 0x400000, low << 23).to(tl.float32, bitcast=True)
        scale_1 = tl.where(high == 0, 0x400000, high << 23).to(tl.float32, bitcast=True)
    else:
        dtype: tl.constexpr = tl.float16 if SCALE == "f16" else tl.bfloat16
        pair = tl.load((page + SCALES).to(tl.pointer_type(tl.int32)) + index)
        scale_0 = pair.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        scale_1 = (pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return scale_0, scale_1


@triton.jit
def bias_of(FMT: tl.constexpr):
    """What `numbers` has too much in every code, as a v that is lifted: the same for all groups, where no zero points differ."""
    KIND: tl.constexpr = FMT[0]
    BIAS: tl.constexpr = FMT[5]
    return (BIAS + (128.0 if KIND == "int8" else 0.0)) / INTEGER_REST


@triton.jit
def factor_of(page, keep, FMT: tl.constexpr):
    """What multiplies all weights of a page, float32; page and keep (None: everywhere) of one shape."""
    FACTOR: tl.constexpr = FMT[6]
    FACTOR_AT: tl.constexpr = FMT[15]
    if FACTOR:
        factor = load_typed(page, FACTOR_AT, 0, tl.float32, keep)
    else:
        factor = 1.0
    return factor


@triton.jit
def terms(scale, less, off, FMT: tl.constexpr):
    """a and b, float32, from what `scale_of` gave; b is 0 for floats."""
    KIND: tl.constexpr = FMT[0]
    if KIND == "fp8":
        a = scale * FP8_REST
        b = off
    elif KIND == "fp4":
        a = scale * FP4_REST
        b = off
    else:
        a = scale * INTEGER_REST
        b = off - scale * (less + (128.0 if KIND == "int8" else 0.0))
    return a, b


@triton.jit
def spread(codes, FMT: tl.constexpr, dtype: tl.constexpr):
    """Both halves of bytes of codes as dtype (bfloat16 or float16), twice the same where a byte is one code; not for 5 and 6 bits.

    int8: the code. int4: 1 + q / 16. Floats: their bits, 2^120 or 2^126 (as float16, 2^8 or 2^14) too small. Two numbers at a time in the
    halves of a register: a third of the instructions of `numbers`.
    """
    KIND: tl.constexpr = FMT[0]
    WIDE: tl.constexpr = dtype == tl.bfloat16
    if (KIND == "int8") | (KIND == "fp8"):
        if KIND == "int8":
            ASM: tl.constexpr = SPREAD_INT8_BF16 if WIDE else SPREAD_INT8_F16
        else:
            ASM: tl.constexpr = SPREAD_FP8_BF16 if WIDE else SPREAD_FP8_F16
        if WIDE:  # written out: a dtype that is an argument is not taken here
            v = tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            v = tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        return v, v
    else:
        if KIND == "int4":
            ASM: tl.constexpr = SPREAD_INT4_BF16 if WIDE else SPREAD_INT4_F16
        else:
            ASM: tl.constexpr = SPREAD_FP4_BF16 if WIDE else SPREAD_FP4_F16
        if WIDE:
            return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def scaled(v, scale, less, off, FMT: tl.constexpr, dtype: tl.constexpr):
    """Weights from what `spread` gave; scale, less, off: of `scale_of`, broadcast.

    The codes' numbers are exact until they are scaled; scale and addend are rounded to dtype first.
    """
    KIND: tl.constexpr = FMT[0]
    OFFSET: tl.constexpr = FMT[4]
    BF16: tl.constexpr = dtype == tl.bfloat16
    if (OFFSET == "min") | (OFFSET == "u8*f16"):
        # From the middle of the codes on, so that what is added, and its rounding, are small.
        MIDDLE: tl.constexpr = 8 if KIND == "int4" else 0
        less += MIDDLE
        off += scale * MIDDLE
    if KIND == "int4":
        ASM: tl.constexpr = SCALED_INT4_BF16 if BF16 else SCALED_INT4_F16
        a, c = scale * 16.0, -1.0 - less * 0.0625
    elif KIND == "int8":
        ASM: tl.constexpr = SCALED_INT4_BF16 if BF16 else SCALED_INT4_F16
        a, c = scale, -less
    elif KIND == "fp8":
        ASM: tl.constexpr = SCALED_FP4_BF16 if BF16 else SCALED_FP8_F16
        a, c = scale * FP8_REST if BF16 else scale, less * 0.0
    else:
        ASM: tl.constexpr = SCALED_FP4_BF16 if BF16 else SCALED_FP4_F16
        a, c = scale * FP4_REST if BF16 else scale, less * 0.0
    args = [v, c.to(dtype), a.to(dtype), off.to(dtype)]
    if BF16:
        return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", args, dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", args, dtype=tl.float16, is_pure=True, pack=2)
