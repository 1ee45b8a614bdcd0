"""From the owners of pages to the map of the whole pool: free pages and tails are what the owners leave.

The allocator merges pages as soon as all children of a parent are free, so a page is split exactly if something inside of it is owned. That
makes the boundaries a function of the owners. Everything here is numpy over all pages at once: a dashboard does it ten times a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PageLayout, PoolGeometry
from rimuru_cli.engine.telemetry.frame import FREE, TAIL

MOST_PAGES = 1 << 23
"""A map with more pages than this is refused: it does not come from a pool, or nobody could look at it."""

Longs = NDArray[np.int64]
_SECOND = (PageKind.EXPERT, PageKind.SSM)


class DamagedTables(ValueError):
    """The owners do not fit the pool: pages outside of it, or between pages."""


@dataclass(frozen=True, eq=False)
class Boundaries:
    """Pages without their owners: the first four columns of a `PageTable`; `kind` is FREE or TAIL.

    `second` finds a page's row: for L2 kind p, `second[p]` is int64 [huge pages, per huge page], the row where that L2 page begins.
    """

    offset: Longs
    size: Longs
    level: NDArray[np.uint8]
    kind: NDArray[np.uint8]
    second: dict[PageKind, Longs]


class PoolLayout:
    """The pages of one pool geometry.

    Args:
        geometry: page sizes.
        pool_bytes: size of the pool.

    Raises:
        DamagedTables: a pool of more pages than can be shown.
    """

    def __init__(self, geometry: PoolGeometry, pool_bytes: int) -> None:
        self.geometry = geometry
        self.pool_bytes = pool_bytes
        self.num_huge = pool_bytes // geometry.huge_page_bytes if pool_bytes >= 0 else -1
        self._huge = geometry.huge_page_bytes // ENTRY_BYTES
        largest = max(self._cap(kind) for kind in self._second)
        if self.num_huge < 0 or self.num_huge * largest > MOST_PAGES:
            raise DamagedTables(f"a pool of {pool_bytes} bytes with pages of {geometry.huge_page_bytes} bytes cannot be shown")
        self._last: tuple[bytes, Boundaries] | None = None

    def boundaries(self, owned: dict[PageKind, NDArray[np.int32]]) -> Boundaries:
        """Where pages begin and end, given the entries that each kind owns. The same object as last time if nothing was split or merged.

        Raises:
            DamagedTables: an entry lies outside of the pool, or there are too many pages.
        """
        first = np.zeros(self.num_huge, dtype=np.uint8)  # how a huge page is split: 0 not, 1 + index into _SECOND
        state = {
            kind: np.zeros((self.num_huge, self._cap(kind)), dtype=np.uint8) for kind in self._second
        }  # 0 whole, else index of `_third`
        for kind, entries in owned.items():
            layout = self.geometry.layout(kind)
            parent = layout.parent or kind
            huge, child, _ = self._place(entries, parent)
            first[huge] = 1 + _SECOND.index(parent)
            if layout.parent is not None:
                state[parent][huge, child] = 1 + self._third.index(kind)
        key = first.tobytes() + b"".join(table.tobytes() for table in state.values())
        if self._last is None or self._last[0] != key:
            self._last = (key, self._build(first, state))
        return self._last[1]

    def rows(self, kind: PageKind, entries: NDArray[np.int32], at: Boundaries) -> Longs:
        """The rows of owned pages.

        Raises:
            DamagedTables: an entry is not where a page of this kind begins.
        """
        layout = self.geometry.layout(kind)
        parent = layout.parent or kind
        huge, child, rest = self._place(entries, parent)
        rows = at.second[parent][huge, child]
        if layout.parent is not None:
            rows = rows + rest // (layout.stride_bytes // ENTRY_BYTES)
        if not np.array_equal(at.offset[np.minimum(rows, len(at.offset) - 1)], entries.astype(np.int64) * ENTRY_BYTES):
            raise DamagedTables(f"a {kind.value} page does not begin where one can")
        return rows

    def _place(self, entries: NDArray[np.int32], parent: PageKind) -> tuple[Longs, Longs, Longs]:
        """Huge page, L2 page in it, and the rest in entries."""
        if len(entries) and not (entries.min() >= 0 and int(entries.max()) < self.num_huge * self._huge):
            raise DamagedTables("a page lies outside of the pool")
        huge, rest = np.divmod(entries.astype(np.int64), self._huge)
        child, rest = np.divmod(rest, self.geometry.layout(parent).stride_bytes // ENTRY_BYTES)
        if len(child) and int(child.max()) >= self._cap(parent):
            raise DamagedTables("a page lies in the tail of another")
        return huge, child, rest

    def _cap(self, kind: PageKind) -> int:
        return self.geometry.layout(kind).per_parent

    @cached_property
    def _second(self) -> tuple[PageKind, ...]:
        return tuple(kind for kind in _SECOND if kind in self.geometry.kinds)

    @cached_property
    def _third(self) -> tuple[PageKind, ...]:
        return tuple(kind for kind in self.geometry.kinds if self.geometry.layout(kind).parent is not None)

    def _build(self, first: NDArray[np.uint8], state: dict[PageKind, NDArray[np.uint8]]) -> Boundaries:
        third = [self.geometry.layout(kind) for kind in self._third]
        counts: dict[PageKind, Longs] = {}  # rows of each L2 page
        per_huge = np.ones(self.num_huge, dtype=np.int64)
        for kind, table in state.items():
            rows_of = np.array([1, *(layout.per_parent + (layout.tail_bytes > 0) for layout in third)])
            counts[kind] = rows_of[table]
            split = first == 1 + _SECOND.index(kind)
            per_huge[split] = counts[kind][split].sum(axis=1) + (self.geometry.layout(kind).tail_bytes > 0)
        starts = np.cumsum(per_huge) - per_huge
        unused = self.pool_bytes - self.num_huge * self.geometry.huge_page_bytes
        total = int(per_huge.sum()) + (unused > 0)
        if total > MOST_PAGES:
            raise DamagedTables(f"{total} pages cannot be shown")
        offset = np.zeros(total, dtype=np.int64)
        level = np.ones(total, dtype=np.uint8)
        kinds = np.full(total, FREE, dtype=np.uint8)
        offset[starts] = np.arange(self.num_huge) * self._huge
        if unused:
            offset[-1], kinds[-1] = self.num_huge * self._huge, TAIL
        second: dict[PageKind, Longs] = {}
        for kind, table in state.items():
            layout = self.geometry.layout(kind)
            second[kind] = starts[:, None] + np.cumsum(counts[kind], axis=1) - counts[kind]
            split = np.flatnonzero(first == 1 + _SECOND.index(kind))
            rows = second[kind][split]
            bases = (split * self._huge)[:, None] + np.arange(layout.per_parent) * (layout.stride_bytes // ENTRY_BYTES)
            offset[rows], level[rows] = bases, 2
            _tail(offset, level, kinds, starts[split] + per_huge[split] - 1, split * self._huge, layout)
            for number, inner in enumerate(third):
                chosen = table[split] == 1 + number
                self._children(offset, level, kinds, rows[chosen], bases[chosen], inner)
        offset *= ENTRY_BYTES
        size = np.diff(offset, append=self.pool_bytes)
        return Boundaries(offset, size, level, kinds, second)

    def _children(
        self, offset: Longs, level: NDArray[np.uint8], kinds: NDArray[np.uint8], rows: Longs, bases: Longs, layout: PageLayout
    ) -> None:
        """The L3 pages of split L2 pages that begin at `rows` and entries `bases`."""
        children = np.arange(layout.per_parent)
        at = rows[:, None] + children
        offset[at] = bases[:, None] + children * (layout.stride_bytes // ENTRY_BYTES)
        level[at] = 3
        _tail(offset, level, kinds, rows + layout.per_parent, bases, layout)


def _tail(offset: Longs, level: NDArray[np.uint8], kinds: NDArray[np.uint8], rows: Longs, bases: Longs, layout: PageLayout) -> None:
    """What the children of split pages at entries `bases` do not cover, if anything."""
    if layout.tail_bytes:
        offset[rows] = bases + layout.per_parent * (layout.stride_bytes // ENTRY_BYTES)
        level[rows], kinds[rows] = layout.level, TAIL
