"""How the bytes of one quantised matrix lie in a page: `PackedFormat`, and the places of its parts. No torch.

A weight of row n and column k is, in float32,

    w = factor · ( scale · (q - bias - zero) + minimum )

where q is the stored code, and scale, zero and minimum belong to the group of `group` columns (and `group_rows` rows) that holds it. Where
scales (or minima) have two levels, as in GGUF's K types, a group's scale is its code times a float16 that 256 columns share; their minima
are subtracted. Formats of checkpoints differ in how they arrange codes; in a page there is one arrangement, so that one kernel reads all.

Parts follow each other in this order, each at a multiple of 128 bytes; all are row-major:

    values         [N, row bytes]  8 bits: a byte a code.  4 bits: K padded to a multiple of 64; block b of 64 columns is 32 bytes, of which
                   byte j has column 64·b + j in its low four bits and column 64·b + 32 + j in its high ones.  5, 6 bits: their low four so
    high bits      [N, row bytes]  of 5- and 6-bit codes. Column 64·b + 32·half + j lies, where a code has 5 bits, in byte 8·b + j % 8, bit
                   4·half + j // 8; where it has 6, in byte 16·b + j % 16, the two bits from 2·(2·half + j // 16) on
    scales         [ceil(N / group_rows), groups]
    super scales   [N, ceil(K / 256)] float16
    offsets        [N, groups]
    super offsets  [N, ceil(K / 256)] float16
    factor         one float32
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Values = Literal["int8", "int4", "int5", "int6", "fp8", "fp4"]
Scale = Literal["f32", "f16", "bf16", "e8m0", "e4m3", "u8*f16", "i8*f16"]
Offset = Literal["none", "zero", "min", "u8*f16"]

PART_ALIGNMENT = 128
BLOCK = 64
"""Columns whose 4-bit codes lie together."""
SUPER_GROUP = 256
"""Columns that share the second level of a scale of two levels."""
TILE_STEP = 32
"""Row tiles that cannot be equal have a multiple of so many rows, but for the last."""

LOW_BITS: dict[Values, int] = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4, "int5": 4, "int6": 4}
HIGH_BITS: dict[Values, int] = {"int5": 1, "int6": 2}
SCALE_BYTES: dict[Scale, int] = {"f32": 4, "f16": 2, "bf16": 2, "e8m0": 1, "e4m3": 1, "u8*f16": 1, "i8*f16": 1}
OFFSET_BYTES: dict[Offset, int] = {"none": 0, "zero": 1, "min": 2, "u8*f16": 1}


@dataclass(frozen=True)
class PackedFormat:
    """What a packed matrix is made of.

    Attributes:
        values: kind of code. int8 is signed, int4 to int6 unsigned; fp8 is e4m3 (finite), fp4 e2m1.
        group: columns that share a scale; 0: the whole row.
        scale: how a group's scale is stored.
        offset: none; zero: an integer (of the codes' signedness) subtracted from the code; min: a float16 added; u8*f16: two levels,
            subtracted.
        bias: subtracted from every code.
        group_rows: rows that share a scale.
        factor: whether one float32 multiplies the whole matrix.

    Raises:
        ValueError: parts that do not go together.
    """

    values: Values
    group: int
    scale: Scale
    offset: Offset = "none"
    bias: int = 0
    group_rows: int = 1
    factor: bool = False

    def __post_init__(self) -> None:
        if self.group < 0 or self.group_rows < 1:
            raise ValueError(f"PackedFormat: groups of {self.group} columns and {self.group_rows} rows")
        if self.two_levels and (not self.group or SUPER_GROUP % self.group):
            raise ValueError(f"PackedFormat: groups of {self.group} columns do not divide the {SUPER_GROUP} of the second level")
        if self.group_rows > 1 and (self.offset != "none" or self.two_levels):
            raise ValueError("PackedFormat: groups of several rows have one plain scale and nothing else")
        if self.values in ("fp8", "fp4") and (self.offset != "none" or self.bias):
            raise ValueError("PackedFormat: floating-point codes have neither offset nor bias")

    @property
    def two_levels(self) -> bool:
        """Whether scales, offsets or both have a second level."""
        return self.scale.endswith("*f16") or self.offset.endswith("*f16")

    def groups(self, columns: int) -> int:
        """Groups along a row of so many columns."""
        return -(-columns // self.group) if self.group else 1


class Part(NamedTuple):
    """Where one part of a page lies: `start` in bytes from the page's beginning, `rows` rows of `row_bytes` bytes each. rows 0: absent."""

    start: int
    rows: int
    row_bytes: int


class PageParts(NamedTuple):
    """All parts of a page that holds one matrix; `num_bytes` is what the page needs."""

    values: Part
    high: Part
    scales: Part
    super_scales: Part
    offsets: Part
    super_offsets: Part
    factor: Part
    num_bytes: int


@cache
def page_parts(fmt: PackedFormat, rows: int, columns: int) -> PageParts:
    """Where the parts of a packed matrix [rows, columns] lie.

    Raises:
        ValueError: sizes below 1.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"page_parts: a matrix of {rows} x {columns}")
    low, high = LOW_BITS[fmt.values], HIGH_BITS.get(fmt.values, 0)
    blocks = -(-columns // BLOCK)
    groups, supers = fmt.groups(columns), -(-columns // SUPER_GROUP)
    two_level_scale, two_level_offset = fmt.scale.endswith("*f16"), fmt.offset.endswith("*f16")
    sizes = [
        (rows, columns if low == 8 else blocks * BLOCK // 2),
        (rows if high else 0, blocks * BLOCK * high // 8),
        (-(-rows // fmt.group_rows), groups * SCALE_BYTES[fmt.scale]),
        (rows if two_level_scale else 0, supers * 2),
        (rows if fmt.offset != "none" else 0, groups * OFFSET_BYTES[fmt.offset]),
        (rows if two_level_offset else 0, supers * 2),
        (1 if fmt.factor else 0, 4),
    ]
    parts, end = [], 0
    for count, row_bytes in sizes:
        start = -(-end // PART_ALIGNMENT) * PART_ALIGNMENT
        parts.append(Part(start, count, row_bytes))
        if count:
            end = start + count * row_bytes
    values, high_bits, scales, super_scales, offsets, super_offsets, factor = parts
    return PageParts(values, high_bits, scales, super_scales, offsets, super_offsets, factor, end)


def first_rows(parts: PageParts, fmt: PackedFormat, rows: int) -> PageParts:
    """The same parts as far as they belong to the first `rows` rows."""
    lines = -(-rows // fmt.group_rows)
    values, high, scales, super_scales, offsets, super_offsets = (
        part._replace(rows=min(part.rows, lines if place == 2 else rows)) for place, part in enumerate(parts[:6])
    )
    return PageParts(values, high, scales, super_scales, offsets, super_offsets, parts.factor, parts.num_bytes)


def page_bytes(fmt: PackedFormat, rows: int, columns: int) -> int:
    """Bytes of a page that holds a packed matrix [rows, columns]."""
    return page_parts(fmt, rows, columns).num_bytes


def by_projection(pages: Sequence[T], tiles: tuple[int, int] | None = None) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """An expert's pages as those of gate, up and down.

    Args:
        tiles: row tiles of gate and of up, and of down; None: as many of each.

    Raises:
        ValueError: these are not so many pages.
    """
    wide, down = (len(pages) // 3,) * 2 if tiles is None else tiles
    if min(wide, down) < 1 or len(pages) != 2 * wide + down:
        raise ValueError(f"{len(pages)} pages are not the row tiles of gate, up and down")
    return pages[:wide], pages[wide : 2 * wide], pages[2 * wide :]


def tile_rows(rows: int, tiles: int, group_rows: int = 1) -> int:
    """Rows of each of `tiles` row tiles of a matrix; the last one may have fewer, and its page leaves the places of the others empty.

    Equal ones where that keeps rows together that share a scale (`group_rows`); else a multiple of those, and of TILE_STEP.

    Raises:
        ValueError: so many tiles would leave nothing for the last one.
    """
    if rows < 1 or tiles < 1:
        raise ValueError(f"tile_rows: {rows} rows in {tiles} tiles")
    height = -(-rows // tiles)
    if tiles > 1 and (rows % tiles or height % group_rows):
        step = math.lcm(TILE_STEP, group_rows)
        height = -(-height // step) * step
        if (tiles - 1) * height >= rows:
            raise ValueError(f"tile_rows: {rows} rows do not fill {tiles} tiles of {height}")
    return height
