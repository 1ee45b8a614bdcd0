# mypy: ignore-errors
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""Two-byte numbers from words of packed codes, for the matrix units, in as few machine instructions as it takes.

A word is an int32 of four bytes of codes. Two neighbouring words become registers of two numbers each: codes that lie at the same place in
both words are moved side by side, two bytes of each at a time, and an integer code under the bits of a power of two is a number without a
conversion.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from rimuru_kernels.packed_weights.format import LOW_BITS, PackedFormat
from rimuru_kernels.packed_weights.kernel import FP4_REST, FP8_REST, INTERPRETED, first_column, lifted, load_where, numbers, scale_of, terms

_TOP = {"bf16": 0x43004300, "f16": 0x64006400}
"""128 in bfloat16, 1024 in float16: their lowest bits count ones."""
_ONE = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
_MINUS_ONE = {"bf16": 0xBF80BF80, "f16": 0xBC00BC00}
_FLOAT_LIFTS = {("fp8", "bf16"): 0x5F805F80, ("fp8", "f16"): 0x5C005C00, ("fp4", "bf16"): 0x5F805F80, ("fp4", "f16"): 0x74007400}
"""What numbers made of a float's bits lack, as far as the scale does not hold it: 2^64 (the rest is in `triple`), 2^8, 2^14."""
_FLOAT_BITS = {
    ("fp8", "bf16"): (4, 0x07F007F0),
    ("fp8", "f16"): (1, 0x3F803F80),
    ("fp4", "bf16"): (6, 0x01C001C0),
    ("fp4", "f16"): (3, 0x0E000E00),
}
"""From the sign in the top bit: how far the rest moves down, and what of it counts."""


