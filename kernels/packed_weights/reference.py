"""Packing and unpacking of quantised matrices in plain torch, and what they mean in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rimuru_kernels.packed_weights.format import BLOCK, HIGH_BITS, LOW_BITS, SUPER_GROUP, PackedFormat, Part, first_rows, page_parts

# e2m1: sign, two bits of exponent, one of mantissa.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_SCALE_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
    "u8*f16": torch.uint8,
    "i8*f16": torch.int8,
}
_OFFSET_DTYPES = {"min": torch.float16, "u8*f16": torch.uint8}


@dataclass
class Codes:
    """The parts of one quantised matrix [N, K], each a plain tensor.

    Attributes:
        values: [N, K], int8 for "int8", else uint8: one code each (fp8 and fp4: the bits of the number).
        scales: [ceil(N / group_rows), groups], in the format's dtype (e8m0, e4m3: the bits, uint8; two levels: the codes, uint8 or int8).
        super_scales: float16 [N, ceil(K / 256)] where scales have two levels.
        offsets: [N, groups] where there are any: int8 or uint8 zeros, float16 minima, or uint8 codes of two levels.
        super_offsets: float16 [N, ceil(K / 256)] where offsets have two levels.
        factor: float32 [] where the format has one.
    """

    values: Tensor
    scales: Tensor
    super_scales: Tensor | None = None
    offsets: Tensor | None = None
    super_offsets: Tensor | None = None
    factor: Tensor | None = None


def pack(codes: Codes, fmt: PackedFormat, out: Tensor | None = None, height: int | None = None) -> Tensor:
    """Write a matrix as the bytes of a page.

    Args:
        codes: its parts.
        fmt: what they are.
        out: contiguous uint8 [>= page_bytes] to write to, on the CPU; else a new tensor. Gaps between parts keep what they held.
        height: the page is one of so many rows, of which these are the first (see `format.tile_rows`); None: these are all.

    Returns:
        uint8 [page_bytes].

    Raises:
        ValueError: parts of other dtypes or shapes than the format has.
    """
    rows, columns = codes.values.shape
    whole = page_parts(fmt, rows if height is None else height, columns)
    page = torch.zeros(whole.num_bytes, dtype=torch.uint8) if out is None else out[: whole.num_bytes]
    parts = first_rows(whole, fmt, rows)
    groups, supers = fmt.groups(columns), -(-columns // SUPER_GROUP)
    signed = torch.int8 if fmt.values == "int8" else torch.uint8
    _put(page, parts.scales, codes.scales, _SCALE_DTYPES[fmt.scale], (parts.scales.rows, groups), "scales")
    _put(page, parts.super_scales, codes.super_scales, torch.float16, (rows, supers), "super scales")
    _put(page, parts.offsets, codes.offsets, _OFFSET_DTYPES.get(fmt.offset, signed), (rows, groups), "offsets")
    _put(page, parts.super_offsets, codes.super_offsets, torch.float16, (rows, supers), "super offsets")
    _put(page, parts.factor, codes.factor, torch.float32, (), "factor")
    if LOW_BITS[fmt.values] == 8:
        _put(page, parts.values, codes.values, signed, (rows, columns), "values")
        return page
    if codes.values.dtype is not torch.uint8:
        raise ValueError(f"pack: codes of {fmt.values} are uint8, not {codes.values.dtype}")
    values = codes.values
    if columns % BLOCK:
        values = torch.nn.functional.pad(values, (0, -columns % BLOCK))
    halves = values.reshape(rows, -1, 2, BLOCK // 2)
    low = halves & 15
    torch.bitwise_or(low[:, :, 0], low[:, :, 1] << 4, out=_part(page, parts.values).view(rows, -1, BLOCK // 2))
    bits = HIGH_BITS.get(fmt.values, 0)
    if bits:
        # [rows, blocks, pieces, bytes]: piece p of a block is `bits` bits of every byte, from bit p * bits on.
        pieces = (halves >> 4).reshape(rows, -1, 8 // bits, BLOCK * bits // 8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
        _part(page, parts.high).copy_((pieces << shifts).sum(2, dtype=torch.uint8).view(rows, -1))
    return page


def unpack(page: Tensor, fmt: PackedFormat, rows: int, columns: int) -> Codes:
    """The parts of a matrix [rows, columns] in a page: uint8 [>= page_bytes], contiguous. 8-bit values and scales are views."""
    parts = page_parts(fmt, rows, columns)
    signed = torch.int8 if fmt.values == "int8" else torch.uint8
    raw = _part(page, parts.values)
    if LOW_BITS[fmt.values] == 8:
        values = raw.view(signed)
    else:
        bytes_ = raw.view(rows, -1, 1, BLOCK // 2)
        values = torch.cat((bytes_ & 15, bytes_ >> 4), 2)
        bits = HIGH_BITS.get(fmt.values, 0)
        if bits:
            high = _part(page, parts.high).view(rows, -1, 1, BLOCK * bits // 8)
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=page.device).view(1, 1, -1, 1)
            values = values | (((high >> shifts) & ((1 << bits) - 1)) << 4).reshape(values.shape)
        values = values.reshape(rows, -1)[:, :columns]
    return Codes(
        values,
        _part(page, parts.scales).view(_SCALE_DTYPES[fmt.scale]),
        _part(page, parts.super_scales).view(torch.float16) if parts.super_scales.rows else None,
        _part(page, parts.offsets).view(_OFFSET_DTYPES.get(fmt.offset, signed)) if parts.offsets.rows else None,
        _part(page, parts.super_offsets).view(torch.float16) if parts.super_offsets.rows else None,
        _part(page, parts.factor).view(torch.float32).view(()) if fmt.factor else None,
    )


def dequantize(codes: Codes, fmt: PackedFormat) -> Tensor:
    """float32 [N, K]: what a quantised matrix means; see `format.py` for the formula."""
    rows, columns = codes.values.shape
    if fmt.values == "fp8":
        q = codes.values.view(torch.float8_e4m3fn).float()
    elif fmt.values == "fp4":
        q = torch.tensor(FP4_VALUES, device=codes.values.device)[codes.values.int()]
    else:
        q = codes.values.float()
        if fmt.bias:
            q -= fmt.bias
    if fmt.offset == "zero":
        assert codes.offsets is not None
        q -= _over_columns(codes.offsets.float(), fmt.group, columns)
    scale = _scales(codes, fmt)
    if fmt.group_rows > 1:
        scale = scale.repeat_interleave(fmt.group_rows, 0)[:rows]
    out = q.mul_(_over_columns(scale, fmt.group, columns))
    if fmt.offset == "min":
        assert codes.offsets is not None
        out += _over_columns(codes.offsets.float(), fmt.group, columns)
    elif fmt.offset == "u8*f16":
        assert codes.offsets is not None and codes.super_offsets is not None
        out -= _over_columns(_two_levels(codes.offsets, codes.super_offsets, fmt.group), fmt.group, columns)
    return out if codes.factor is None else out.mul_(codes.factor)


def _scales(codes: Codes, fmt: PackedFormat) -> Tensor:
    if fmt.scale == "e8m0":
        return torch.exp2(codes.scales.float() - 127)
    if fmt.scale == "e4m3":
        return codes.scales.view(torch.float8_e4m3fn).float()
    if codes.super_scales is not None:
        return _two_levels(codes.scales, codes.super_scales, fmt.group)
    return codes.scales.float()


def _two_levels(codes: Tensor, supers: Tensor, group: int) -> Tensor:
    return supers.float().repeat_interleave(SUPER_GROUP // group, 1)[:, : codes.shape[1]] * codes.float()


def _over_columns(groups: Tensor, group: int, columns: int) -> Tensor:
    """[rows, groups] -> [rows, columns], or something that is broadcast to it."""
    return groups.repeat_interleave(group, 1)[:, :columns] if group else groups


def _part(page: Tensor, part: Part) -> Tensor:
    return page[part.start : part.start + part.rows * part.row_bytes].view(part.rows, part.row_bytes)


def _put(page: Tensor, part: Part, values: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    if not part.rows:
        if values is not None:
            raise ValueError(f"pack: the format has no {name}")
        return
    if values is None or values.dtype is not dtype or values.shape != shape:
        found = "none" if values is None else f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"pack: {name} are {dtype} {list(shape)}, not {found}")
    _part(page, part).view(dtype).copy_(values if values.ndim else values.view(1, 1))
