"""The allocator's contract, case by case. Entries are units of 256 bytes."""

from __future__ import annotations

import pytest

from rimuru_cli.engine.memory.allocator import MAX_POOL_BYTES, Gain, IntegrityError, OutOfPages, PageAllocator
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_models.errors import UsageError

EXPERT, SSM, KV, CONV = PageKind.EXPERT, PageKind.SSM, PageKind.KV, PageKind.CONV
E = ENTRY_BYTES

PLAIN = PoolGeometry.from_bytes(8 * E, E)  # a huge page is an expert page of 8 KV pages
HYBRID = PoolGeometry.from_bytes(12 * E, 2 * E, 8 * E, E)  # 24 entries: 2 experts or 3 states; an expert page: 6 KV or 12 conv pages


def make(geometry: PoolGeometry, num_huge: int, extra_bytes: int = 0) -> PageAllocator:
    return PageAllocator(geometry, num_huge * geometry.huge_page_bytes + extra_bytes)


def test_empty_pool_is_all_free() -> None:
    allocator = make(HYBRID, 3, extra_bytes=100)
    assert (allocator.num_huge_pages, allocator.unused_bytes) == (3, 100)
    assert [allocator.available(kind) for kind in PageKind] == [6, 9, 36, 72]
    assert allocator.free_bytes == 3 * HYBRID.huge_page_bytes
    assert allocator.bytes_by_kind() == dict.fromkeys((EXPERT, SSM, KV, CONV), 0)
    assert [region.state for region in allocator.regions()] == ["free", "free", "free", "unused"]
    allocator.check_integrity()


@pytest.mark.parametrize("pool_bytes", [0, HYBRID.huge_page_bytes - 1])
def test_pool_too_small_for_a_page_gives_none(pool_bytes: int) -> None:
    allocator = PageAllocator(HYBRID, pool_bytes)
    assert allocator.unused_bytes == pool_bytes
    assert all(allocator.available(kind) == 0 for kind in PageKind)
    with pytest.raises(OutOfPages):
        allocator.allocate(EXPERT, 1)
    assert allocator.allocate(EXPERT, 0) == []
    allocator.check_integrity()


