"""Split pages and the shelves they wait on: the tables under the allocator.

The state of a split page's children is one int with a bit per child, so that a page that is not split costs nothing, and taking or giving
any number of children of one parent is one operation on that int.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind

NOWHERE = -(1 << 62)
"""No entry is this."""


class Region(NamedTuple):
    """A piece of the pool for display. state is a PageKind's value, "free", "withheld", "tail" or "unused"."""

    offset_bytes: int
    length_bytes: int
    state: str


class Gain(NamedTuple):
    """What freeing some pages would give: the pages to free, and how many more pages of the wanted kind are then available."""

    pages: tuple[int, ...]
    gained: int


class Split:
    """A page that is split into children of one kind.

    Exactly one of these holds for each child: its bit is in `free`, it is in `inner` (split itself; L1 only), or it is owned.
    A withheld split lies on no shelf: nothing is taken from it.
    """

    __slots__ = ("base", "free", "index", "inner", "num_free", "parent", "shelf", "withheld")

    def __init__(self, shelf: Shelf, base: int, parent: Split | None, index: int) -> None:
        self.shelf = shelf
        self.base = base  # entry of the first child
        self.parent = parent  # the L1 split that this L2 page belongs to; None for a huge page
        self.index = index  # child number within parent, or number of the huge page
        self.free = shelf.full
        self.num_free = shelf.capacity
        self.inner: dict[int, Split] = {}
        self.withheld = False


class Buckets:
    """Splits grouped by a small number; the lowest group is found in O(1). Dicts, not sets, so that order never depends on addresses."""

    __slots__ = ("groups", "present")

    def __init__(self) -> None:
        self.groups: dict[int, dict[Split, None]] = {}
        self.present = 0  # bit n set: group n is not empty

    def add(self, number: int, split: Split) -> None:
        """Puts a split into group `number`."""
        group = self.groups.get(number)
        if group is None:
            group = self.groups[number] = {}
        if not group:
            self.present |= 1 << number
        group[split] = None

    def discard(self, number: int, split: Split) -> None:
        """Takes a split out of group `number`, if it is there."""
        group = self.groups.get(number)
        if group is not None and split in group:
            del group[split]
            if not group:
                self.present ^= 1 << number

    def lowest(self) -> Split | None:
        """The split added last to the lowest group. Taking it out and putting it back keeps this O(1) after many deletions."""
        present = self.present
        if not present:
            return None
        return self._newest((present & -present).bit_length() - 1)

    def highest(self) -> Split | None:
        """The split added last to the highest group."""
        return self._newest(self.present.bit_length() - 1) if self.present else None

    def _newest(self, number: int) -> Split:
        group = self.groups[number]
        split, _ = group.popitem()
        group[split] = None
        return split


class Shelf:
    """All splits into one kind of child, and how children lie in them."""

    __slots__ = ("capacity", "evictable", "full", "kind", "mixed", "num_free", "num_owned", "parent", "partial", "run_indexes", "stride")

    def __init__(self, kind: PageKind, capacity: int, stride: int, parent: Shelf | None) -> None:
        self.kind = kind
        self.capacity = capacity  # children per parent
        self.stride = stride  # entries from child to child
        self.full = (1 << capacity) - 1
        self.parent = parent  # shelf whose children are split to make ours; None where huge pages are
        self.partial = Buckets()  # splits with free children, by their number
        self.num_free = 0  # free children in all of them
        self.num_owned = 0
        self.run_indexes: dict[int, Buckets] = {}  # run length -> the partial splits that have such a run, by free children
        # L1 splits only: those with owned children, by their number if no child is split further, else apart.
        self.evictable = Buckets()
        self.mixed: dict[Split, None] = {}

    def put(self, split: Split) -> None:
        """Files a split under its present state."""
        num_free = split.num_free
        if num_free:
            self.partial.add(num_free, split)
            if self.run_indexes:
                for length, index in self.run_indexes.items():
                    if run_starts(split.free, length):
                        index.add(num_free, split)
        if self.parent is None:
            num_owned = self.capacity - num_free - len(split.inner)
            if num_owned:
                if split.inner:
                    self.mixed[split] = None
                else:
                    self.evictable.add(num_owned, split)

    def take_out(self, split: Split) -> None:
        """Reverses `put`; called before the split's state changes."""
        num_free = split.num_free
        if num_free:
            self.partial.discard(num_free, split)
            if self.run_indexes:
                for index in self.run_indexes.values():
                    index.discard(num_free, split)
        if self.parent is None:
            if split.inner:
                self.mixed.pop(split, None)
            else:
                self.evictable.discard(self.capacity - num_free, split)


class PassedOver:
    """A context in which a split that is on its shelf gives nothing."""

    __slots__ = ("_split",)

    def __init__(self, split: Split) -> None:
        self._split = split

    def __enter__(self) -> None:
        split = self._split
        split.shelf.take_out(split)
        split.shelf.num_free -= split.num_free

    def __exit__(self, *exc_info: object) -> None:
        split = self._split
        split.shelf.num_free += split.num_free
        split.shelf.put(split)


def owned_children(split: Split) -> int:
    """Children that are neither free nor split, as bits."""
    mask = split.shelf.full ^ split.free
    for child in split.inner:
        mask ^= 1 << child
    return mask


def child_entries(split: Split, mask: int) -> Iterator[int]:
    """Entries of the children whose bits are set, ascending."""
    while mask:
        bit = mask & -mask
        yield split.base + (bit.bit_length() - 1) * split.shelf.stride
        mask ^= bit


def regions_of(split: Split, span_entries: int) -> Iterator[Region]:
    """Regions of one split page that spans so many entries."""
    shelf = split.shelf
    for child in range(shelf.capacity):
        inner = split.inner.get(child)
        if inner is not None:
            yield from regions_of(inner, shelf.stride)
        else:
            unowned = "withheld" if split.withheld else "free"
            state = unowned if split.free >> child & 1 else shelf.kind.value
            yield Region((split.base + child * shelf.stride) * ENTRY_BYTES, shelf.stride * ENTRY_BYTES, state)
    tail = span_entries - shelf.capacity * shelf.stride
    if tail:
        yield Region((split.base + shelf.capacity * shelf.stride) * ENTRY_BYTES, tail * ENTRY_BYTES, "tail")


def lowest_bits(mask: int, count: int) -> int:
    """The lowest `count` set bits of mask, which has more than that many."""
    stretch = (mask & -mask) * ((1 << count) - 1)
    if mask & stretch == stretch:
        return stretch
    rest = mask
    for _ in range(count):
        rest &= rest - 1
    return mask ^ rest


def run_starts(mask: int, length: int) -> int:
    """Bit i is set where bits i to i + length - 1 of mask all are."""
    covered = 1
    while covered < length:
        step = min(covered, length - covered)
        mask &= mask >> step
        covered += step
    return mask


def disjoint_runs(mask: int, length: int, limit: int) -> list[int]:
    """Starts of as many disjoint runs of set bits as there are, up to limit, lowest first (which wastes none)."""
    starts: list[int] = []
    while len(starts) < limit and (candidates := run_starts(mask, length)):
        start = (candidates & -candidates).bit_length() - 1
        starts.append(start)
        mask = mask >> (start + length) << (start + length)
    return starts
