"""Products with packed matrices on a CPU: codes become float32 block by block, small enough to stay in the processor's cache.

With q the stored code, and s, z, m scale, zero and minimum of the group of columns g that holds it (see `packed_weights.format`),

    y = factor · Σ_k (s (q_k - bias) + c) x_k = factor · ( Σ_k s (q_k - bias) x_k + Σ_g c_g Σ_{k in g} x_k )        c = m - s z

so what belongs to whole groups is added for whole groups. Every step runs over long runs of bytes (see `code_order`), and a block's columns
lie so that each scale multiplies 16 or more neighbours; x is put into that order once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rimuru_cli.engine.experts.code_order import CodeOrder, code_order
from rimuru_cli.engine.experts.code_scratch import BlockScratch, Workspace
from rimuru_kernels.packed_weights import PackedFormat, PageParts, dequantize, page_parts, unpack
from rimuru_kernels.packed_weights.format import HIGH_BITS, SUPER_GROUP, Part

__all__ = ["PackedTile", "Workspace"]

_SCALE_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# What the bits of a float code are, read as the bits of a float16, is this much too small.
_FLOAT_FACTORS = {"fp8": 2.0**8, "fp4": 2.0**14}
# A float16's sign, and below it the exponent's lower bits and the mantissa's upper ones that a code of 8 or 4 bits has.
_FP8_BITS, _FP4_BITS = 0xBF80 - (1 << 16), 0x8E00 - (1 << 16)
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


class Terms(NamedTuple):
    """What belongs to the groups of some rows, float32 [rows, groups].

    Attributes:
        scales: of codes, as they are decoded.
        by_run: the same for each run of a `CodeOrder`.
        added: this is added to scale · code; None: nothing.
    """

    scales: Tensor
    by_run: Tensor
    added: Tensor | None


class PackedTile:
    """How one kind of tile is multiplied: packed matrices [rows, columns] of one format.

    Args:
        fmt: of the codes.
        rows, columns: of a tile.
        space: scratch.

    Attributes:
        width: columns with what fills up the last block or group.
        num_bytes: of a packed tile.
    """

    def __init__(self, fmt: PackedFormat, rows: int, columns: int, space: Workspace) -> None:
        self.fmt, self.rows, self.columns = fmt, rows, columns
        self._space = space
        self._parts: PageParts = page_parts(fmt, rows, columns)
        self.num_bytes = self._parts.num_bytes
        self._order: CodeOrder | None = code_order(fmt, columns)
        # Groups that are no whole parts of blocks, nor whole blocks, which no released checkpoint has: slowly, by the reference.
        self.width = columns if self._order is None else self._order.width
        self._scratch = cache(self._make_scratch)
        self._most = max(1, space.floats.numel() // self.width)  # rows of a block

    def _make_scratch(self, count: int, rows: int) -> BlockScratch:
        assert self._order is not None
        return BlockScratch(self._space, self.fmt, self._order, count, rows)

    def product(self, pages: Sequence[Tensor], x: Tensor) -> Tensor:
        """Products of several tiles, one row each.

        Args:
            pages: n of them, uint8, each at least the bytes of a tile.
            x: float32 [1, columns], for all, or [n, columns].

        Returns:
            float32 [n, rows].
        """
        count, shared = len(pages), len(x) == 1
        out = torch.empty(count, self.rows)
        ordered, sums = self.ordered(x), self._sums(x)
        at_once = max(1, self._most // self.rows)
        for first in range(0, count, at_once):
            some = pages[first : first + at_once]
            own = slice(None) if shared else slice(first, first + len(some))
            self._vectors(self._stacked(some), ordered[own], None if sums is None else sums[own], out[first : first + len(some)])
        return out

    def rows_product(self, page: Tensor, x: Tensor) -> Tensor:
        """Products of one tile with many rows: x float32 [m, columns] -> float32 [m, rows]."""
        out = torch.empty(len(x), self.rows)
        ordered, sums = self.ordered(x), self._sums(x)
        stacked = self._stacked([page])
        terms = self._terms(stacked)
        for start, stop in self._blocks():
            torch.mm(ordered, self._numbers(stacked, start, stop, terms).t(), out=out[:, start:stop])
        if self.fmt.group == 0 and terms is not None:
            out.mul_(terms.scales.t())
        if sums is not None and terms is not None and terms.added is not None:
            out.addmm_(sums, terms.added.t())
        return out

    def numbers(self, page: Tensor, out: Tensor) -> None:
        """One tile's weights, rounded to out's dtype, [rows, width], in the order of codes; what fills up rows is any finite number."""
        stacked = self._stacked([page])
        terms = self._terms(stacked)
        for start, stop in self._blocks():
            numbers = self._numbers(stacked, start, stop, terms)
            if terms is not None and self._order is not None:
                runs = numbers.view(stop - start, -1, self._order.run or self.width)
                if self.fmt.group == 0:
                    runs.mul_(terms.scales[start:stop].unsqueeze(2))
                if terms.added is not None:
                    runs.add_(self._order.by_run(terms.added[start:stop]).unsqueeze(2))
            out[start:stop].copy_(numbers)

    def terms(self, pages: Sequence[Tensor]) -> Terms:
        """What belongs to the groups of some tiles, row by row."""
        terms = self._terms(self._stacked(pages), decoded=False)
        assert terms is not None, "of groups that blocks hold"
        return terms

    def write(self, packed: Sequence[Tensor], pages: Sequence[Tensor]) -> None:
        """Write packed matrices into pages: as they are."""
        for source, page in zip(packed, pages, strict=True):
            page[: self.num_bytes].copy_(source[: self.num_bytes])

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Rows that are decoded at once: from, to."""
        for start in range(0, self.rows, self._most):
            yield start, min(self.rows, start + self._most)

    def _vectors(self, pages: Tensor, x: Tensor, sums: Tensor | None, out: Tensor) -> None:
        """n stacked pages times x [1 or n, width], to out [n, rows]."""
        terms = self._terms(pages)
        for start, stop in self._blocks():
            numbers = self._numbers(pages, start, stop, terms)
            if len(x) == 1:
                out[:, start:stop] = torch.mv(numbers, x[0]).view(len(pages), -1)
            else:
                out[:, start:stop] = torch.bmm(numbers.view(len(pages), stop - start, -1), x.unsqueeze(2)).squeeze(2)
        if self.fmt.group == 0 and terms is not None:
            out.mul_(terms.scales.view(out.shape))
        if sums is not None and terms is not None and terms.added is not None:
            if len(sums) == 1:
                out.view(-1).addmv_(terms.added, sums[0])
            else:
                out.unsqueeze(2).baddbmm_(terms.added.view(*out.shape, -1), sums.unsqueeze(2))

    # ---- what codes mean ------------------------------------------------------------------------------------------------------------

    def _numbers(self, pages: Tensor, start: int, stop: int, terms: Terms | None) -> Tensor:
        """Codes of rows start to stop of n stacked pages, times their group's scale (where a row is one group: without it).

        Returns:
            float32 [n · rows, width], in the order of codes; valid until the next call.
        """
        if self._order is None or terms is None:
            return torch.cat([dequantize(unpack(page, self.fmt, self.rows, self.columns), self.fmt)[start:stop] for page in pages])
        block = self._scratch(len(pages), stop - start)
        self._decode(pages, start, stop, block)
        if self.fmt.group:
            # Several pages are one block, of all their rows.
            block.scale(terms.by_run if len(pages) > 1 else terms.by_run[start:stop])
        return block.floats

    def _terms(self, pages: Tensor, *, decoded: bool = True) -> Terms | None:
        """What belongs to the groups of n stacked pages, row by row; None where blocks do not hold groups."""
        if self._order is None:
            return None
        fmt, parts, count = self.fmt, self._parts, len(pages)
        lines, per = parts.scales.rows, fmt.group_rows
        raw = _rows(pages, parts.scales, 0, lines)
        if fmt.scale in _SCALE_DTYPES:
            scales = raw.view(_SCALE_DTYPES[fmt.scale]).float()
        elif fmt.scale == "e8m0":
            scales = torch.exp2(raw.float().sub_(127))
        elif fmt.scale == "e4m3":
            scales = _fp8_bits(raw.view(torch.int8).short()).view(torch.float16).float()
        else:
            scales = self._two_levels(pages, parts.super_scales, raw.view(torch.int8) if fmt.scale == "i8*f16" else raw)
        scales = scales.reshape(count * lines, -1)
        if per > 1:
            scales = scales.view(count, lines, -1).repeat_interleave(per, 1)[:, : self.rows].reshape(count * self.rows, -1)
        factor = _FLOAT_FACTORS["fp8"] if fmt.scale == "e4m3" else 1.0
        if decoded:
            factor *= _FLOAT_FACTORS.get(fmt.values, 1.0)
        scales = scales if factor == 1.0 and not fmt.factor else scales.view(count, -1).mul(self._factor(pages, factor)).view(scales.shape)
        return Terms(scales, self._order.by_run(scales) if decoded else scales, self._offsets(pages, scales))

    def _offsets(self, pages: Tensor, scales: Tensor) -> Tensor | None:
        """What is added to each weight of a group, if anything."""
        fmt, parts = self.fmt, self._parts
        if fmt.offset == "none":
            # Codes of fewer bits have their bias taken off while they are decoded.
            return scales * -float(fmt.bias) if fmt.bias and fmt.values == "int8" else None
        raw = _rows(pages, parts.offsets, 0, self.rows)
        if fmt.offset == "zero":
            signed = fmt.values == "int8"
            added = (raw.view(torch.int8) if signed else raw).reshape(scales.shape) * -scales
            return added.sub_(scales, alpha=fmt.bias) if signed and fmt.bias else added
        added = self._two_levels(pages, parts.super_offsets, raw).neg_() if fmt.offset == "u8*f16" else raw.view(torch.float16).float()
        if fmt.factor:
            added = added.view(len(pages), -1).mul(self._factor(pages, 1.0))
        added = added.reshape(scales.shape)
        return added.sub_(scales, alpha=fmt.bias) if fmt.values == "int8" and fmt.bias else added

    def _factor(self, pages: Tensor, more: float) -> Tensor | float:
        """What multiplies each of n stacked pages as a whole: [n, 1]."""
        if not self.fmt.factor:
            return more
        start = self._parts.factor.start
        return pages[:, start : start + 4].view(torch.float32) * more

    def _two_levels(self, pages: Tensor, supers: Part, codes: Tensor) -> Tensor:
        upper = _rows(pages, supers, 0, self.rows).view(torch.float16).float()
        return upper.repeat_interleave(SUPER_GROUP // self.fmt.group, 2)[:, :, : codes.shape[2]].mul(codes)

    def _decode(self, pages: Tensor, start: int, stop: int, block: BlockScratch) -> None:
        """Codes of rows start to stop as float32; float codes smaller by a factor."""
        values, kind = _rows(pages, self._parts.values, start, stop), self.fmt.values
        if kind == "int8":
            block.fill(values.view(torch.int8))
        elif kind == "fp8":
            half = block.halves[:, :, : self.columns]
            half.copy_(values.view(torch.int8))
            block.fill(_fp8_bits(half).view(torch.float16))
        elif kind == "fp4":
            wide, both = block.halves, block.nibble_halves
            wide.copy_(values.view(torch.int8))
            # The high code keeps its sign in all bits above; the low one is moved to the top and gets them on the way back.
            torch.bitwise_left_shift(wide, 5, out=both[1])
            torch.bitwise_left_shift(wide, 12, out=both[0])
            both[0].bitwise_right_shift_(3)
            both.bitwise_and_(_FP4_BITS)
            block.nibble_floats.copy_(both.view(torch.float16))
        else:
            words = values.view(torch.int64)
            if block.reordered is not None:
                block.reordered.copy_(values.view(torch.complex128).view(block.source_shape).transpose(2, 3))
                words = block.reordered_words
            torch.bitwise_and(words, _LOW_NIBBLES, out=block.words[0])
            torch.bitwise_right_shift(words, 4, out=block.words[1]).bitwise_and_(_LOW_NIBBLES)
            if HIGH_BITS.get(kind, 0):
                block.add_high_bits(_rows(pages, self._parts.high, start, stop).view(torch.int64))
            if self.fmt.bias:  # bytes that wrap around are signed numbers
                block.codes.sub_(self.fmt.bias)
            block.nibble_floats.copy_(block.codes.view(torch.int8))

    # ---- what they are multiplied with ----------------------------------------------------------------------------------------------

    def ordered(self, x: Tensor) -> Tensor:
        """x [m, columns] as [m, width], in the order of codes."""
        if self._order is None:
            return x
        if self.width > self.columns:
            x = torch.nn.functional.pad(x, (0, self.width - self.columns))
        return x if self._order.columns is None else x.index_select(1, self._order.columns)

    def _sums(self, x: Tensor) -> Tensor | None:
        """Sums of x over each group: [m, groups]; None where nothing is added to weights."""
        if self._order is None or (self.fmt.offset == "none" and not (self.fmt.bias and self.fmt.values == "int8")):
            return None
        group = self.fmt.group or self.columns
        if self.columns % group:
            x = torch.nn.functional.pad(x, (0, -self.columns % group))
        return x.view(len(x), -1, group).sum(2)

    def _stacked(self, pages: Sequence[Tensor]) -> Tensor:
        """Pages one behind the other, uint8 [n, whole words of 16 bytes]: their own bytes where there is one that is long enough."""
        num_bytes = self.num_bytes
        size = -(-num_bytes // 16) * 16
        if len(pages) == 1 and len(pages[0]) >= size:
            return pages[0][:size].unsqueeze(0)
        whole = len(pages[0])
        if whole % 16 == 0 and size <= whole <= 2 * size and all(len(page) == whole for page in pages):
            return torch.stack(list(pages), out=self._space.stack(len(pages), whole))
        stacked = self._space.stack(len(pages), size)
        for page, target in zip(pages, stacked, strict=True):
            target[:num_bytes].copy_(page[:num_bytes])
        return stacked


def _fp8_bits(codes: Tensor) -> Tensor:
    """Signed e4m3 codes in int16 become, in place, the bits of float16 numbers; these are smaller by a factor."""
    return codes.bitwise_left_shift_(7).bitwise_and_(_FP8_BITS)


def _rows(pages: Tensor, part: Part, start: int, stop: int) -> Tensor:
    """Rows start to stop of a part of each page: uint8 [n, rows, row bytes]."""
    first = part.start + start * part.row_bytes
    return pages[:, first : first + (stop - start) * part.row_bytes].view(len(pages), stop - start, part.row_bytes)