def test_pool_beyond_int32_entries_is_refused() -> None:
    big = PoolGeometry.from_bytes(1 << 24, 1 << 20)
    last = PageAllocator(big, MAX_POOL_BYTES)
    assert max(last.allocate(KV, last.available(KV) // 4)) < 2**31
    with pytest.raises(UsageError, match="bytes"):
        PageAllocator(big, MAX_POOL_BYTES + 1)


@pytest.mark.parametrize("kind", list(PageKind))
def test_available_is_exact(kind: PageKind) -> None:
    allocator = make(HYBRID, 4)
    allocator.allocate(KV, 5)
    allocator.allocate(SSM, 2)
    available = allocator.available(kind)
    with pytest.raises(OutOfPages) as caught:
        allocator.allocate(kind, available + 1)
    assert (caught.value.kind, caught.value.wanted, caught.value.available) == (kind, available + 1, available)
    assert len(set(allocator.allocate(kind, available))) == available
    assert allocator.available(kind) == 0
    allocator.check_integrity()


def test_kinds_the_geometry_lacks() -> None:
    allocator = make(PLAIN, 2)
    assert allocator.available(SSM) == allocator.owned(CONV) == 0
    assert allocator.allocate_runs(CONV, 0, 3) == []
    for attempt in (lambda: allocator.allocate(SSM, 1), lambda: allocator.allocate_runs(CONV, 1, 3)):
        with pytest.raises(OutOfPages):
            attempt()
    assert allocator.largest_gain(SSM) is None


def test_failure_changes_nothing() -> None:
    allocator = make(HYBRID, 2)
    allocator.allocate(KV, 7)
    before = (list(allocator.regions()), allocator.splits, allocator.merges)
    with pytest.raises(OutOfPages):
        allocator.allocate(EXPERT, 3)
    with pytest.raises(OutOfPages):
        allocator.allocate_runs(CONV, 9, 3)
    assert (list(allocator.regions()), allocator.splits, allocator.merges) == before
    allocator.check_integrity()


def test_pages_taken_together_lie_together() -> None:
    allocator = PageAllocator(PoolGeometry.from_bytes(3 << 20, 1 << 15), 4 * (3 << 20))  # 96 KV pages in an expert page
    block = allocator.allocate(KV, 48)
    assert block == list(range(block[0], block[0] + 48 * 128, 128))
    second = allocator.allocate(KV, 48)
    assert second[0] == block[-1] + 128
    assert allocator.splits == 2, "one huge page and one expert page were split"


def test_splits_level_by_level() -> None:
    allocator = make(HYBRID, 2)
    allocator.allocate(KV, 1)
    assert allocator.splits == 2
    states = [region.state for region in allocator.regions()]
    assert states == ["kv", *["free"] * 5, "free", "free"], "6 KV pages, the other expert page whole, the other huge page whole"
    allocator.allocate(KV, 6)
    assert allocator.splits == 3, "the second expert page of the same huge page was split"
    assert allocator.available(SSM) == 3


def test_fullest_parent_first() -> None:
    allocator = make(PLAIN, 4)
    pages = allocator.allocate(KV, 24)
    first, second, third = pages[:8], pages[8:16], pages[16:]
    allocator.free([*first[:5], *second[2:4], *third[1:4]])
    assert sorted(allocator.allocate(KV, 1)) == second[2:3]
    assert sorted(allocator.allocate(KV, 5)) == sorted([second[3], *third[1:4], first[0]])
    assert allocator.available(EXPERT) == 1, "the untouched huge page stayed whole"


def test_fullest_huge_page_first() -> None:
    allocator = make(HYBRID, 3)
    states = allocator.allocate(SSM, 9)
    allocator.free([states[0], states[1], states[5]])
    assert allocator.allocate(SSM, 1) == [states[5]]


def test_lowest_free_huge_page_first() -> None:
    allocator = make(PLAIN, 5)
    pages = allocator.allocate(EXPERT, 5)
    assert pages == [0, 8, 16, 24, 32]
    for page in (24, 8, 16, 0):
        allocator.free([page])
    assert allocator.allocate(EXPERT, 4) == [0, 8, 16, 24]


def test_merge_makes_the_bytes_good_for_any_kind() -> None:
    allocator = make(HYBRID, 1)
    for kind in (EXPERT, KV, SSM, CONV, KV, EXPERT):
        pages = allocator.allocate(kind, allocator.available(kind))
        assert len(pages) == HYBRID.pages_per_huge(kind)
        assert pages[0] == 0 and allocator.owner_of(0) is kind
        assert all(allocator.available(other) == 0 for other in PageKind)
        allocator.free(reversed(pages))
        assert allocator.free_bytes == HYBRID.huge_page_bytes
        allocator.check_integrity()
    assert allocator.splits == allocator.merges


def test_partial_free_merges_only_what_is_whole() -> None:
    allocator = make(HYBRID, 1)
    pages = allocator.allocate(KV, 12)
    allocator.free(pages[:6])
    assert (allocator.merges, allocator.available(EXPERT), allocator.available(SSM)) == (1, 1, 0)
    allocator.free(pages[6:])
    assert (allocator.merges, allocator.available(EXPERT), allocator.available(SSM)) == (3, 2, 3)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda pages: [*pages, pages[0]], id="twice in one call"),
        pytest.param(lambda pages: [*pages[:3], pages[4] + 1], id="middle of a page"),
        pytest.param(lambda pages: [*pages, -1], id="absent"),
        pytest.param(lambda pages: [*pages, 24], id="free huge page"),
        pytest.param(lambda pages: [*pages, 12], id="free sibling"),
        pytest.param(lambda pages: [*pages, 10], id="free page of the same parent"),
        pytest.param(lambda pages: [*pages, 10_000], id="outside the pool"),
    ],
)
def test_bad_free_changes_nothing(bad) -> None:  # type: ignore[no-untyped-def]
    allocator = make(HYBRID, 2)
    pages = allocator.allocate(KV, 5)
    before = list(allocator.regions())
    with pytest.raises(IntegrityError, match="page"):
        allocator.free(bad(pages))
    assert list(allocator.regions()) == before
    allocator.free(pages)
    with pytest.raises(IntegrityError):
        allocator.free(pages[:1])
    allocator.check_integrity()


def test_tails_belong_to_nobody() -> None:
    geometry = PoolGeometry.from_bytes(11 * E, 3 * E)
    allocator = make(geometry, 1)
    pages = allocator.allocate(KV, 3)
    assert [tuple(region) for region in allocator.regions()][-1] == (9 * E, 2 * E, "tail")
    assert (allocator.tail_bytes, allocator.free_bytes) == (2 * E, 0)
    assert allocator.owner_of(9) is None
    with pytest.raises(IntegrityError):
        allocator.free([9])
    allocator.free(pages)
    assert (allocator.tail_bytes, allocator.free_bytes) == (0, 11 * E)


def test_owner_of_and_owned_pages() -> None:
    allocator = make(HYBRID, 3)
    states, experts, blocks = allocator.allocate(SSM, 1), allocator.allocate(EXPERT, 1), allocator.allocate(KV, 2)
    assert [allocator.owner_of(page) for page in (*states, *experts, *blocks)] == [SSM, EXPERT, KV, KV]
    assert allocator.owner_of(experts[0] + 1) is None
    assert list(allocator.owned_pages(KV)) == blocks
    assert list(allocator.owned_pages(EXPERT)) == experts
    assert [allocator.owned(kind) for kind in PageKind] == [1, 1, 2, 0]
    assert allocator.bytes_by_kind() == {EXPERT: 12 * E, SSM: 8 * E, KV: 4 * E, CONV: 0}


