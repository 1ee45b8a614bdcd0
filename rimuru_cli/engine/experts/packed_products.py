"""Products with packed matrices on a CPU: codes become float32 block by block, small enough to stay in the processor's cache.

With q the stored code, and s, z, m scale, zero and minimum of the group of columns g that holds it (see `packed_weights.format`),

    y = factor · Σ_k (s q_k + c) x_k = factor · ( Σ_k (s q_k) x_k + Σ_g c_g Σ_{k in g} x_k )        c = m - s (bias + z)

so what belongs to whole groups is added for whole groups. Four-bit codes are taken in the order in which they lie, all low halves of a
row's bytes and then all high ones; x is put into the same order instead, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from rimuru_cli.engine.experts.pages import block_weights
from rimuru_kernels.packed_weights import PackedFormat, PageParts, dequantize, page_parts, unpack
from rimuru_kernels.packed_weights.format import BLOCK, HIGH_BITS, LOW_BITS, SUPER_GROUP, Part

_HALF = BLOCK // 2
_SCALE_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# What the bits of a float code are, read as the bits of a float16, is this much too small.
_FP8_FACTOR = 2.0**8
_FP4_FACTOR = 2.0**14


class Workspace:
    """Scratch for one block at a time, shared by all matrices.

    Args:
        columns: of the widest matrix; a block is at least one row.
    """

    def __init__(self, columns: int) -> None:
        size = block_weights(columns)
        self.codes = torch.empty(size, dtype=torch.uint8)
        self.halves = torch.empty(size, dtype=torch.int16)
        self.floats = torch.empty(size)


class PackedTile:
    """How one kind of tile is multiplied: packed matrices [rows, columns] of one format.

    Args:
        fmt: of the codes.
        rows, columns: of a tile.
        space: scratch.
    """

    def __init__(self, fmt: PackedFormat, rows: int, columns: int, space: Workspace) -> None:
        self.fmt, self.rows, self.columns = fmt, rows, columns
        self._space = space
        self._parts: PageParts = page_parts(fmt, rows, columns)
        self._nibbles = LOW_BITS[fmt.values] == 4
        self._blocks = -(-columns // BLOCK)
        self._groups = fmt.groups(columns)
        group = fmt.group
        # Columns as they are computed, with what fills up the last block or group.
        self._width = self._blocks * BLOCK if self._nibbles else columns if not group else self._groups * group
        # Groups that are no whole parts of blocks, nor whole blocks, which no released checkpoint has: slowly, by the reference.
        self._odd = self._nibbles and group not in (0, 16, 32) and group % BLOCK != 0

    def product(self, pages: Sequence[Tensor], x: Tensor) -> Tensor:
        """Products of several tiles.

        Args:
            pages: n of them, uint8, each at least the bytes of a tile.
            x: float32 [1, columns], for all, or [n, columns].

        Returns:
            float32 [n, rows].
        """
        count = len(pages)
        if self._odd:
            numbers = self._space.floats.new_empty(self.rows, self.columns)
            return torch.stack([torch.mv(self.weights(page, numbers), x[n % len(x)]) for n, page in enumerate(pages)])
        out = torch.empty(count, self.rows)
        ordered, sums = self._ordered(x), self._sums(x)
        shared = len(x) == 1
        at_once = max(1, self._space.floats.numel() // (self.rows * self._width))
        rows = min(self.rows, max(1, self._space.floats.numel() // self._width))
        for first in range(0, count, at_once):
            some = pages[first : first + at_once]
            stacked = _stack(some, self._parts.num_bytes)
            own = slice(None) if shared else slice(first, first + len(some))
            for start in range(0, self.rows, rows):
                stop = min(self.rows, start + rows)
                target = out[first : first + len(some), start:stop]
                self._block_product(stacked, start, stop, ordered[own], sums if sums is None else sums[own], target)
        return out

    def weights(self, page: Tensor, out: Tensor) -> Tensor:
        """One tile's weights as float32 [rows, columns], written to `out`."""
        if self._odd:
            return out.copy_(dequantize(unpack(page, self.fmt, self.rows, self.columns), self.fmt))
        stacked = _stack([page], self._parts.num_bytes)
        rows = min(self.rows, max(1, self._space.floats.numel() // self._width))
        for start in range(0, self.rows, rows):
            stop = min(self.rows, start + rows)
            scales, added = self._scales(stacked, start, stop)
            codes = self._scaled(stacked, start, stop, scales)
            if not self.fmt.group:
                codes.mul_(scales)
            if added is not None:
                codes.view(*self._by_groups(codes)).add_(self._over(added))
            if self.fmt.factor:
                codes.mul_(self._factor(stacked))
            target = out[start:stop]
            if self._nibbles:
                codes = codes.view(stop - start, 2, self._blocks, _HALF).transpose(1, 2).reshape(stop - start, -1)
                target.copy_(codes[:, : self.columns])
            else:
                target.copy_(codes.view(stop - start, -1)[:, : self.columns])
        return out

    # ---- parts of a product ---------------------------------------------------------------------------------------------------------

    def _block_product(self, pages: Tensor, start: int, stop: int, x: Tensor, sums: Tensor | None, out: Tensor) -> None:
        scales, added = self._scales(pages, start, stop)
        codes = self._scaled(pages, start, stop, scales)
        count, rows = len(pages), stop - start
        if len(x) == 1:
            y = torch.mv(codes.view(count * rows, self._width), x[0]).view(count, rows)
        else:
            y = torch.bmm(codes, x.unsqueeze(2)).squeeze(2)
        if not self.fmt.group:
            y.mul_(scales.squeeze(2))
        if added is not None and sums is not None:
            flat = added.reshape(count, rows, -1)
            y += torch.matmul(flat, sums[0]) if len(sums) == 1 else torch.bmm(flat, sums.unsqueeze(2)).squeeze(2)
        if self.fmt.factor:
            y *= self._factor(pages).view(-1, 1)
        out.copy_(y)

    def _scaled(self, pages: Tensor, start: int, stop: int, scales: Tensor) -> Tensor:
        """Codes of rows start to stop as float32 [n, rows, width], times their group's scale where rows have several."""
        count, rows = len(pages), stop - start
        floats = self._space.floats[: count * rows * self._width].view(count, rows, self._width)
        values = _rows(pages, self._parts.values, start, stop)
        own = floats[:, :, : self.columns]
        if not self._nibbles and self._width > self.columns:
            floats[:, :, self.columns :] = 0.0
        if self._nibbles:
            self._nibble_codes(pages, values, start, stop, floats)
        elif self.fmt.values == "int8":
            own.copy_(values.view(torch.int8))
        else:
            half = self._space.halves[: values.numel()].view_as(values)
            half.copy_(values.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(
                -16512
            )  # the sign, and seven bits below the exponent's top
            own.copy_(half.view(torch.float16))
        if self.fmt.group:
            floats.view(*self._by_groups(floats)).mul_(self._over(scales))
        return floats

    def _nibble_codes(self, pages: Tensor, values: Tensor, start: int, stop: int, floats: Tensor) -> None:
        count, rows, _ = values.shape
        codes = self._space.codes[: floats.numel()].view(count, rows, 2, self._blocks * _HALF)
        torch.bitwise_and(values, 15, out=codes[:, :, 0])
        torch.bitwise_right_shift(values, 4, out=codes[:, :, 1])
        bits = HIGH_BITS.get(self.fmt.values, 0)
        if bits:
            high = _rows(pages, self._parts.high, start, stop).view(count, rows, self._blocks, -1)
            size = high.shape[3]
            pieces = codes.view(count, rows, 2, self._blocks, _HALF // size, size)
            per_half = _HALF // size
            for piece in range(2 * per_half):
                more = ((high >> (piece * bits)) & ((1 << bits) - 1)) << 4
                pieces[:, :, piece // per_half, :, piece % per_half].bitwise_or_(more)
        if self.fmt.values == "fp4":
            half = self._space.halves[: floats.numel()].view_as(codes)
            half.copy_(codes)
            sign = half << 12
            half.bitwise_left_shift_(9).bitwise_and_(0x0E00).bitwise_or_(sign.bitwise_and_(-32768))
            floats.view_as(codes).copy_(half.view(torch.float16))
        else:
            floats.view_as(codes).copy_(codes)

    def _by_groups(self, floats: Tensor) -> tuple[int, ...]:
        """The shape in which a block's columns stand beside their groups."""
        count, rows, _ = floats.shape
        group = self.fmt.group
        if not self._nibbles:
            return count, rows, self._groups, group if group else self._width
        return (count, rows, 2, self._blocks, _HALF // 16, 16) if group == 16 else (count, rows, 2, self._blocks, _HALF)

    def _over(self, per_group: Tensor) -> Tensor:
        """Values of groups [n, rows, groups] in the order of `_by_groups`, to be broadcast."""
        count, rows, groups = per_group.shape
        group = self.fmt.group
        if not self._nibbles:
            return per_group.unsqueeze(3)
        if group == 0:
            return per_group.view(count, rows, 1, 1, 1)
        if group <= _HALF:
            wanted = self._blocks * (BLOCK // group)
            if groups < wanted:
                per_group = torch.nn.functional.pad(per_group, (0, wanted - groups))
            if group == 16:
                return per_group.view(count, rows, self._blocks, 2, 2, 1).transpose(2, 3)
            return per_group.view(count, rows, self._blocks, 2, 1).transpose(2, 3)
        return per_group.repeat_interleave(group // BLOCK, 2)[:, :, : self._blocks].view(count, rows, 1, self._blocks, 1)

    def _scales(self, pages: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Scales [n, rows, groups], and what is added to each weight of a group, likewise, if anything."""
        fmt, parts = self.fmt, self._parts
        per = fmt.group_rows
        first, last = start // per, -(-stop // per)
        raw = _rows(pages, parts.scales, first, last)
        if fmt.scale in _SCALE_DTYPES:
            scales = raw.view(_SCALE_DTYPES[fmt.scale]).float()
        elif fmt.scale == "e8m0":
            scales = torch.exp2(raw.float() - 127)
        elif fmt.scale == "e4m3":
            scales = self._e4m3.index_select(0, raw.reshape(-1).int()).view(raw.shape)
        else:
            codes = raw.view(torch.int8) if fmt.scale == "i8*f16" else raw
            scales = self._two_levels(pages, parts.super_scales, codes, start, stop)
        if per > 1:
            scales = scales.repeat_interleave(per, 1)[:, start - first * per : stop - first * per]
        added: Tensor | None = None
        if fmt.offset == "u8*f16":
            added = self._two_levels(pages, parts.super_offsets, _rows(pages, parts.offsets, start, stop), start, stop).neg_()
        elif fmt.offset == "min":
            added = _rows(pages, parts.offsets, start, stop).view(torch.float16).float()
        elif fmt.offset == "zero":
            zeros = _rows(pages, parts.offsets, start, stop)
            added = (zeros.view(torch.int8) if fmt.values == "int8" else zeros) * -scales
        if fmt.bias:
            taken = scales * -float(fmt.bias)
            added = taken if added is None else added + taken
        code_factor = _FP8_FACTOR if fmt.values == "fp8" else _FP4_FACTOR if fmt.values == "fp4" else 1.0
        return scales if code_factor == 1.0 else scales * code_factor, added

    def _two_levels(self, pages: Tensor, supers: Part, codes: Tensor, start: int, stop: int) -> Tensor:
        upper = _rows(pages, supers, start, stop).view(torch.float16).float()
        return upper.repeat_interleave(SUPER_GROUP // self.fmt.group, 2)[:, :, : codes.shape[2]].mul_(codes)

    def _factor(self, pages: Tensor) -> Tensor:
        start = self._parts.factor.start
        return pages[:, start : start + 4].view(torch.float32)

    def _ordered(self, x: Tensor) -> Tensor:
        """x [m, columns] as [m, width], in the order of codes."""
        if self._width > self.columns:
            x = torch.nn.functional.pad(x, (0, self._width - self.columns))
        if not self._nibbles:
            return x
        return x.view(len(x), self._blocks, 2, _HALF).transpose(1, 2).reshape(len(x), -1)

    def _sums(self, x: Tensor) -> Tensor | None:
        """Sums of x over each group: [m, groups]; None where nothing is added to weights."""
        if self.fmt.offset == "none" and not self.fmt.bias:
            return None
        group = self.fmt.group or self.columns
        if self.columns % group:
            x = torch.nn.functional.pad(x, (0, -self.columns % group))
        return x.view(len(x), -1, group).sum(2)

    @cached_property
    def _e4m3(self) -> Tensor:
        """The numbers that the 256 codes of e4m3 stand for."""
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _stack(pages: Sequence[Tensor], num_bytes: int) -> Tensor:
    """Pages one behind the other, uint8 [n, whole words of 16 bytes]: their own bytes where there is one that is long enough."""
    size = -(-num_bytes // 16) * 16
    if all(len(page) >= size for page in pages):
        return pages[0][:size].unsqueeze(0) if len(pages) == 1 else torch.stack([page[:size] for page in pages])
    return torch.stack([torch.nn.functional.pad(page[:num_bytes], (0, size - num_bytes)) for page in pages])


def _rows(pages: Tensor, part: Part, start: int, stop: int) -> Tensor:
    """Rows start to stop of a part of each page: uint8 [n, rows, row bytes]."""
    first = part.start + start * part.row_bytes
    return pages[:, first : first + (stop - start) * part.row_bytes].view(len(pages), stop - start, part.row_bytes)