@cache
def machine_code(fmt: PackedFormat, kind: str) -> str:
    """PTX of `from_words` for two words, and with them two numbers in each result register.

    Results: codes of bytes 0 to 3, where codes have four bits of a byte's first half, then of bytes 0 to 3 of its second. Then come the
    words; for each half what is added before, the scale and what is added afterwards; where codes have more than four bits in two planes,
    words of the high ones, so that those of the first half begin at bit 0 of a byte.

    Args:
        fmt: of the codes.
        kind: "bf16" or "f16".
    """
    halves = 1 if LOW_BITS[fmt.values] == 8 else 2
    high = {"int5": 0x00100010, "int6": 0x00300030}.get(fmt.values)
    word = 4 * halves
    lines = [_side_by_side("a", "b", f"${word}", f"${word + 1}")]
    if high:
        lines.append(_side_by_side("c", "d", f"${word + 2 + 3 * halves}", f"${word + 3 + 3 * halves}"))
    for half in range(halves):
        before, scale, after = (f"${word + 2 + 3 * half + place}" for place in range(3))
        for byte in range(4):
            source, more, at = "ab"[byte // 2], "cd"[byte // 2], 4 * half + 8 * (byte % 2)
            if fmt.values in ("fp8", "fp4"):
                lines += _float_bits(source, at, fmt.values, kind)
                lines.append(f"fma.rn.{kind}x2 t, t, lift, none;")
            elif fmt.values == "int8":
                lines += _byte(source, at, kind)
                if fmt.offset == "zero" or fmt.bias:
                    lines.append(f"fma.rn.{kind}x2 t, t, one, {before};")
            else:
                lines += _nibble(source, at, kind)
                if high:
                    lines += [_moved("h", more, 4 - at), f"lop3.b32 t, h, {high:#x}, t, 0xEA;"]
                lines.append(f"fma.rn.{kind}x2 t, t, one, {before};")
            lines.append(f"fma.rn.{kind}x2 ${4 * half + byte}, t, {scale}, {after};")
    lift = _FLOAT_LIFTS.get((fmt.values, kind), 0)
    constants = f"mov.b32 lift, {lift:#x}; mov.b32 one, {_ONE[kind]:#x}; mov.b32 minus, {_MINUS_ONE[kind]:#x}; mov.b32 none, 0x80008000;"
    return "{ .reg .b32 a, b, c, d, t, h, one, minus, none, lift; " + " ".join([constants, *lines]) + " }"


def _side_by_side(low: str, high: str, first: str, second: str) -> str:
    """The lower halves of two words in one register, the upper ones in another."""
    return f"prmt.b32 {low}, {first}, {second}, 0x5410; prmt.b32 {high}, {first}, {second}, 0x7632;"


def _moved(target: str, source: str, left: int) -> str:
    return f"shl.b32 {target}, {source}, {left};" if left >= 0 else f"shr.b32 {target}, {source}, {-left};"


def _nibble(word: str, at: int, kind: str) -> list[str]:
    """t: the four bits from `at` on in both halves of the word, plus the power of two."""
    return [_moved("t", word, -at), f"lop3.b32 t, t, 0x000F000F, {_TOP[kind]:#x}, 0xEA;"]


def _byte(word: str, at: int, kind: str) -> list[str]:
    """t: signed bytes. Seven bits under the power of two, less that power, which is 128 more where the sign is set."""
    return [
        _moved("h", word, -at),
        f"lop3.b32 t, h, 0x007F007F, {_TOP[kind]:#x}, 0xEA;",
        f"lop3.b32 h, h, 0x00800080, {_TOP[kind]:#x}, 0xEA;",
        f"fma.rn.{kind}x2 t, h, minus, t;",
    ]


def _float_bits(word: str, at: int, values: str, kind: str) -> list[str]:
    """t: sign and bits of the floats from `at` on, the bits where exponents end."""
    down, mask = _FLOAT_BITS[values, kind]
    up = (8 if values == "fp8" else 12) - at
    return [
        _moved("h", word, up),
        _moved("t", word, up - down),
        f"and.b32 t, t, {mask:#x};",
        "lop3.b32 t, h, 0x80008000, t, 0xEA;",
    ]


@triton.jit
def _word_of(page, START: tl.constexpr, row, index, keep, BYTES: tl.constexpr, GROUPS: tl.constexpr):
    """The int32 in which code `index` of `row` lies, of codes of BYTES bytes, GROUPS to a row."""
    EACH: tl.constexpr = 4 // BYTES
    return load_where((page + START).to(tl.pointer_type(tl.int32)) + (row * (GROUPS // EACH) + index // EACH), keep)


@triton.jit
def _number_of(word, index, KIND: tl.constexpr):
    """float32 of a code in a word of `_word_of`."""
    if KIND == "f32":
        number = word.to(tl.float32, bitcast=True)
    elif KIND == "f16":
        number = (word >> (index % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "bf16":
        number = (word >> (index % 2 * 16)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    elif KIND == "i8":
        number = ((word << (24 - index % 4 * 8)) >> 24).to(tl.float32)
    else:
        code = (word >> (index % 4 * 8)) & 0xFF
        if KIND == "e8m0":
            number = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
        elif KIND == "e4m3":
            number = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            number = code.to(tl.float32)
    return number


@triton.jit
def _supers(page, START: tl.constexpr, row, column, keep, FMT: tl.constexpr):
    SUPERS: tl.constexpr = FMT[17]
    return load_where((page + START).to(tl.pointer_type(tl.float16)) + (row * SUPERS + column // 256), keep).to(tl.float32)


@triton.jit
def triples(page, row, byte, keep, FMT: tl.constexpr, dtype: tl.constexpr):
    """`triple`s of the first and the second half of 16 bytes of codes from `byte` on, or twice the same where a code is a byte.

    Scales are read as parts of words, which the compiler can fetch ahead like the codes. row, byte, keep: broadcast; see `scale_of`.
    """
    KIND: tl.constexpr = FMT[0]
    GROUP: tl.constexpr = FMT[1]
    GROUP_ROWS: tl.constexpr = FMT[2]
    SCALE: tl.constexpr = FMT[3]
    OFFSET: tl.constexpr = FMT[4]
    BIAS: tl.constexpr = FMT[5]
    GROUPS: tl.constexpr = FMT[16]
    HALVES: tl.constexpr = FMT[18]
    BYTES: tl.constexpr = 4 if SCALE == "f32" else 2 if SCALE == "f16" or SCALE == "bf16" else 1
    OFFSET_BYTES: tl.constexpr = 4 if OFFSET == "none" else 2 if OFFSET == "min" else 1
    column_0 = first_column(byte, 0, FMT, 1)
    column_1 = first_column(byte, HALVES - 1, FMT, 1)
    if (GROUP == 0) | (GROUPS * BYTES % 4 != 0) | (GROUPS * OFFSET_BYTES % 4 != 0):
        keep_0, keep_1 = keep, keep
        if keep is not None:
            keep_0, keep_1 = keep & (column_0 < FMT[7]), keep & (column_1 < FMT[7])
        scale_0, less_0, off_0 = scale_of(page, row, column_0, keep_0, FMT)
        scale_1, less_1, off_1 = scale_0, less_0, off_0
        if HALVES == 2:
            scale_1, less_1, off_1 = scale_of(page, row, column_1, keep_1, FMT)
    else:
        # Groups of both halves lie in one word: 64 columns have at most as many groups as a word has codes.
        index_0, index_1 = column_0 // GROUP, column_1 // GROUP
        word = _word_of(page, FMT[11], row // GROUP_ROWS, index_0, keep, BYTES, GROUPS)
        PART: tl.constexpr = "i8" if SCALE == "i8*f16" else "u8" if SCALE == "u8*f16" else SCALE
        scale_0, scale_1 = _number_of(word, index_0, PART), _number_of(word, index_1, PART)
        if (SCALE == "i8*f16") | (SCALE == "u8*f16"):
            factor = _supers(page, FMT[12], row, column_0, keep, FMT)
            scale_0, scale_1 = scale_0 * factor, scale_1 * factor
        off_0, off_1 = tl.zeros_like(scale_0), tl.zeros_like(scale_0)
        less_0, less_1 = off_0 + BIAS, off_0 + BIAS
        if OFFSET != "none":
            KIND_OFF: tl.constexpr = "f16" if OFFSET == "min" else "i8" if (OFFSET == "zero") & (KIND == "int8") else "u8"
            word = _word_of(page, FMT[13], row, index_0, keep, OFFSET_BYTES, GROUPS)
            offset_0, offset_1 = _number_of(word, index_0, KIND_OFF), _number_of(word, index_1, KIND_OFF)
            if OFFSET == "zero":
                less_0, less_1 = less_0 + offset_0, less_1 + offset_1
            elif OFFSET == "min":
                off_0, off_1 = offset_0, offset_1
            else:
                factor = _supers(page, FMT[14], row, column_0, keep, FMT)
                off_0, off_1 = -offset_0 * factor, -offset_1 * factor
    return triple(scale_0, less_0, off_0, FMT, dtype), triple(scale_1, less_1, off_1, FMT, dtype)


@triton.jit
def triple(scale, less, off, FMT: tl.constexpr, dtype: tl.constexpr):
    """What `from_words` adds, multiplies with and adds, from what `scale_of` gave; of the same shape, of dtype.

    Codes' numbers are exact until they are scaled; scale and what is added afterwards are rounded to dtype.
    """
    KIND: tl.constexpr = FMT[0]
    OFFSET: tl.constexpr = FMT[4]
    BF16: tl.constexpr = dtype == tl.bfloat16
    if INTERPRETED:
        return less, scale, off
    if (OFFSET == "min") | (OFFSET == "u8*f16"):
        # From the middle of the codes on, so that what is added, and its rounding, are small.
        MIDDLE: tl.constexpr = 0 if KIND == "int8" else 32 if KIND == "int6" else 16 if KIND == "int5" else 8
        less += MIDDLE
        off += scale * MIDDLE
    if (KIND == "int4") | (KIND == "int5") | (KIND == "int6"):
        less += 128.0 if BF16 else 1024.0
    elif BF16 & (KIND == "fp8"):
        scale *= FP8_REST
    elif BF16 & (KIND == "fp4"):
        scale *= FP4_REST
    return (-less).to(dtype), scale.to(dtype), off.to(dtype)


@triton.jit
def from_words(words, high, a, b, FMT: tl.constexpr, CODE: tl.constexpr, dtype: tl.constexpr):
    """Numbers of dtype (two bytes) from words: a block for each byte, and where codes have four bits as many again for second halves.

    high: words of high bits, or anything; a, b: `triple`s of the first and the second half. All of one shape.
    """
    KIND: tl.constexpr = FMT[0]
    HALVES: tl.constexpr = FMT[18]
    if INTERPRETED:
        v = _four(words, high, a, 0, FMT, dtype)
        if HALVES == 2:
            v = v + _four(words, high, b, 1, FMT, dtype)
    elif HALVES == 1:
        REGISTERS: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r"
        args = [words, a[0], a[1], a[2]]
        if dtype == tl.bfloat16:  # written out: a dtype that is an argument is not taken here
            v = tl.inline_asm_elementwise(CODE, REGISTERS, args, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)
        else:
            v = tl.inline_asm_elementwise(CODE, REGISTERS, args, dtype=(tl.float16,) * 4, is_pure=True, pack=2)
    else:
        PLANES: tl.constexpr = (KIND == "int5") | (KIND == "int6")
        REGISTERS: tl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r" + (",r,r" if PLANES else "")
        args = [words, a[0], a[1], a[2], b[0], b[1], b[2]]
        if PLANES:
            args = [words, a[0], a[1], a[2], b[0], b[1], b[2], high]
        if dtype == tl.bfloat16:
            v = tl.inline_asm_elementwise(CODE, REGISTERS, args, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
        else:
            v = tl.inline_asm_elementwise(CODE, REGISTERS, args, dtype=(tl.float16,) * 8, is_pure=True, pack=2)
    return v


@triton.jit
def _four(words, high, triple, HALF: tl.constexpr, FMT: tl.constexpr, dtype: tl.constexpr):
    """Numbers of one half, for Triton's interpreter, which knows no machine code."""
    a, b = terms(triple[1], triple[0], triple[2], FMT)
    high = high >> (4 * HALF)
    v_0 = (lifted(numbers(words, high, 0, HALF, FMT), 0, HALF, FMT) * a + b).to(dtype)
    v_1 = (lifted(numbers(words, high, 1, HALF, FMT), 1, HALF, FMT) * a + b).to(dtype)
    v_2 = (lifted(numbers(words, high, 2, HALF, FMT), 2, HALF, FMT) * a + b).to(dtype)
    v_3 = (lifted(numbers(words, high, 3, HALF, FMT), 3, HALF, FMT) * a + b).to(dtype)
    return v_0, v_1, v_2, v_3
