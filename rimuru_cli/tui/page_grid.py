"""From a page table to the cells of a map: where each huge page lies, and what colour each cell has. Pure arithmetic on arrays.

The map reads like text, in the order of addresses. With room to spare a huge page is a brick of several cells, and its parts show where it
is split; with many pages a cell stands for one huge page, or for several. A cell shows the kind that owns most of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.frame import EXPERT, FREE, KINDS, TAIL, PageTable
from rimuru_cli.tui.palette import BASE, FRESH, PART, SHADES, WARM

CODES_OF_KINDS: Final = len(KINDS) * SHADES
BLANK: Final = CODES_OF_KINDS
CURSOR: Final = CODES_OF_KINDS + 1
SPLIT: Final = CODES_OF_KINDS + 2
MERGED: Final = CODES_OF_KINDS + 3
NUM_CODES: Final = CODES_OF_KINDS + 4
"""Codes of cells: kind x SHADES + shade, then nothing at all, the cursor, a huge page that was just split or merged."""

_USED_SHARE: Final = 0.15
"""From this share on, a cell that is otherwise free shows its owner: what is used matters more than what is not."""
_FULL_SHARE: Final = 0.7
_MARKED_SHARE: Final = 0.04

Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class GridLayout:
    """How the pool's bytes are arranged on a map of `width` x `rows` cells.

    As bricks, every huge page is a rectangle of its own with a gap at its right. As a tape, the pool is spread evenly over all cells, line
    after line, whether that makes several cells a huge page or several huge pages a cell.

    Attributes:
        width: cells a row.
        rows: rows of cells (half lines of the terminal where a cell is half a character).
        num_huge: huge pages of the pool; the last one may be cut short.
        brick_width, brick_rows: cells of a brick, the gaps at its right and below it included; 0 for a tape.
        gap, gap_rows: cells of the gaps.
    """

    width: int
    rows: int
    num_huge: int
    brick_width: int = 0
    brick_rows: int = 0
    gap: int = 0
    gap_rows: int = 0

    @property
    def bricks(self) -> bool:
        """Whether huge pages are bricks."""
        return self.brick_width > 0

    @property
    def per_band(self) -> int:
        """Bricks side by side."""
        return max(1, self.width // max(1, self.brick_width))

    @property
    def parts(self) -> int:
        """Cells of a brick that show different bytes."""
        return self.brick_width - self.gap

    @property
    def num_cells(self) -> int:
        """Cells that show different bytes."""
        return self.num_huge * self.parts if self.bricks else self.width * self.rows

    @property
    def huge_per_cell(self) -> float:
        """Huge pages, or a part of one, that a cell stands for."""
        return self.num_huge / self.num_cells

    def huge_at(self, column: int, row: int) -> int | None:
        """The huge page at a cell (the first of several), or None where there is none."""
        if not (0 <= column < self.width and 0 <= row < self.rows):
            return None
        if not self.bricks:
            return self._huge_in(row * self.width + column)
        place = column // self.brick_width
        huge = row // self.brick_rows * self.per_band + place
        return huge if place < self.per_band and huge < self.num_huge else None

    def _huge_in(self, cell: int) -> int:
        """The huge page in the middle of a cell of the tape; of several in it, the one that begins first."""
        if self.num_huge <= self.num_cells:
            return (2 * cell + 1) * self.num_huge // (2 * self.num_cells)
        return -(-cell * self.num_huge // self.num_cells)

    def cells_of(self, huge: int) -> range:
        """The cells of the tape, or of the linear order of bricks, that show a huge page: those with their middle in it; at least one."""
        if self.bricks:
            return range(huge * self.parts, (huge + 1) * self.parts)
        if self.num_huge > self.num_cells:
            cell = huge * self.num_cells // self.num_huge
            return range(cell, cell + 1)
        first, end = (-(-(2 * number * self.num_cells - self.num_huge) // (2 * self.num_huge)) for number in (huge, huge + 1))
        return range(first, end)

    def moved(self, huge: int, cell: int, columns: int, rows: int) -> tuple[int, int]:
        """The huge page some places away and the cell it was reached at, or the same ones at the border.

        Args:
            huge: where the cursor is.
            cell: the cell through which it got there, so that going down and up again leads back. Only a tape needs it.
            columns, rows: how far to go; one of them is 0.
        """
        if self.bricks:
            other = huge + columns + rows * self.per_band
            return (other, 0) if 0 <= other < self.num_huge else (huge, 0)
        if columns and self.num_huge <= self.num_cells:
            other = min(max(0, huge + columns), self.num_huge - 1)
            return other, self.cells_of(other)[0]
        other = cell + columns + rows * self.width
        return (self._huge_in(other), other) if 0 <= other < self.num_cells else (huge, cell)


def arrange(num_huge: int, width: int, rows: int, *, halves: bool = True) -> GridLayout:
    """Bricks with gaps on all sides where they are large enough to be looked at one by one, the largest that fit; else a tape.

    Args:
        num_huge: huge pages to show.
        width, rows: cells that there are.
        halves: a row is half a line, so that a cell is about as high as wide; else a row is a line, twice as high.
    """
    width, rows, num_huge = max(1, width), max(1, rows), max(1, num_huge)
    for height in (4, 3) if halves else (2,):
        bands = rows // height
        if bands == 0 or num_huge > width * bands:
            continue
        brick_width = width // -(-num_huge // bands)
        squat = 2 * height if halves else 4 * height
        if brick_width > squat:
            return GridLayout(width, rows, num_huge, min(brick_width, 6 * squat), height, 1, 1)
    return GridLayout(width, rows, num_huge)


class PageGrid:
    """The cells of one pool on one map; keeps what does not change from frame to frame.

    `draw` costs a few passes over the pages; nothing in it is a Python loop over pages or cells.
    """

    def __init__(self, pool_bytes: int, huge_page_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.huge_page_bytes = max(1, huge_page_bytes)
        self.num_huge = max(1, -(-pool_bytes // self.huge_page_bytes))
        self.layout = GridLayout(1, 1, self.num_huge)
        self._where: NDArray[np.int64] = np.zeros((1, 1), dtype=np.int64)
        self._offsets: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._cells: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._pages: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._overlap: NDArray[np.float64] = np.zeros(0)
        self._cell_bytes: NDArray[np.float64] = np.zeros(1)
        self._levels: NDArray[np.uint8] | None = None
        self._changed_at: NDArray[np.float64] = np.full(self.num_huge, -np.inf)
        self._was_split: NDArray[np.bool_] = np.zeros(self.num_huge, dtype=np.bool_)

    def resize(self, width: int, rows: int, *, halves: bool = True) -> None:
        """Lay the map out for another size."""
        layout = self.layout = arrange(self.num_huge, width, rows, halves=halves)
        self._offsets = np.zeros(0, dtype=np.int64)
        if not layout.bricks:
            self._where = np.arange(layout.num_cells).reshape(layout.rows, layout.width)
            return
        columns, lines = np.arange(layout.width), np.arange(layout.rows)
        place, inside = columns // layout.brick_width, columns % layout.brick_width
        band, line = lines // layout.brick_rows, lines % layout.brick_rows
        huge = band[:, None] * layout.per_band + place[None, :]
        there = (place < layout.per_band)[None, :] & (huge < layout.num_huge) & (inside < layout.parts)[None, :]
        there &= (line < layout.brick_rows - layout.gap_rows)[:, None]
        # One cell more than there are stands for everything that is blank.
        self._where = np.where(there, huge * layout.parts + inside[None, :], layout.num_cells)

    def _slice(self, pages: PageTable) -> None:
        """Cut the pages at the cells' borders; done anew only when pages were split or merged."""
        if pages.offset is self._offsets or np.array_equal(pages.offset, self._offsets):
            return
        num_cells = self.layout.num_cells
        step = self.huge_page_bytes * self.num_huge / num_cells
        end = pages.offset + pages.size
        first = np.minimum((pages.offset / step).astype(np.int64), num_cells - 1)
        last = np.minimum(np.maximum(np.ceil(end / step).astype(np.int64) - 1, first), num_cells - 1)
        counts = last - first + 1
        self._pages = np.repeat(np.arange(len(pages)), counts)
        within = np.arange(len(self._pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._cells = first[self._pages] + within
        begin = np.maximum(self._cells * step, pages.offset[self._pages])
        self._overlap = np.maximum(np.minimum((self._cells + 1) * step, end[self._pages]) - begin, 0.0)
        self._cell_bytes = np.maximum(np.bincount(self._cells, weights=self._overlap, minlength=num_cells), 1.0)
        self._offsets = pages.offset

    def watch_splits(self, pages: PageTable, now: float) -> None:
        """Note which huge pages were split or merged since the last frame."""
        starts = np.searchsorted(pages.offset, np.arange(self.num_huge) * self.huge_page_bytes, side="right") - 1
        whole = (pages.kind == TAIL) | (pages.size == self.huge_page_bytes)  # the only child of a huge page does not look split
        levels = np.maximum.reduceat(np.where(whole, 1, pages.level).astype(np.uint8), np.maximum(starts, 0))
        if self._levels is not None:
            changed = levels != self._levels
            self._changed_at[changed] = now
            self._was_split[changed] = levels[changed] > self._levels[changed]
        self._levels = levels

    def draw(
        self, pages: PageTable, shades: NDArray[np.uint8], now: float, *, flash_seconds: float = 0.8, only: int | None = None
    ) -> Codes:
        """The codes of all cells, uint8 [rows, width].

        Args:
            pages: the page table.
            shades: BASE, WARM or FRESH for each page.
            now: the moment that is drawn, for flashes of splits and merges.
            only: show this kind alone, all others as free.
        """
        self._slice(pages)
        num_cells = self.layout.num_cells
        kind = pages.kind if only is None else np.where(pages.kind == only, pages.kind, FREE)
        bins = self._cells * len(KINDS) + kind[self._pages]
        amount = np.bincount(bins, weights=self._overlap, minlength=num_cells * len(KINDS)).reshape(num_cells, len(KINDS))
        used = amount.copy()
        used[:, FREE] = used[:, TAIL] = 0.0
        share = used.sum(axis=1) / self._cell_bytes
        cell_kind = np.where(share >= _USED_SHARE, used.argmax(axis=1), np.where(amount[:, TAIL] > amount[:, FREE], TAIL, FREE))
        cell_shade = np.where((share < _FULL_SHARE) & (cell_kind != FREE) & (cell_kind != TAIL) & (cell_kind != EXPERT), PART, BASE)
        lively = shades >= WARM
        lively &= kind != FREE
        if lively.any():
            young = np.flatnonzero(lively[self._pages])
            cells = self._cells[young]
            fresh = shades[self._pages[young]] >= FRESH
            cell_shade[cells] = np.where(cell_kind[cells] != FREE, WARM, cell_shade[cells])
            cells = cells[fresh]
            cell_shade[cells] = np.where(cell_kind[cells] != FREE, FRESH, cell_shade[cells])
        codes = np.empty(num_cells + 1, dtype=np.uint8)
        codes[:-1] = cell_kind * SHADES + cell_shade
        codes[-1] = BLANK
        self._flash(codes, now - flash_seconds)
        drawn: Codes = codes[self._where]
        return drawn

    def _flash(self, codes: Codes, since: float) -> None:
        """Mark the first cell of huge pages that were split or merged lately; their new content shows beside it. In a storm only the newest
        are marked, for a map full of marks shows nothing."""
        changed = np.flatnonzero(self._changed_at > since)
        most = max(1, int(self.layout.num_cells * _MARKED_SHARE))
        if len(changed) > most:
            changed = changed[np.argsort(self._changed_at[changed], kind="stable")[-most:]]
        for huge in changed.tolist():
            codes[self.layout.cells_of(huge)[0]] = SPLIT if self._was_split[huge] else MERGED

    def mark(self, codes: Codes, huge: int) -> None:
        """Put the cursor on a huge page: both ends of its brick, or its first and last cell of the tape."""
        cells = self.layout.cells_of(huge)
        ends = (self._where == cells[0]) | (self._where == cells[-1])
        codes[ends] = CURSOR

    def flashing(self, now: float, flash_seconds: float = 0.8) -> bool:
        """Whether a split or merge still shows."""
        return bool((self._changed_at > now - flash_seconds).any())

    def num_split(self) -> int:
        """Huge pages that are split, as of the last `watch_splits`."""
        return 0 if self._levels is None else int((self._levels > 1).sum())


def pages_of_huge(pages: PageTable, huge: int, huge_page_bytes: int) -> NDArray[np.int64]:
    """Indices of the pages that lie in a huge page."""
    low, high = np.searchsorted(pages.offset, (huge * huge_page_bytes, (huge + 1) * huge_page_bytes))
    return np.arange(low, max(high, low + 1))[: max(0, len(pages) - int(low))]
