"""Matrices of 4-bit codes as torch's own product reads them (see `planes.py`): writing them from packed ones, and multiplying with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from rimuru_cli.engine.experts.number_products import fast_bfloat16
from rimuru_cli.engine.experts.packed_products import PackedTile, Workspace
from rimuru_cli.engine.experts.planes import PlaneParts, plane_parts
from rimuru_kernels.packed_weights import PackedFormat, unpack
from rimuru_kernels.packed_weights.format import BLOCK, page_parts

_convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
_multiply = torch.ops.aten._weight_int4pack_mm_for_cpu

_HALF = BLOCK // 2
_LOW, _HIGH = 0x0F0F0F0F0F0F0F0F, 0xF0F0F0F0F0F0F0F0 - (1 << 64)
MANY_ROWS = 96
"""So many rows are multiplied with numbers made of the codes; torch's product makes them anew for every few rows."""
_SMALL = 1 << 17
"""Of smaller matrices the views are kept, since making them would take a good part of a product's time, and several are written at once."""


class PlaneTile:
    """How one kind of tile is written and multiplied.

    Args:
        fmt: of the codes; `in_planes` holds for it.
        rows, columns: of a tile.
        space: scratch.
    """

    def __init__(self, fmt: PackedFormat, rows: int, columns: int, space: Workspace) -> None:
        self.fmt, self.rows, self.columns = fmt, rows, columns
        self.parts: PlaneParts = plane_parts(fmt, rows, columns)
        self._packed = PackedTile(fmt, rows, columns, space)
        self._space = space
        self._small = rows * columns < _SMALL
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, packed: Sequence[Tensor], pages: Sequence[Tensor]) -> None:
        """Write packed matrices into pages, all uint8, of at least `page_bytes` and `parts.num_bytes`."""
        if len(pages) == 1 or not self._small:
            for source, page in zip(packed, pages, strict=True):
                codes, pairs = self._parts_of(page.unsqueeze(0))
                self._write_codes(source.unsqueeze(0), codes)
                self._write_pairs([source], pairs)
            return
        made = torch.empty(len(pages), self.parts.num_bytes, dtype=torch.uint8)
        codes, pairs = self._parts_of(made)
        self._write_codes(torch.stack([source[: self._packed.num_bytes] for source in packed]), codes)
        self._write_pairs(packed, pairs)
        for source, page in zip(made, pages, strict=True):
            page[: self.parts.num_bytes].copy_(source)

    def product(self, pages: Sequence[Tensor], x: Tensor) -> Tensor:
        """Products of n matrices, one row each: x float32 [1, columns], for all, or [n, columns] -> float32 [n, rows]."""
        ordered = self._filled(x)
        rows = [ordered] * len(pages) if len(ordered) == 1 else torch.split(ordered, 1)
        made: list[Tensor] = [
            _multiply(row, codes, self.parts.group, pairs) for row, (codes, pairs) in zip(rows, map(self._seen, pages), strict=True)
        ]
        return torch.cat(made)[:, : self.rows].float()

    def rows_product(self, page: Tensor, x: Tensor) -> Tensor:
        """Products of one matrix with many rows: x float32 [m, columns] -> float32 [m, rows]."""
        codes, pairs = self._seen(page)
        rows, block = self._filled(x), block_rows()
        if len(x) < MANY_ROWS or not block or self.parts.rows % block:
            few: Tensor = _multiply(rows, codes, self.parts.group, pairs)
            return few[:, : self.rows].float()
        out = torch.empty(len(x), self.parts.rows)
        rows = rows if fast_bfloat16() else rows.float()
        step = block * max(1, self._space.floats.numel() // (block * self.parts.columns))
        for first in range(0, self.parts.rows, step):
            numbers = self._numbers(codes[first : first + step], pairs[:, first : first + step], block)
            if rows.dtype is torch.bfloat16:
                numbers = self._space.words(-(-numbers.numel() // 4)).view(rows.dtype)[: numbers.numel()].view(numbers.shape).copy_(numbers)
            out[:, first : first + step] = rows @ numbers
        return out[:, : self.rows]

    def _numbers(self, codes: Tensor, pairs: Tensor, block: int) -> Tensor:
        """What the codes of some blocks of rows mean, float32 [columns, rows]; `codes` and `pairs` are their own of `_at`."""
        columns, count = self.parts.columns, len(codes) // block
        raw = codes.view(count, columns, block // 2)
        floats = self._space.numbers(codes.numel() * 2).view(columns, count, 2, block // 2)
        half = self._space.words(-(-columns * block // 16)).view(torch.uint8)[: columns * block // 2].view(columns, -1)
        for place, own in enumerate(raw):
            for index, take in enumerate((torch.bitwise_and, torch.bitwise_right_shift)):
                floats[:, place, index].copy_(take(own, 4 if index else 15, out=half))
        scales, zeros = pairs.float().permute(2, 0, 1).contiguous().unsqueeze(2)
        numbers = floats.view(columns, len(codes))
        numbers.view(len(pairs), -1, len(codes)).sub_(8.0).mul_(scales).add_(zeros)
        return numbers

    # ---- writing --------------------------------------------------------------------------------------------------------------------

    def _write_codes(self, packed: Tensor, out: Tensor) -> None:
        """Codes of n packed matrices [n, bytes] in the arrangement of the product, to out uint8 [n, rows, columns / 2]."""
        parts, block = self.parts, block_rows()
        if not block:
            for source, target in zip(packed, out, strict=True):
                codes = self._spread(unpack(source, self.fmt, self.rows, self.columns).values)
                target.copy_(_convert(pad(codes, (0, parts.columns - codes.shape[1], 0, parts.rows - self.rows)).int(), 1))
            return
        values = page_parts(self.fmt, self.rows, self.columns).values
        raw = packed[:, : self.rows * values.row_bytes].view(-1, self.rows, values.row_bytes)
        if parts.spread:
            raw = _spread_bytes(raw)[:, :, : parts.columns // 2]
        more = parts.columns // 2 - raw.shape[2], parts.rows - self.rows
        raw = pad(raw, (0, more[0], 0, more[1])) if any(more) else raw.contiguous()
        whole = parts.rows - parts.rows % block
        if whole:
            several = len(raw), whole // block
            self._arrange(raw[:, :whole].view(*several, 2, block // 2, -1).transpose(2, 3), out[:, :whole].view(*several, block, -1))
        if whole < parts.rows:
            pairs = (parts.rows - whole) // 2
            self._arrange(raw[:, whole:].view(len(raw), 1, pairs, 2, -1), out[:, whole:].unsqueeze(1))

    def _arrange(self, raw: Tensor, out: Tensor) -> None:
        """Bytes of two columns become bytes of two rows.

        Args:
            raw: [n, blocks of rows, pairs of rows, 2, columns / 2].
            out: [n, blocks of rows, 2 · pairs, columns / 2]; each [2 · pairs, columns / 2] is written as [columns, pairs].
        """
        count, blocks, pairs, _, row_bytes = raw.shape
        words = raw.view(torch.int64)
        target = out.flatten(2).view(count, blocks, -1, 2, _HALF, pairs)
        step = max(1, self._space.floats.numel() // (count * pairs * row_bytes * 2))  # at a time, so that they stay in the cache
        for first in range(0, blocks, step):
            some = words[:, first : first + step]
            upper, lower = some[:, :, :, 0], some[:, :, :, 1]
            mine, other = self._space.words(2 * upper.numel()).view(2, *upper.shape)
            moved = mine.view(torch.uint8).view(*some.shape[:3], -1, _HALF).permute(0, 1, 3, 4, 2)
            for place in range(2):  # columns in the low and in the high halves of bytes
                if place:
                    torch.bitwise_right_shift(upper, 4, out=mine).bitwise_and_(_LOW)
                    torch.bitwise_and(lower, _HIGH, out=other)
                else:
                    torch.bitwise_left_shift(lower, 4, out=mine).bitwise_and_(_HIGH)
                    torch.bitwise_and(upper, _LOW, out=other)
                mine.bitwise_or_(other)
                target[:, first : first + step, :, place].copy_(moved)

    def _write_pairs(self, packed: Sequence[Tensor], out: Tensor) -> None:
        """Scales and zeros of n packed matrices, to out bfloat16 [n, groups, rows, 2]."""
        scale, _, added = self._packed.terms(packed)
        # Codes are taken less 8: what a bias takes off already need not be given back.
        rounded, left = scale.bfloat16(), float(8 - self.fmt.bias)
        if added is None:
            zero = rounded.float().mul_(left)
        elif self.fmt.offset == "zero":  # whole multiples of the scale, also of the rounded one
            zero = (added / scale).nan_to_num_(0.0, 0.0, 0.0).round_().add_(left).mul_(rounded)
        else:
            zero = torch.add(added, rounded, alpha=left)
        # A pair is moved as one word of 32 bits.
        words = torch.stack((rounded, zero.bfloat16()), 2).view(torch.int32).view(len(packed), self.rows, -1)
        repeats = 1 if self.parts.spread else (self.fmt.group or self.parts.columns) // self.parts.group
        if repeats > 1:
            words = words.repeat_interleave(repeats, 2)
        target = out.view(torch.int32).squeeze(3)
        if target.shape[1:] != (words.shape[2], self.rows):
            target.zero_()
        target[:, : words.shape[2], : self.rows].copy_(words[:, :, : target.shape[1]].transpose(1, 2))

    # ---- what it is made of ---------------------------------------------------------------------------------------------------------

    def _filled(self, x: Tensor) -> Tensor:
        """x [m, columns] in bfloat16, filled up."""
        x = self._spread(x)
        if self.parts.columns > x.shape[1]:
            x = pad(x, (0, self.parts.columns - x.shape[1]))
        return x.bfloat16()

    def _spread(self, rows: Tensor) -> Tensor:
        """Rows [m, columns] with every group of 16 columns filled up to 32 by zeros, where groups are spread."""
        if not self.parts.spread:
            return rows
        if self.columns % 16:
            rows = pad(rows, (0, -self.columns % 16))
        return pad(rows.view(len(rows), -1, 16), (0, 16)).view(len(rows), -1)

    def _seen(self, page: Tensor) -> tuple[Tensor, Tensor]:
        if not self._small:
            return self._at(page)
        views = self._views.get(page.data_ptr())
        if views is None:
            views = self._views[page.data_ptr()] = self._at(page)
        return views

    def _at(self, page: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 [rows, columns / 2], and scales and zeros bfloat16 [groups, rows, 2]."""
        codes, pairs = self._parts_of(page.unsqueeze(0))
        return codes[0], pairs[0]

    def _parts_of(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """The same of n pages, [n, bytes]."""
        rows, columns, group, _, start, _ = self.parts
        pairs = pages[:, start : start + columns // group * rows * 4].view(torch.bfloat16)
        return pages[:, : rows * columns // 2].view(-1, rows, columns // 2), pairs.view(-1, columns // group, rows, 2)


def _spread_bytes(raw: Tensor) -> Tensor:
    """Bytes of blocks of 64 columns, [n, rows, 32 a block], with every 16 columns filled up to 32: [n, rows, 64 a block]."""
    words = raw.contiguous().view(torch.int64).view(*raw.shape[:2], -1, 2, 2)
    first, second = words[:, :, :, 0], words[:, :, :, 1]
    out = torch.zeros(*words.shape[:3], 2, 4, dtype=torch.int64)
    out[:, :, :, 0, :2] = (first & _LOW) | ((second << 4) & _HIGH)
    out[:, :, :, 1, :2] = ((first >> 4) & _LOW) | (second & _HIGH)
    return out.view(torch.uint8).flatten(2)


@cache
def block_rows() -> int:
    """Rows of the blocks in which torch arranges 4-bit codes here, if in the way that `PlaneTile` writes by itself; else 0.

    In a block of B rows, byte j of B / 2 of each column has row j in its low half and row j + B / 2 in its high one; in what is left of the
    rows, byte j has rows 2 j and 2 j + 1.
    """
    for size in (64, 32):
        probe = (torch.arange(2 * size + size // 4 * 3, dtype=torch.int32).view(-1, 1) * 7 + torch.arange(64, dtype=torch.int32) * 5) % 16
        probe[size:] = probe[size:].flip(0)
        left = -(-size // 32) * 16  # rows beyond whole blocks, of which there are two
        probe = probe[: 2 * size + left]
        whole = probe[: 2 * size].view(2, 2, size // 2, 64).permute(1, 0, 3, 2)
        rest = probe[2 * size :].view(left // 2, 2, 64).permute(1, 2, 0)
        expected = torch.cat([(part[0] | part[1] << 4).flatten() for part in (whole, rest)])
        if torch.equal(_convert(probe, 1).flatten(), expected.to(torch.uint8)):
            return size
    return 0
