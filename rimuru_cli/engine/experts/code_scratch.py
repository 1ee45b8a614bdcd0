"""Scratch for turning codes into numbers, a block at a time: preallocated, so that every step writes where the last block's did."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_cli.engine.experts.code_order import CodeOrder
from rimuru_cli.engine.experts.pages import block_weights
from rimuru_kernels.packed_weights import PackedFormat
from rimuru_kernels.packed_weights.format import BLOCK, HIGH_BITS, LOW_BITS

_HIGH_PLACE = 0x1010101010101010
"""Where the lowest of a code's high bits belongs, in each of eight codes."""


class Workspace:
    """Scratch for one block, shared by all matrices.

    Args:
        columns: of the widest matrix; a block is at least one row.
    """

    def __init__(self, columns: int) -> None:
        size = block_weights(columns)
        self.floats = torch.empty(size)
        self.halves = torch.empty(size, dtype=torch.int16)  # codes as 16-bit numbers, or as bytes and beside them their high bits
        self.more_halves = torch.empty(size // 2, dtype=torch.int16)
        self._stack = torch.empty(0, dtype=torch.uint8)

    def words(self, count: int) -> Tensor:
        """int64 [count] that nothing else uses while no block is decoded."""
        words = self.halves.view(torch.int64) if self.halves.numel() % 4 == 0 else torch.empty(0, dtype=torch.int64)
        return words[:count] if len(words) >= count else torch.empty(count, dtype=torch.int64)

    def numbers(self, count: int) -> Tensor:
        """float32 [count], likewise."""
        return self.floats[:count] if len(self.floats) >= count else torch.empty(count)

    def stack(self, count: int, size: int) -> Tensor:
        """uint8 [count, size] for several pages that make one block."""
        if len(self._stack) < count * size:
            self._stack = torch.empty(count * size, dtype=torch.uint8)
        return self._stack[: count * size].view(count, size)


class BlockScratch:
    """Views of the scratch for `rows` rows of each of `count` matrices.

    Attributes:
        floats: float32 [count · rows, width].
        halves: int16 [count, rows of each, codes of 8 bits, or bytes of two codes of 4].
        nibble_halves: int16 [2, ...], the low and the high code of each of those bytes.
        codes, words: the same as uint8, and as int64.
        nibble_floats: `floats` in the same order.
        reordered: complex128, for bytes in another order, where codes have 6 bits.
    """

    def __init__(self, space: Workspace, fmt: PackedFormat, order: CodeOrder, count: int, rows: int) -> None:
        self._width = order.width
        size = count * rows * order.width
        self.floats = space.floats[:size].view(count * rows, order.width)
        self._runs = self.floats.view(-1, order.run) if order.run else self.floats
        self.reordered: Tensor | None = None
        if LOW_BITS[fmt.values] == 8:
            self._filled = self.floats.view(count, rows, order.width)
            self.halves = space.halves[:size].view(count, rows, order.width)
            return
        blocks = order.width // BLOCK
        half = size // 2
        self.nibble_floats = space.floats[:size].view(count, rows, 2, order.width // 2).permute(2, 0, 1, 3)
        if fmt.values == "fp4":
            self.halves = space.more_halves[:half].view(count, rows, -1)
            self.nibble_halves = space.halves[:size].view(2, count, rows, -1)
            return
        bytes_ = space.halves.view(torch.uint8)
        self.codes = bytes_[:size].view(2, count, rows, -1)
        self.both_words = bytes_[:size].view(torch.int64)
        self.words = self.both_words.view(2, count, rows, -1)
        bits = HIGH_BITS.get(fmt.values, 0)
        if not bits:
            return
        pieces = 4 // bits  # in each half
        high = bytes_[size : 2 * size].view(torch.int64).view(2, pieces, count, rows, -1)
        self._high = high
        self._places = torch.tensor([4 - bits * piece for piece in range(pieces)]).view(-1, 1, 1, 1)
        self._mask = _HIGH_PLACE * ((1 << bits) - 1)
        if bits == 2:
            self.source_shape = (count, rows, blocks, 2)
            self.reordered = space.more_halves.view(torch.uint8)[:half].view(torch.complex128).view(count, rows, 2, blocks)
            self.reordered_words = space.more_halves.view(torch.uint8)[:half].view(torch.int64).view(count, rows, -1)
            self._targets = self.both_words.view(2, count, rows, 2, -1).permute(0, 3, 1, 2, 4)
        else:
            self._targets = self.both_words.view(2, count, rows, blocks, 4).permute(0, 4, 1, 2, 3)

    def fill(self, codes: Tensor) -> None:
        """Codes of 8 bits, [count, rows, columns], as float32; what fills up the last group is zero."""
        columns = codes.shape[2]
        if columns == self._width:
            self._filled.copy_(codes)
        else:
            self._filled[:, :, :columns].copy_(codes)
            self._filled[:, :, columns:] = 0.0

    def add_high_bits(self, high: Tensor) -> None:
        """Add the high bits, int64 [count, rows, words], to `codes`; see `packed_weights.format` for where they lie."""
        left, right = self._high[0], self._high[1]
        source = high.unsqueeze(0)
        torch.bitwise_left_shift(source, self._places, out=left)
        torch.bitwise_right_shift(source, 4 - self._places, out=right)
        self._high.bitwise_and_(self._mask)
        self._targets.bitwise_or_(self._high)

    def scale(self, scales: Tensor) -> None:
        """Multiply by the scales [rows, runs] of each run."""
        self._runs.mul_(scales.reshape(-1, 1))