class TestRuns:
    def test_runs_are_consecutive_and_start_where_they_fit(self) -> None:
        allocator = make(PoolGeometry.from_bytes(10 * E, E, None, E), 2)
        rows = allocator.allocate(CONV, 10)
        allocator.free([rows[0], rows[1], rows[4], rows[5], rows[6], rows[9]])
        assert allocator.allocate_runs(CONV, 1, 3) == [rows[4:7]]
        assert allocator.allocate_runs(CONV, 1, 3) == [[10, 11, 12]], "no other three neighbours are free in the first parent"
        assert allocator.allocate(CONV, 3) == [rows[0], rows[1], rows[9]]
        allocator.check_integrity()

    def test_runs_never_cross_parents(self) -> None:
        allocator = make(PoolGeometry.from_bytes(10 * E, E, None, E), 2)
        runs = allocator.allocate_runs(CONV, 6, 3)
        assert [run[0] for run in runs] == [0, 3, 6, 10, 13, 16]
        with pytest.raises(OutOfPages) as caught:
            allocator.allocate_runs(CONV, 1, 3)
        assert caught.value.available == 0 and allocator.available(CONV) == 2

    def test_run_of_unlike_length_is_indexed_later(self) -> None:
        allocator = make(PoolGeometry.from_bytes(10 * E, E, None, E), 1)
        allocator.allocate_runs(CONV, 1, 3)
        assert allocator.allocate_runs(CONV, 1, 5) == [[3, 4, 5, 6, 7]]
        assert allocator.allocate_runs(CONV, 1, 2) == [[8, 9]]
        allocator.check_integrity()

    def test_run_longer_than_a_parent(self) -> None:
        with pytest.raises(ValueError, match="longer than the 12 pages"):
            make(HYBRID, 2).allocate_runs(CONV, 1, 13)


class TestLargestGain:
    def test_nothing_to_evict(self) -> None:
        allocator = make(HYBRID, 2)
        assert allocator.largest_gain(SSM) is None
        allocator.allocate(KV, 1)
        assert allocator.largest_gain(KV) is None

    def test_huge_page_with_fewest_experts(self) -> None:
        allocator = make(HYBRID, 3)
        experts = allocator.allocate(EXPERT, 6)
        allocator.free([experts[2]])
        assert allocator.available(SSM) == 0
        assert allocator.largest_gain(SSM) == Gain((experts[3],), 3)
        allocator.free([experts[3]])
        assert allocator.available(SSM) == 3
        gain = allocator.largest_gain(SSM)
        assert gain is not None and len(gain.pages) == 2 and gain.gained == 3

    def test_huge_page_shared_with_kv_does_not_count(self) -> None:
        allocator = make(HYBRID, 1)
        (expert,) = allocator.allocate(EXPERT, 1)
        allocator.allocate(KV, 1)
        assert allocator.largest_gain(SSM) is None
        assert allocator.largest_gain(KV) == Gain((expert,), 6), "for KV the expert's own page is enough"
        assert allocator.largest_gain(EXPERT) == Gain((expert,), 1)

    def test_without_states_it_is_one_expert_page(self) -> None:
        allocator = make(PLAIN, 2)
        experts = allocator.allocate(EXPERT, 2)
        gain = allocator.largest_gain(KV)
        assert gain is not None and gain.gained == 8 and set(gain.pages) < set(experts)

    def test_states_can_make_room_for_experts(self) -> None:
        allocator = make(HYBRID, 1)
        states = allocator.allocate(SSM, 2)
        assert allocator.largest_gain(EXPERT) is None
        assert allocator.largest_gain(EXPERT, SSM) == Gain(tuple(states), 2)
        assert allocator.largest_gain(KV, SSM) == Gain(tuple(states), 12)


@pytest.mark.parametrize("tamper", ["num_free", "num_owned", "mask", "heap", "shelf"])
def test_check_integrity_finds_damage(tamper: str) -> None:
    allocator = make(HYBRID, 3)
    allocator.allocate(KV, 3)
    allocator.allocate(SSM, 1)
    allocator.check_integrity()
    shelf = allocator._shelves[KV]
    (split,) = (inner for l1 in allocator._split_huge.values() for inner in l1.inner.values())
    if tamper == "num_free":
        shelf.num_free += 1
    elif tamper == "num_owned":
        shelf.num_owned -= 1
    elif tamper == "mask":
        split.free ^= 1
    elif tamper == "heap":
        allocator._free_huge.append(0)
    else:
        shelf.partial.discard(split.num_free, split)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
