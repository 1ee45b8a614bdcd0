"""The allocator against a naive model, in random sequences of operations, with a full integrity check after every step.

The model knows only which pages are owned. What could be allocated, it works out from the geometry, page by page, each time.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rimuru_cli.engine.memory.allocator import IntegrityError, OutOfPages, PageAllocator
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry

EXPERT, SSM, KV, CONV = PageKind.EXPERT, PageKind.SSM, PageKind.KV, PageKind.CONV
E = ENTRY_BYTES

GEOMETRIES = {
    "experts and KV, all exact": PoolGeometry.from_bytes(8 * E, 2 * E),
    "KV tails": PoolGeometry.from_bytes(11 * E, 3 * E),
    "2:3 with all four kinds": PoolGeometry.from_bytes(12 * E, 2 * E, 8 * E, E),
    "2:3 with tails, third level in both": PoolGeometry.from_bytes(12 * E, 4 * E - 100, 8 * E, 5 * E),
    "24:25": PoolGeometry.from_bytes(25 * E, 6 * E, 24 * E, 5 * E),
    "tails of the huge page, a state a page": PoolGeometry.from_bytes(3_276_800, 524_288, 3_145_728, 500_000),
    "tails of the huge page, 14 states": PoolGeometry.from_bytes(9_977_856, 1 << 20, 1 << 21, 700_000),
    "tiled experts": PoolGeometry.from_bytes(9 * E, 2 * E, tiles=4),
}


class Model:
    """Owned pages by entry, and everything that follows from them."""

    def __init__(self, geometry: PoolGeometry, num_huge: int) -> None:
        self.geometry = geometry
        self.num_huge = num_huge
        self.huge_entries = geometry.huge_page_bytes // E
        self.owned: dict[int, PageKind] = {}
        self.withheld: set[int] = set()

    def stride(self, kind: PageKind) -> int:
        return self.geometry.layout(kind).stride_bytes // E

    def l2_kind(self, kind: PageKind) -> PageKind:
        return self.geometry.layout(kind).parent or kind

    def place(self, entry: int, kind: PageKind) -> tuple[int, int, int]:
        """Huge page, child of it, child of that (or 0), after checking that the page lies on the grid of all its levels."""
        huge, rest = divmod(entry, self.huge_entries)
        l2_kind = self.l2_kind(kind)
        child, rest = divmod(rest, self.stride(l2_kind))
        assert 0 <= huge < self.num_huge and child < self.geometry.layout(l2_kind).per_parent
        if kind is l2_kind:
            assert rest == 0
            return huge, child, 0
        grandchild, rest = divmod(rest, self.stride(kind))
        assert rest == 0 and grandchild < self.geometry.layout(kind).per_parent
        return huge, child, grandchild

    def tables(self) -> tuple[dict[int, set[PageKind]], dict[tuple[int, int], list[tuple[PageKind, int]]]]:
        """What each used huge page is split into, and what lies in each used L2 page."""
        sizes: dict[int, set[PageKind]] = defaultdict(set)
        inside: dict[tuple[int, int], list[tuple[PageKind, int]]] = defaultdict(list)
        for entry, kind in self.owned.items():
            huge, child, grandchild = self.place(entry, kind)
            sizes[huge].add(self.l2_kind(kind))
            inside[huge, child].append((kind, grandchild))
        return sizes, inside

    def check_exclusive(self) -> None:
        end = 0
        for entry, kind in sorted(self.owned.items(), key=lambda item: item[0]):
            assert entry >= end, "a byte has two owners"
            end = entry + self.stride(kind)
        sizes, inside = self.tables()
        assert all(len(kinds) == 1 for kinds in sizes.values()), "a huge page splits into one size"
        assert all(len({kind for kind, _ in pages}) == 1 for pages in inside.values()), "an L2 page holds one kind"

    def free_children(self, kind: PageKind) -> list[set[int]]:
        """The free children of each parent that is already split for this kind."""
        sizes, inside = self.tables()
        layout = self.geometry.layout(kind)
        everything = set(range(layout.per_parent))
        if layout.parent is None:
            given = {huge: kinds for huge, kinds in sizes.items() if huge not in self.withheld}
            return [everything - {child for h, child in inside if h == huge} for huge, kinds in given.items() if kinds == {kind}]
        given_pages = [pages for (huge, _), pages in inside.items() if huge not in self.withheld]
        return [everything - {place for _, place in pages} for pages in given_pages if pages[0][0] is kind]

    def unopened(self, kind: PageKind) -> int:
        """Free pages of the parent's size."""
        parent = self.geometry.layout(kind).parent
        return self.num_huge - len(self.tables()[0].keys() | self.withheld) if parent is None else self.available(parent)

    def withheld_bytes(self) -> int:
        """What nobody owns in withheld huge pages, less the tails of those that are split."""
        sizes, inside = self.tables()
        total = 0
        for huge in self.withheld:
            if huge not in sizes:
                total += self.geometry.huge_page_bytes
                continue
            (l2_kind,) = sizes[huge]
            pages = {child: pages for (h, child), pages in inside.items() if h == huge}
            total += (self.geometry.layout(l2_kind).per_parent - len(pages)) * self.stride(l2_kind) * E
            for held in pages.values():
                if held[0][0] is not l2_kind:
                    layout = self.geometry.layout(held[0][0])
                    total += (layout.per_parent - len(held)) * layout.stride_bytes
        return total

    def available(self, kind: PageKind) -> int:
        if kind not in self.geometry.kinds:
            return 0
        return sum(map(len, self.free_children(kind))) + self.unopened(kind) * self.geometry.layout(kind).per_parent

    def available_runs(self, kind: PageKind, length: int) -> int:
        total = self.unopened(kind) * (self.geometry.layout(kind).per_parent // length)
        for free in self.free_children(kind):
            streak = 0
            for child in range(self.geometry.layout(kind).per_parent):
                streak = streak + 1 if child in free else 0
                if streak == length:
                    total, streak = total + 1, 0
        return total

    def fewest_evictions(self, evictable: PageKind) -> int | None:
        """Fewest pages to free for a whole huge page, over the huge pages that hold nothing else."""
        held: dict[int, Counter[PageKind]] = defaultdict(Counter)
        for entry, kind in self.owned.items():
            if entry // self.huge_entries not in self.withheld:
                held[entry // self.huge_entries][kind] += 1
        return min((kinds[evictable] for kinds in held.values() if set(kinds) == {evictable}), default=None)


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(GEOMETRIES)), num_huge=st.integers(1, 6), extra=st.integers(0, 255))
    def start(self, name: str, num_huge: int, extra: int) -> None:
        self.geometry = GEOMETRIES[name]
        self.allocator = PageAllocator(self.geometry, num_huge * self.geometry.huge_page_bytes + extra)
        self.model = Model(self.geometry, num_huge)
        self.groups: list[list[int]] = []
        assert self.allocator.num_huge_pages == num_huge and self.allocator.unused_bytes == extra

    def record(self, kind: PageKind, pages: list[int]) -> None:
        for page in pages:
            assert page not in self.model.owned
            self.model.owned[page] = kind
        if pages:
            self.groups.append(pages)

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            del self.model.owned[page]

    def kind_of(self, choice: int) -> PageKind:
        return self.geometry.kinds[choice % len(self.geometry.kinds)]

    @rule(choice=st.integers(0, 3), share=st.floats(0, 1), small=st.integers(0, 7), use_small=st.booleans())
    def allocate(self, choice: int, share: float, small: int, use_small: bool) -> None:
        kind = self.kind_of(choice)
        available = self.model.available(kind)
        count = min(small, available) if use_small else int(available * share)
        before = self.model.free_children(kind)
        pages = self.allocator.allocate(kind, count)
        assert len(pages) == len(set(pages)) == count
        self.record(kind, pages)
        self.check_fullest_first(kind, before, count)

    def check_fullest_first(self, kind: PageKind, before: list[set[int]], count: int) -> None:
        """The parents with the fewest free children were filled first; new ones were opened only when none was left."""
        expected = Counter[int]()
        for size in sorted(len(free) for free in before if free):
            taken = min(size, count)
            count -= taken
            expected[size - taken] += 1
        per_parent = self.geometry.layout(kind).per_parent
        while count > 0:
            taken = min(per_parent, count)
            count -= taken
            expected[per_parent - taken] += 1
        found = Counter(len(free) for free in self.model.free_children(kind))
        expected[0] = found[0] = 0
        assert found == expected

    @rule(choice=st.integers(0, 3), excess=st.integers(1, 100))
    def allocate_too_many(self, choice: int, excess: int) -> None:
        kind = self.kind_of(choice)
        available = self.model.available(kind)
        before = list(self.allocator.regions())
        with pytest.raises(OutOfPages) as caught:
            self.allocator.allocate(kind, available + excess)
        assert (caught.value.kind, caught.value.wanted, caught.value.available) == (kind, available + excess, available)
        assert list(self.allocator.regions()) == before

    @rule(choice=st.integers(0, 3), length=st.integers(1, 4), share=st.floats(0, 1), small=st.integers(0, 3), use_small=st.booleans())
    def allocate_runs(self, choice: int, length: int, share: float, small: int, use_small: bool) -> None:
        kind = self.kind_of(choice)
        if length > self.geometry.layout(kind).per_parent:
            with pytest.raises(ValueError, match="longer"):
                self.allocator.allocate_runs(kind, 1, length)
            return
        available = self.model.available_runs(kind, length)
        count = min(small, available) if use_small else int(available * share)
        runs = self.allocator.allocate_runs(kind, count, length)
        assert len(runs) == count
        for pages in runs:
            assert pages == list(range(pages[0], pages[0] + length * self.model.stride(kind), self.model.stride(kind)))
            depth = self.geometry.layout(kind).level - 1
            assert len({self.model.place(page, kind)[:depth] for page in pages}) == 1, "a run lies in one parent"
            self.record(kind, pages)

    @rule(choice=st.integers(0, 3), length=st.integers(1, 3), excess=st.integers(1, 3))
    def allocate_too_many_runs(self, choice: int, length: int, excess: int) -> None:
        kind = self.kind_of(choice)
        if length > self.geometry.layout(kind).per_parent:
            return
        available = self.model.available_runs(kind, length)
        before = list(self.allocator.regions())
        with pytest.raises(OutOfPages) as caught:
            self.allocator.allocate_runs(kind, available + excess, length)
        assert (caught.value.wanted, caught.value.available) == (available + excess, available)
        assert list(self.allocator.regions()) == before

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def free_group(self, data: st.DataObject) -> None:
        pages = self.groups.pop(data.draw(st.integers(0, len(self.groups) - 1)))
        self.forget(pages)
        self.allocator.free(iter(pages))

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def free_some_of_everything(self, data: st.DataObject) -> None:
        every = data.draw(st.integers(1, 4))
        pages = data.draw(st.permutations(sorted(self.model.owned)[:: every + 1]))
        self.forget(pages)
        self.allocator.free(pages)
        self.groups = [kept for group in self.groups if (kept := [page for page in group if page in self.model.owned])]

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        pages = self.groups[data.draw(st.integers(0, len(self.groups) - 1))]
        before = list(self.allocator.regions())
        with pytest.raises(IntegrityError):
            self.allocator.free([*pages, pages[data.draw(st.integers(0, len(pages) - 1))]])
        assert list(self.allocator.regions()) == before

    @rule(data=st.data())
    def free_what_nobody_owns(self, data: st.DataObject) -> None:
        entry = data.draw(st.integers(-2, self.model.num_huge * self.model.huge_entries + 2))
        if entry in self.model.owned:
            assert self.allocator.owner_of(entry) is self.model.owned[entry]
            return
        assert self.allocator.owner_of(entry) is None
        before = list(self.allocator.regions())
        with pytest.raises(IntegrityError):
            self.allocator.free([*list(self.model.owned)[:: data.draw(st.integers(1, 3))][1:], entry])
        assert list(self.allocator.regions()) == before

    @rule(choice=st.integers(0, 3), evict_states=st.booleans())
    def evict_for(self, choice: int, evict_states: bool) -> None:
        kind = self.kind_of(choice)
        evictable = SSM if evict_states else EXPERT
        gain = self.allocator.largest_gain(kind, evictable)
        same_size = self.model.l2_kind(kind) is evictable
        if gain is None:
            assert self.model.fewest_evictions(evictable) is None
            given = [owner for page, owner in self.model.owned.items() if page // self.model.huge_entries not in self.model.withheld]
            assert not (same_size and evictable in given)
            return
        pages = list(gain.pages)
        assert len(pages) == (1 if same_size else self.model.fewest_evictions(evictable))
        assert all(self.model.owned[page] is evictable for page in pages)
        before = self.allocator.available(kind)
        self.forget(pages)
        self.allocator.free(pages)
        assert self.allocator.available(kind) - before == gain.gained > 0
        self.groups = [kept for group in self.groups if (kept := [page for page in group if page in self.model.owned])]

    @rule(data=st.data())
    def withhold(self, data: st.DataObject) -> None:
        numbers = data.draw(st.sets(st.integers(0, self.model.num_huge - 1)))
        self.allocator.withhold(numbers)
        self.model.withheld |= numbers
        for kind in self.geometry.kinds:
            inside = [page for page, owner in self.model.owned.items() if owner is kind]
            inside = sorted(page for page in inside if page // self.model.huge_entries in self.model.withheld)
            assert self.allocator.held_in_withheld(kind) == inside

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        numbers = data.draw(st.sets(st.integers(0, self.model.num_huge - 1)))
        self.allocator.release(numbers)
        self.model.withheld -= numbers

    @rule()
    def find_the_sparsest(self) -> None:
        pages = self.allocator.sparsest(KV)
        frees = [len(free) for free in self.model.free_children(KV) if free]
        assert bool(pages) == bool(frees)
        if pages:
            assert all(self.model.owned[page] is KV for page in pages)
            assert len({self.model.place(page, KV)[:2] for page in pages}) == 1
            assert max(frees) == self.geometry.layout(KV).per_parent - len(pages)

    @invariant()
    def agrees_with_model(self) -> None:
        if not hasattr(self, "model"):
            return
        self.allocator.check_integrity()
        self.model.check_exclusive()
        for kind in PageKind:
            owned = sorted(page for page, owner in self.model.owned.items() if owner is kind)
            assert list(self.allocator.owned_pages(kind)) == owned
            assert self.allocator.owned(kind) == len(owned)
            assert self.allocator.available(kind) == self.model.available(kind)
        merged = not self.model.owned
        assert (self.allocator.splits == self.allocator.merges) == merged
        assert self.allocator.withheld_bytes == self.model.withheld_bytes()
        spare = self.allocator.free_bytes + self.allocator.withheld_bytes + self.allocator.unused_bytes
        assert merged == (spare == self.allocator.pool_bytes)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
