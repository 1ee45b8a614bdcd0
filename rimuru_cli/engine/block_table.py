"""Where all token blocks lie, as one array: for those who look on and cannot walk the tree of blocks twenty times a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rimuru_cli.engine.kv_blocks import TokenBlock

_FIRST_CAPACITY = 64


class BlockTable:
    """A row for every token block; the row of a freed block goes to a later one.

    Attributes:
        used: rows that were ever used; everything behind them is empty.
        blocks: the block of each row, None in empty rows.
    """

    def __init__(self, num_layers: int) -> None:
        self._pages: NDArray[np.int32] = np.full((_FIRST_CAPACITY, num_layers), -1, dtype=np.int32)
        self._first: NDArray[np.int32] = np.full(_FIRST_CAPACITY, -1, dtype=np.int32)
        self._free: list[int] = []
        self.used = 0
        self.blocks: list[TokenBlock | None] = []

    @property
    def pages(self) -> NDArray[np.int32]:
        """int32 [used, num_layers], page entries; -1 in rows without a block. A view."""
        return self._pages[: self.used]

    @property
    def first(self) -> NDArray[np.int32]:
        """int32 [used], position of each block's first token in its text, for whoever finds it out; -1 in rows of new blocks. A view."""
        return self._first[: self.used]

    def add(self, blocks: Sequence[TokenBlock]) -> None:
        """Give new blocks their rows."""
        if not blocks:
            return
        again = min(len(blocks), len(self._free))
        slots = [self._free.pop() for _ in range(again)] + list(range(self.used, self.used + len(blocks) - again))
        self.used += len(blocks) - again
        while self.used > len(self._first):
            self._pages = np.concatenate((self._pages, np.full_like(self._pages, -1)))
            self._first = np.concatenate((self._first, np.full_like(self._first, -1)))
        if len(blocks) == 1:  # as when an answer grows
            self._pages[slots[0]] = blocks[0].pages
            self._first[slots[0]] = -1
        else:
            self._pages[slots] = [block.pages for block in blocks]
            self._first[slots] = -1
        self.blocks += [None] * (self.used - len(self.blocks))
        for block, slot in zip(blocks, slots, strict=True):
            block.slot = slot
            self.blocks[slot] = block

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Every page of `sources` has become the one of `targets` at its place; the blocks' own lists follow."""
        order = np.argsort(sources)
        ordered = np.asarray(sources, dtype=np.int32)[order]
        place = np.minimum(np.searchsorted(ordered, self.pages), len(ordered) - 1)
        slots, layers = np.nonzero(ordered[place] == self.pages)
        self._pages[slots, layers] = np.asarray(targets, dtype=np.int32)[order][place[slots, layers]]
        for slot in np.flatnonzero(np.bincount(slots)).tolist():
            block = self.blocks[slot]
            assert block is not None, "an empty row has no pages"
            block.pages = self._pages[slot].tolist()

    def remove(self, blocks: Sequence[TokenBlock]) -> None:
        """Empty the rows of blocks that give their pages back."""
        slots = [block.slot for block in blocks]
        self._pages[slots] = -1
        self._free += slots
        for block, slot in zip(blocks, slots, strict=True):
            self.blocks[slot] = None
            block.slot = -1
