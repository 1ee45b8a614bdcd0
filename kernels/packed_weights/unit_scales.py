# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows no other way to make a longer tuple
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""Triton helpers that load what belongs to the groups of a unit's codes (see `dots`), and later make numbers of it.

Between the two lies the time that the memory takes. Where both halves' scales lie side by side, one word brings both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.packed_weights.kernel import INTERPRETED, first_column, load_typed, load_where

RAISED = tl.constexpr(tuple(f"prmt.b32 $0, $1, $2, {0x7440 + byte};" for byte in range(4)))


@triton.jit
def _load_one(page, row, unit, valid, HALF: tl.constexpr, EXACT: tl.constexpr, FMT: tl.constexpr):
    """A half's scale and offset as they are stored, and super ones of both where there are two levels."""
    GROUP: tl.constexpr = FMT[1]
    SCALE: tl.constexpr = FMT[3]
    OFFSET: tl.constexpr = FMT[4]
    column = first_column(unit * 16, HALF, FMT, 1)
    keep = valid
    if (not EXACT) | ((FMT[18] == 2) & (FMT[7] % 64 != 0)):
        keep = column < FMT[7]
        if valid is not None:
            keep = keep & valid
    index = row // FMT[2] * FMT[16]
    if GROUP > 0:
        index = index + column // GROUP
    else:
        index = index + column * 0
    if SCALE == "f32":
        scale = load_typed(page, FMT[11], index, tl.float32, keep)
    elif SCALE == "f16":
        scale = load_typed(page, FMT[11], index, tl.float16, keep)
    elif SCALE == "bf16":
        scale = load_typed(page, FMT[11], index, tl.bfloat16, keep)
    else:
        scale = load_where(page + FMT[11] + index, keep)
    raw = (scale,)
    if (SCALE == "u8*f16") | (SCALE == "i8*f16"):
        raw = raw + (load_typed(page, FMT[12], row * FMT[17] + column // 256, tl.float16, keep),)
    if OFFSET == "zero":
        raw = raw + (load_where(page + FMT[13] + index, keep),)
    elif OFFSET == "min":
        raw = raw + (load_typed(page, FMT[13], index, tl.float16, keep),)
    elif OFFSET == "u8*f16":
        raw = raw + (load_where(page + FMT[13] + index, keep),)
        raw = raw + (load_typed(page, FMT[14], row * FMT[17] + column // 256, tl.float16, keep),)
    return raw


@triton.jit
def load_scales(page, row, unit, valid, EXACT: tl.constexpr, FMT: tl.constexpr):
    """What belongs to the groups of a unit's codes, as it is stored. page, row, unit and valid (None: all) are broadcast."""
    SCALE: tl.constexpr = FMT[3]
    HOW: tl.constexpr = FMT[21]
    if (HOW == 2) | (HOW == 4):
        keep = valid
        if not EXACT:
            keep = unit < FMT[8] // 16
            if valid is not None:
                keep = keep & valid
        at = row * (FMT[16] // HOW) + unit // 2
        if (HOW == 4) | (SCALE == "f16") | (SCALE == "bf16"):
            raw = (load_typed(page, FMT[11], at, tl.int32, keep),)
        else:
            raw = (load_typed(page, FMT[11], at, tl.int16, keep),)
        if (SCALE == "u8*f16") | (SCALE == "i8*f16"):
            raw = raw + (_load_super(page, row, unit, keep, FMT[12], FMT),)
        if FMT[4] == "u8*f16":
            raw = raw + (load_typed(page, FMT[13], at, tl.int16, keep), _load_super(page, row, unit, keep, FMT[14], FMT))
    elif HOW == 1:
        raw = _load_one(page, row, unit, valid, 0, EXACT, FMT)
    else:
        raw = _load_one(page, row, unit, valid, 0, EXACT, FMT) + _load_one(page, row, unit, valid, 1, EXACT, FMT)
    return raw


@triton.jit
def _load_super(page, row, unit, keep, START: tl.constexpr, FMT: tl.constexpr):
    return load_typed(page, START, row * FMT[17] + first_column(unit * 16, 0, FMT, 1) // 256, tl.float16, keep)


@triton.jit
def _small(code, nothing, BYTE: tl.constexpr, SCALE: tl.constexpr):
    """A scale that is a byte with an exponent or a sign, without its second level, as float32: byte BYTE of code, int32."""
    if SCALE == "e8m0":
        # 0 is half of what 1 is: a number below those that are written with an exponent.
        scale = tl.maximum(_shifted(code, 23 - 8 * BYTE) & 0x7F800000, 0x400000).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        bits = (_shifted(code, 7 - 8 * BYTE) & 0x3F80) | (_shifted(code, 8 - 8 * BYTE) & 0x8000)
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        scale = _raised(code ^ (128 << (8 * BYTE)), nothing, BYTE) - 8388736.0
    return scale


@triton.jit
def _small_times(code, top, nothing, BYTE: tl.constexpr, SCALE: tl.constexpr):
    """A scale that is a byte, with its second level where it has one."""
    if SCALE == "u8*f16":
        scale = _byte_times(code, top, nothing, BYTE)
    elif SCALE == "i8*f16":
        scale = _small(code, nothing, BYTE, SCALE) * top.to(tl.float32)
    else:
        scale = _small(code, nothing, BYTE, SCALE)
    return scale


@triton.jit
def _shifted(code, LEFT: tl.constexpr):
    if LEFT >= 0:
        moved = code << LEFT
    else:
        moved = code >> -LEFT
    return moved


@triton.jit
def _raised(code, nothing, BYTE: tl.constexpr):
    """2^23 and a byte of an int32, as float32: under those bits it needs no conversion, of which the machine makes few at a time."""
    if INTERPRETED:
        bits = (_shifted(code, -8 * BYTE) & 0xFF) | 0x4B000000
    else:
        bits = tl.inline_asm_elementwise(RAISED[BYTE], "=r,r,r", [code, nothing + 0x4B000000], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _byte_times(code, top, nothing, BYTE: tl.constexpr):
    """A byte of an int32, without a sign, times a float16, float32."""
    top = top.to(tl.float32)
    if INTERPRETED:  # which rounds between the two
        product = (_raised(code, nothing, BYTE) - 8388608.0) * top
    else:
        product = tl.fma(_raised(code, nothing, BYTE), top, top * -8388608.0)
    return product


@triton.jit
def _number_one(raw, nothing, AT: tl.constexpr, FMT: tl.constexpr):
    """Scale, zero point and addend of what `_load_one` gave, from place AT on; float32."""
    KIND: tl.constexpr = FMT[0]
    SCALE: tl.constexpr = FMT[3]
    OFFSET: tl.constexpr = FMT[4]
    TWO: tl.constexpr = (SCALE == "u8*f16") | (SCALE == "i8*f16")
    NEXT: tl.constexpr = AT + (2 if TWO else 1)
    if (SCALE == "f32") | (SCALE == "f16") | (SCALE == "bf16"):
        scale = raw[AT].to(tl.float32)
    else:
        scale = _small_times(raw[AT].to(tl.int32), raw[NEXT - 1], nothing, 0, SCALE)
    zero, off = 0.0, 0.0
    if OFFSET == "zero":
        if KIND == "int8":
            zero = raw[NEXT].to(tl.int8, bitcast=True).to(tl.float32)
        else:
            zero = raw[NEXT].to(tl.float32)
    elif OFFSET == "min":
        off = raw[NEXT].to(tl.float32)
    elif OFFSET == "u8*f16":
        off = -_byte_times(raw[NEXT].to(tl.int32), raw[NEXT + 1], nothing, 0)
    return scale, zero, off


@triton.jit
def scale_numbers(raw, unit, nothing, HALF: tl.constexpr, FMT: tl.constexpr):
    """Of a half's group, from what `load_scales` gave: scale, zero point, and what is added afterwards; float32, or 0.0 if always zero.

    nothing: an int32 zero, best one that the compiler cannot know (see `dots.whole`).
    """
    SCALE: tl.constexpr = FMT[3]
    OFFSET: tl.constexpr = FMT[4]
    HOW: tl.constexpr = FMT[21]
    if (HOW == 2) | (HOW == 4):
        TWO: tl.constexpr = (SCALE == "u8*f16") | (SCALE == "i8*f16")
        if HOW == 4:
            scale = _small_times(raw[0] >> (unit % 2 * 8), raw[1 if TWO else 0], nothing, 2 * HALF, SCALE)
        elif (SCALE == "f16") | (SCALE == "bf16"):
            dtype: tl.constexpr = tl.float16 if SCALE == "f16" else tl.bfloat16
            scale = (raw[0] >> (16 * HALF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        else:
            scale = _small_times(raw[0].to(tl.int32), raw[1 if TWO else 0], nothing, HALF, SCALE)
        off = 0.0
        if OFFSET == "u8*f16":
            off = -_byte_times(raw[2].to(tl.int32), raw[3], nothing, HALF)
        result = (scale, 0.0, off)
    elif (HOW == 1) | (HALF == 0):
        result = _number_one(raw, nothing, 0, FMT)
    else:
        TWICE: tl.constexpr = (SCALE == "u8*f16") | (SCALE == "i8*f16")
        OF_OFFSET: tl.constexpr = 0 if OFFSET == "none" else 2 if OFFSET == "u8*f16" else 1
        result = _number_one(raw, nothing, (2 if TWICE else 1) + OF_OFFSET, FMT)
    return result
