"""Who owns which bytes of the pool: pages of four kinds, split and merged over three levels.

    L1 huge page ── splits into ── L2 expert pages ── split into ── L3 KV pages
                             or in L2 SSM pages                  or in L3 conv pages

A page is its entry, an int: byte offset from the pool base / 256. Only split pages have an object; the state of its children is one int
with a bit per child (`splits.py`). Splits with room wait on a shelf, ordered by how many free children they have; each operation costs
O(pages touched), none scans the pool. Pure Python, no torch, and not thread-safe: the engine's step is the only caller.

Huge pages can be withheld: nothing is allocated in them any more, and what is freed in them stays withheld, so that once their owners have
left, the memory behind them can be given back. Withheld bytes are neither free nor available.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from heapq import heapify, heappop, heappush

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.memory.integrity import IntegrityError, check_tables, with_stretch
from rimuru_cli.engine.memory.splits import (
    NOWHERE,
    Buckets,
    Gain,
    PassedOver,
    Region,
    Shelf,
    Split,
    child_entries,
    disjoint_runs,
    lowest_bits,
    owned_children,
    regions_of,
    run_starts,
)
from rimuru_models.errors import UsageError

MAX_POOL_BYTES = ENTRY_BYTES << 31
"""Beyond this an entry no longer fits an int32."""


class OutOfPages(Exception):
    """The pool cannot give what was asked for; nothing was allocated.

    Attributes:
        kind: what was asked for.
        wanted: pages asked for (runs, for `allocate_runs`).
        available: pages (runs) that could have been given.
    """

    def __init__(self, kind: PageKind, wanted: int, available: int, unit: str = "pages") -> None:
        super().__init__(f"{wanted} {kind.value} {unit} wanted, {available} available")
        self.kind = kind
        self.wanted = wanted
        self.available = available


class PageAllocator:
    """Pages of a pool of bytes; see the module's text.

    Args:
        geometry: page sizes.
        pool_bytes: size of the pool. What is left after the last whole huge page is reported as `unused_bytes`.

    Raises:
        UsageError: the pool is larger than entries can address.
    """

    def __init__(self, geometry: PoolGeometry, pool_bytes: int) -> None:
        if not 0 <= pool_bytes <= MAX_POOL_BYTES:
            raise UsageError(
                f"The pool must have between 0 and {MAX_POOL_BYTES} bytes, not {pool_bytes}.", hint="Lower the memory ceiling."
            )
        self.geometry = geometry
        self.pool_bytes = pool_bytes
        self.num_huge_pages = pool_bytes // geometry.huge_page_bytes
        self.splits = 0
        self.merges = 0
        self._huge_entries = geometry.huge_page_bytes // ENTRY_BYTES
        self._free_huge = list(range(self.num_huge_pages))  # a heap; sorted already
        self._split_huge: dict[int, Split] = {}
        self._withheld: set[int] = set()  # numbers of huge pages
        self._withheld_entries = 0  # entries in them that nobody owns, tails of split pages not counted
        self._shelves: dict[PageKind, Shelf] = {}
        for layout in geometry.layouts:
            parent = None if layout.parent is None else self._shelves[layout.parent]
            self._shelves[layout.kind] = Shelf(layout.kind, layout.per_parent, layout.stride_bytes // ENTRY_BYTES, parent)

    # ---- allocating ----------------------------------------------------------------------------------------------------------------

    def allocate(self, kind: PageKind, count: int) -> list[int]:
        """Takes `count` pages, from the fullest split pages first; pages from one parent are returned together, in ascending order.

        Raises:
            OutOfPages: fewer than `count` are available; nothing has changed.
        """
        if count > (available := self.available(kind)):
            raise OutOfPages(kind, count, available)
        assert count >= 0, f"cannot allocate {count} pages"
        pages: list[int] = []
        if count:
            shelf = self._shelves[kind]
            shelf.num_owned += count
            stride = shelf.stride
            while count:
                split = shelf.partial.lowest()
                if split is None:
                    split = self._open(shelf)
                mask = split.free
                if count < split.num_free:
                    mask = lowest_bits(mask, count)
                count -= self._take(split, mask)
                base = split.base
                while mask:
                    # One stretch of neighbouring children at a time.
                    start = (mask & -mask).bit_length() - 1
                    stretch = mask >> start
                    length = (~stretch & (stretch + 1)).bit_length() - 1
                    first = base + start * stride
                    if length == 1:
                        pages.append(first)
                    else:
                        pages.extend(range(first, first + length * stride, stride))
                    mask = (stretch >> length) << (start + length)
        return pages

    def allocate_runs(self, kind: PageKind, runs: int, run_length: int) -> list[list[int]]:
        """Takes `runs` times `run_length` pages; those of one run follow each other within one parent. Fullest parents first.

        The first call with a new run_length visits all split pages of the kind once, to index them; later calls do not.

        Raises:
            OutOfPages: fewer runs are available; nothing has changed.
            ValueError: a parent has fewer than run_length pages.
        """
        assert runs >= 0 and run_length >= 1, f"cannot allocate {runs} runs of {run_length} pages"
        shelf = self._shelves.get(kind)
        if shelf is None:
            if runs:
                raise OutOfPages(kind, runs, 0, "runs")
            return []
        if run_length > shelf.capacity:
            raise ValueError(f"A run of {run_length} {kind.value} pages is longer than the {shelf.capacity} pages of a parent.")
        index = self._run_index(shelf, run_length)
        plan: list[tuple[Split, list[int]]] = []  # split, first child of each run
        missing = runs
        while missing and (split := index.lowest()) is not None:
            starts = disjoint_runs(split.free, run_length, missing)
            plan.append((split, starts))
            missing -= len(starts)
            index.discard(split.num_free, split)
        per_parent = shelf.capacity // run_length
        openable = self._openable(shelf)
        if missing > openable * per_parent:
            for split, _ in plan:
                index.add(split.num_free, split)
            raise OutOfPages(kind, runs, runs - missing + openable * per_parent, "runs")
        while missing:
            starts = list(range(0, min(missing, per_parent) * run_length, run_length))
            plan.append((self._open(shelf), starts))
            missing -= len(starts)

        run = (1 << run_length) - 1
        stride = shelf.stride
        shelf.num_owned += runs * run_length
        out: list[list[int]] = []
        for split, starts in plan:
            mask = 0
            for start in starts:
                mask |= run << start
                first = split.base + start * stride
                out.append(list(range(first, first + run_length * stride, stride)))
            self._take(split, mask)
        return out

    def _open(self, shelf: Shelf) -> Split:
        """Splits one free parent page into the shelf's children. The caller takes from it at once."""
        if shelf.parent is None:
            number = heappop(self._free_huge)
            split = Split(shelf, number * self._huge_entries, None, number)
            self._split_huge[number] = split
        else:
            parent = shelf.parent.partial.lowest() or self._open(shelf.parent)
            child = parent.free & -parent.free
            index = child.bit_length() - 1
            split = Split(shelf, parent.base + index * shelf.parent.stride, parent, index)
            self._take(parent, child, split)
        shelf.num_free += shelf.capacity
        self.splits += 1
        return split

    def _take(self, split: Split, mask: int, inner: Split | None = None) -> int:
        """Marks free children as owned, or one child as split into `inner`; returns how many."""
        shelf = split.shelf
        shelf.take_out(split)
        count = mask.bit_count()
        split.free ^= mask
        split.num_free -= count
        shelf.num_free -= count
        if inner is not None:
            split.inner[inner.index] = inner
        shelf.put(split)
        return count

    # ---- freeing -------------------------------------------------------------------------------------------------------------------

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back and merges what has become whole.

        Raises:
            IntegrityError: a page is not owned or is given twice; nothing has changed.
        """
        masks: dict[Split, int] = {}
        split: Split | None = None
        low = high = stride = owned = mask = child = 0
        length, following = 0, NOWHERE  # of a stretch of neighbouring children that begins with `child`
        for page in pages:
            if page == following:
                length += 1
                following = page + stride if page + stride < high else NOWHERE
                continue
            if split is not None:
                mask = masks[split] = with_stretch(split, owned, mask, child, length)
            if not low <= page < high:
                split = self._split_of(page)
                stride = split.shelf.stride
                low = split.base
                # The children of an L1 split may be split themselves, so only those of an L2 split are taken for granted.
                high = low + split.shelf.capacity * stride if split.parent is not None else 0
                owned = split.shelf.full ^ split.free
                mask = masks.get(split, 0)
            child, rest = divmod(page - low, stride)
            if rest:
                raise IntegrityError(f"page {page} is not the start of an owned page")
            length = 1
            following = page + stride if page + stride < high else NOWHERE
        if split is not None:
            masks[split] = with_stretch(split, owned, mask, child, length)
        for touched, mask in masks.items():
            touched.shelf.num_owned -= mask.bit_count()
            self._give(touched, mask)

    def _split_of(self, page: int) -> Split:
        """The split that a page is a child of, if it were owned."""
        number, rest = divmod(page, self._huge_entries)
        split = self._split_huge.get(number)
        if split is None:
            raise IntegrityError(f"page {page} is not owned: its huge page is free or outside the pool")
        child = rest // split.shelf.stride
        return split.inner.get(child, split)

    def _give(self, split: Split, mask: int, was_split: bool = False) -> None:
        """Marks children (owned, or split and whole again) as free, and merges upwards."""
        shelf = split.shelf
        withheld = split.withheld
        count = mask.bit_count()
        if withheld:
            self._withheld_entries += count * shelf.stride
        else:
            shelf.take_out(split)
            shelf.num_free += count
        split.free |= mask
        split.num_free += count
        if was_split:
            del split.inner[mask.bit_length() - 1]
        if split.num_free < shelf.capacity:
            if not withheld:
                shelf.put(split)
            return
        if withheld:
            self._withheld_entries -= shelf.capacity * shelf.stride
        else:
            shelf.num_free -= shelf.capacity
        self.merges += 1
        if split.parent is not None:
            self._give(split.parent, 1 << split.index, was_split=True)
            return
        del self._split_huge[split.index]
        if withheld:
            self._withheld_entries += self._huge_entries
        else:
            heappush(self._free_huge, split.index)

    # ---- withholding ---------------------------------------------------------------------------------------------------------------

    def withhold(self, numbers: Iterable[int]) -> None:
        """Allocate nothing more in these huge pages; pages owned there stay owned. Numbers already withheld change nothing. O(pool)."""
        new = set(numbers) - self._withheld
        assert all(0 <= number < self.num_huge_pages for number in new), "only huge pages of the pool can be withheld"
        self._withheld |= new
        self._free_huge = [number for number in self._free_huge if number not in new]
        heapify(self._free_huge)
        self._withheld_entries += self._huge_entries * sum(1 for number in new if number not in self._split_huge)
        for split in self._splits_in(new):
            split.shelf.take_out(split)
            split.shelf.num_free -= split.num_free
            self._withheld_entries += split.num_free * split.shelf.stride
            split.withheld = True

    def release(self, numbers: Iterable[int]) -> None:
        """Reverses `withhold`; numbers that are not withheld change nothing. O(pool)."""
        back = set(numbers) & self._withheld
        self._withheld -= back
        self._free_huge += [number for number in back if number not in self._split_huge]
        heapify(self._free_huge)
        self._withheld_entries -= self._huge_entries * sum(1 for number in back if number not in self._split_huge)
        for split in self._splits_in(back):
            split.withheld = False
            self._withheld_entries -= split.num_free * split.shelf.stride
            split.shelf.num_free += split.num_free
            split.shelf.put(split)

    def _splits_in(self, numbers: set[int]) -> Iterator[Split]:
        # Most of what is withheld is the part of the reserve that never had memory: tens of thousands of pages, none of them split.
        for number in sorted(self._split_huge.keys() & numbers):
            split = self._split_huge[number]
            yield split
            yield from split.inner.values()

    def held_in_withheld(self, kind: PageKind) -> list[int]:
        """Owned pages of a kind that lie in withheld huge pages, ascending."""
        return [
            page
            for split in self._splits_in(self._withheld)
            if split.shelf.kind is kind
            for page in child_entries(split, owned_children(split))
        ]

    def count_in_withheld(self, kind: PageKind) -> int:
        """How many they are."""
        splits = self._splits_in(self._withheld)
        return sum(owned_children(split).bit_count() for split in splits if split.shelf.kind is kind)

    def gaps(self, kind: PageKind) -> int:
        """Free pages of a kind in parents that are split already."""
        shelf = self._shelves.get(kind)
        return 0 if shelf is None else shelf.num_free

    def free_runs(self, kind: PageKind, run_length: int) -> int:
        """Runs of so many free pages in parents that are split already. O(such parents)."""
        shelf = self._shelves.get(kind)
        if shelf is None or run_length > shelf.capacity:
            return 0
        groups = self._run_index(shelf, run_length).groups.values()
        return sum(len(disjoint_runs(split.free, run_length, shelf.capacity)) for group in groups for split in group)

    @property
    def free_huge_pages(self) -> int:
        """Huge pages that are whole and free."""
        return len(self._free_huge)

    def emptiest(self, kind: PageKind, spared: Container[int] = ()) -> tuple[int, int] | None:
        """Of the huge pages split into pages of a kind that have free ones: the one with the fewest others, if those fit elsewhere.

        Returns:
            Its number and how many others it has; None where there is none. `spared` are numbers that do not count. O(split huge pages).
        """
        shelf = self._shelves[kind]
        best: tuple[int, int] | None = None
        for number, split in self._split_huge.items():
            used = shelf.capacity - split.num_free
            fits = split.shelf is shelf and split.num_free and not split.withheld and number not in spared
            if fits and used <= shelf.num_free - split.num_free and (best is None or used < best[1]):
                best = number, used
        return best

    def huge_page_of(self, page: int) -> int:
        """Number of the huge page in which an entry lies."""
        return page // self._huge_entries

    def sparsest(self, kind: PageKind) -> list[int]:
        """Owned pages of the parent that holds the fewest pages of a kind, among those with room for more; empty if there is none."""
        shelf = self._shelves.get(kind)
        split = None if shelf is None else shelf.partial.highest()
        return [] if split is None else list(child_entries(split, owned_children(split)))

    def passing_over(self, page: int) -> PassedOver:
        """A context in which nothing is taken from the split page that an owned page lies in; nothing may be freed there meanwhile."""
        return PassedOver(self._split_of(page))

    # ---- asking --------------------------------------------------------------------------------------------------------------------

    def available(self, kind: PageKind) -> int:
        """Exactly how many pages `allocate` could give now, splitting included. O(1)."""
        shelf = self._shelves.get(kind)
        return 0 if shelf is None else shelf.num_free + self._openable(shelf) * shelf.capacity

    def _openable(self, shelf: Shelf) -> int:
        """Free pages that could be split into the shelf's children."""
        parent = shelf.parent  # whose own parents, if it has any, are huge pages
        return len(self._free_huge) if parent is None else parent.num_free + len(self._free_huge) * parent.capacity

    def largest_gain(self, kind: PageKind, evictable: PageKind = PageKind.EXPERT) -> Gain | None:
        """The fewest `evictable` pages whose freeing makes more pages of `kind` available, or None if no such set lies in one huge page.

        Where `kind` is made from pages of the evictable size, that is one page. Otherwise a whole huge page must become free: of those
        that hold nothing but evictable pages it is the one that holds the fewest. O(pages returned).

        Args:
            kind: what is wanted.
            evictable: EXPERT or SSM.
        """
        assert evictable in (PageKind.EXPERT, PageKind.SSM), f"{evictable.value} pages are freed by sequence, not evicted"
        shelf = self._shelves.get(evictable)
        wanted = self._shelves.get(kind)
        if shelf is None or wanted is None:
            return None
        split = shelf.evictable.lowest()
        if wanted is shelf or wanted.parent is shelf:
            if split is None and shelf.mixed:
                split, _ = shelf.mixed.popitem()
                shelf.mixed[split] = None
            if split is None:
                return None
            page = next(child_entries(split, owned_children(split)))
            return Gain((page,), 1 if wanted is shelf else wanted.capacity)
        if split is None:
            return None
        return Gain(tuple(child_entries(split, owned_children(split))), self.geometry.pages_per_huge(kind))

    def owned(self, kind: PageKind) -> int:
        """Pages of a kind that are allocated."""
        shelf = self._shelves.get(kind)
        return 0 if shelf is None else shelf.num_owned

    def owner_of(self, entry: int) -> PageKind | None:
        """Kind of the owned page that starts at this entry, or None."""
        split = self._split_huge.get(entry // self._huge_entries)
        if split is None:
            return None
        split = split.inner.get((entry - split.base) // split.shelf.stride, split)
        child, rest = divmod(entry - split.base, split.shelf.stride)
        return split.shelf.kind if not rest and owned_children(split) >> child & 1 else None

    def owned_pages(self, kind: PageKind) -> Iterator[int]:
        """All owned pages of a kind, ascending. O(split pages)."""
        for _, l1 in sorted(self._split_huge.items()):
            for split in (l1, *(l1.inner[child] for child in sorted(l1.inner))):
                if split.shelf.kind is kind:
                    yield from child_entries(split, owned_children(split))

    def bytes_by_kind(self) -> dict[PageKind, int]:
        """Bytes owned by each kind the pool can hold, rounding to entries included."""
        return {kind: shelf.num_owned * shelf.stride * ENTRY_BYTES for kind, shelf in self._shelves.items()}

    @property
    def free_bytes(self) -> int:
        """Bytes of all free pages of all levels."""
        entries = len(self._free_huge) * self._huge_entries + sum(shelf.num_free * shelf.stride for shelf in self._shelves.values())
        return entries * ENTRY_BYTES

    @property
    def withheld_bytes(self) -> int:
        """Bytes in withheld huge pages that nobody owns."""
        return self._withheld_entries * ENTRY_BYTES

    @property
    def tail_bytes(self) -> int:
        """Bytes that the present splits leave uncovered."""
        return self.pool_bytes - self.unused_bytes - self.free_bytes - self.withheld_bytes - sum(self.bytes_by_kind().values())

    @property
    def unused_bytes(self) -> int:
        """Bytes after the last whole huge page."""
        return self.pool_bytes - self.num_huge_pages * self.geometry.huge_page_bytes

    def regions(self) -> Iterator[Region]:
        """The whole pool in address order, at the finest present split. O(pool): for a map on the screen."""
        for number in range(self.num_huge_pages):
            split = self._split_huge.get(number)
            if split is None:
                state = "withheld" if number in self._withheld else "free"
                yield Region(number * self.geometry.huge_page_bytes, self.geometry.huge_page_bytes, state)
            else:
                yield from regions_of(split, self._huge_entries)
        if self.unused_bytes:
            yield Region(self.pool_bytes - self.unused_bytes, self.unused_bytes, "unused")

    def check_integrity(self) -> None:
        """Walks everything: no byte has two owners, free + withheld + owned + tails + unused = pool, counts equal the tables. O(pool).

        Raises:
            IntegrityError: with the first disagreement found.
        """
        check_tables(self, self._free_huge, self._withheld, self._split_huge, self._shelves)

    def _run_index(self, shelf: Shelf, run_length: int) -> Buckets:
        index = shelf.run_indexes.get(run_length)
        if index is None:
            index = shelf.run_indexes[run_length] = Buckets()
            for num_free, group in shelf.partial.groups.items():
                for split in group:
                    if run_starts(split.free, run_length):
                        index.add(num_free, split)
        return index
