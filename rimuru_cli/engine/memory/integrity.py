"""The allocator's invariants, checked by walking every table. O(pool): for tests and debugging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind
from rimuru_cli.engine.memory.splits import Buckets, Shelf, Split, disjoint_runs, owned_children

if TYPE_CHECKING:
    from rimuru_cli.engine.memory.allocator import PageAllocator


class IntegrityError(AssertionError):
    """An invariant of the pool is broken: a double free, a page nobody owns, or tables that disagree."""


def check_tables(
    allocator: PageAllocator,
    free_huge: Sequence[int],
    withheld: Set[int],
    split_huge: Mapping[int, Split],
    shelves: Mapping[PageKind, Shelf],
) -> None:
    """No byte has two owners, free + withheld + owned + tails + unused = pool, and counts and shelves equal the tables.

    Args:
        allocator: for its public counters and its regions.
        free_huge: numbers of the free huge pages.
        withheld: numbers of the withheld ones, split or not.
        split_huge: the split ones, by number.
        shelves: one per kind.

    Raises:
        IntegrityError: with the first disagreement found.
    """
    whole = [*free_huge, *(withheld - split_huge.keys())]
    _require(sorted([*whole, *split_huge]) == list(range(allocator.num_huge_pages)), "each huge page is free, withheld or split")
    huge_entries = allocator.geometry.huge_page_bytes // ENTRY_BYTES
    for number, l1 in split_huge.items():
        place = (l1.index == number, l1.parent is None, l1.base == number * huge_entries, l1.shelf.parent is None)
        _require(all(place), f"huge page {number} knows its place")
    splits = [split for l1 in split_huge.values() for split in (l1, *l1.inner.values())]
    for split in splits:
        _check_split(split)
        _require(split.withheld == (split.base // huge_entries in withheld), f"the split at {split.base} knows whether it is withheld")
    for shelf in shelves.values():
        _check_shelf(shelf, [split for split in splits if split.shelf is shelf])
    _check_bytes(allocator)


def _check_split(split: Split) -> None:
    shelf = split.shelf
    inner = sum(1 << child for child in split.inner)
    _require(
        split.free | inner | shelf.full == shelf.full and not split.free & inner, f"children of the split at {split.base} are disjoint"
    )
    _require(split.num_free == split.free.bit_count(), f"free children of the split at {split.base} are counted right")
    _require(split.free != shelf.full, f"the split at {split.base} is in use, else it had been merged")
    for child, below in split.inner.items():
        place = (below.parent is split, below.index == child, below.base == split.base + child * shelf.stride)
        _require(all(place) and not below.inner and below.shelf.parent is shelf, f"the split at {below.base} knows its place")


def _check_shelf(shelf: Shelf, splits: list[Split]) -> None:
    name = shelf.kind.value
    _require(shelf.num_owned == sum(owned_children(split).bit_count() for split in splits), f"owned {name} pages are counted right")
    splits = [split for split in splits if not split.withheld]
    _require(shelf.num_free == sum(split.num_free for split in splits), f"free {name} pages are counted right")
    _check_buckets(shelf.partial, {split: split.num_free for split in splits if split.num_free})
    for length, index in shelf.run_indexes.items():
        _check_buckets(index, {split: split.num_free for split in splits if disjoint_runs(split.free, length, 1)})
    holding = {split: owned_children(split).bit_count() for split in splits if shelf.parent is None and owned_children(split)}
    _check_buckets(shelf.evictable, {split: number for split, number in holding.items() if not split.inner})
    _require(shelf.mixed.keys() == {split for split in holding if split.inner}, f"huge pages that hold not only {name} pages are known")


def _check_buckets(buckets: Buckets, expected: Mapping[Split, int]) -> None:
    found = {split: number for number, group in buckets.groups.items() for split in group}
    _require(found == expected, "each split lies in the bucket of its state")
    _require(sum(len(group) for group in buckets.groups.values()) == len(found), "no split lies in two buckets")
    _require(buckets.present == sum(1 << number for number, group in buckets.groups.items() if group), "the buckets in use are marked")


def _check_bytes(allocator: PageAllocator) -> None:
    position = 0
    totals: dict[str, int] = {}
    for offset, length, state in allocator.regions():
        _require(offset == position and length > 0, f"regions are disjoint and leave no gap at byte {position}")
        position += length
        totals[state] = totals.get(state, 0) + length
    _require(position == allocator.pool_bytes, "the regions cover the pool")
    expected = {kind.value: num_bytes for kind, num_bytes in allocator.bytes_by_kind().items()}
    expected |= {"free": allocator.free_bytes, "withheld": allocator.withheld_bytes}
    expected |= {"tail": allocator.tail_bytes, "unused": allocator.unused_bytes}
    for state, num_bytes in expected.items():
        _require(totals.get(state, 0) == num_bytes, f"{state} bytes are counted right")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise IntegrityError(f"The pool is broken: it does not hold that {what}.")


def with_stretch(split: Split, owned: int, mask: int, child: int, length: int) -> int:
    """`mask` with so many children from `child` on, all of them owned and none in it yet."""
    bits = ((1 << length) - 1) << child
    wrong = bits & (mask | ~owned)
    if wrong:
        page = split.base + ((wrong & -wrong).bit_length() - 1) * split.shelf.stride
        raise IntegrityError(f"page {page} was freed twice or is not the start of an owned page")
    return mask | bits
