"""Sums over page sizes against what the allocator really can do, and states of sequences in the pool."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.engine.memory.allocator import OutOfPages, PageAllocator
from rimuru_cli.engine.memory.division import Division, Wanted
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.state_layout import StateLayout
from rimuru_cli.engine.memory.views import ConvView, SSMView
from rimuru_cli.engine.state_blocks import StateBlocks

EXPERT, SSM, KV, CONV = PageKind.EXPERT, PageKind.SSM, PageKind.KV, PageKind.CONV

# expert, KV, SSM, conv pages in units of 256 bytes: as released models' (1:1, 2:3, 1:2), KV pages in SSM pages, and tails
SIZES = [(24, 2, 24, 1), (24, 2, 16, 1), (32, 4, 16, 3), (30, 4, 8, 1), (20, 3, 14, 2)]
LAYERS, ROWS = 5, 3


def division_of(sizes: tuple[int, int, int, int]) -> Division:
    expert, kv, ssm, conv = (256 * size for size in sizes)
    geometry = PoolGeometry.from_bytes(expert, kv, ssm, conv)
    return Division(geometry, StateLayout.build(geometry, LAYERS, ROWS))


@given(st.sampled_from(SIZES), st.integers(0, 60), st.integers(0, 40), st.integers(0, 4))
def test_what_a_pool_holds_is_what_needs_no_larger_one(sizes: tuple[int, int, int, int], huge: int, experts: int, states: int) -> None:
    division = division_of(sizes)
    most = division.kv_pages(huge, experts, states)
    if most:
        assert division.huge_pages(experts, most, states) <= huge
    elif division.huge_pages(experts, 0, states) <= huge:
        assert division.huge_pages(experts, 1, states) > huge
    assert division.huge_pages(experts, most + 1, states) > huge


def test_without_states() -> None:
    geometry = PoolGeometry.from_bytes(10 * 256, 3 * 256)
    division = Division(geometry)
    assert division.huge_pages(4, 7, 1) == 4 + 3 and division.kv_pages(7, 4, 1) == 9
    assert division.wanted(5, 2) == Wanted(5)


class Holder:
    """An allocator whose pages come and go."""

    def __init__(self, division: Division, seed: int, huge: int = 24) -> None:
        assert division.states is not None
        self.division, self.layout = division, division.states
        self.allocator = PageAllocator(division.geometry, huge * division.geometry.huge_page_bytes)
        self.random = random.Random(seed)
        self.held: list[list[int]] = []

    def take(self, wanted: Wanted) -> None:
        """All of it or an exception."""
        allocator, layout = self.allocator, self.layout
        if wanted.ssm_runs:
            self.held.append([p for run in allocator.allocate_runs(SSM, wanted.ssm_runs, layout.per_huge) for p in run])
        if wanted.conv_runs:
            self.held += allocator.allocate_runs(CONV, wanted.conv_runs, layout.run_length)
        if wanted.expert_pages:
            self.held += [[page] for page in allocator.allocate(EXPERT, wanted.expert_pages)]
        if wanted.kv_pages:
            self.held += [[page] for page in allocator.allocate(KV, wanted.kv_pages)]

    def stir(self, operations: int) -> None:
        for _ in range(operations):
            if self.held and self.random.random() < 0.45:
                self.allocator.free(self.held.pop(self.random.randrange(len(self.held))))
            else:
                try:
                    self.take(self.some())
                except OutOfPages:
                    continue

    def some(self) -> Wanted:
        dice = self.random
        states = dice.choice([0, 0, 1])
        return self.division.wanted(dice.choice([0, 1, 5, 20]), states)._replace(expert_pages=dice.choice([0, 0, 1, 3]))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lacking_says_exactly_what_can_be_taken(sizes: tuple[int, int, int, int]) -> None:
    fits = refused = 0
    for seed in range(12):
        holder = Holder(division_of(sizes), seed)
        for _ in range(20):
            holder.stir(12)
            wanted = holder.some()
            if holder.division.lacking(holder.allocator, wanted) <= 0:
                holder.take(wanted)  # raises where it promised too much
                fits += 1
                continue
            held = len(holder.held)
            with pytest.raises(OutOfPages):
                holder.take(wanted)
            refused += 1
            for pages in holder.held[held:]:
                holder.allocator.free(pages)
            del holder.held[held:]
        holder.allocator.check_integrity()
        for pages in holder.held:
            holder.allocator.free(pages)
        assert holder.allocator.free_huge_pages == holder.allocator.num_huge_pages
    assert fits > 50 and refused > 20, "nothing was tested"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_emptiest_huge_page_can_be_emptied(sizes: tuple[int, int, int, int]) -> None:
    """What it holds fits into the gaps of others, page by page, and then one huge page more is free."""
    emptied = 0
    for seed in range(6):
        holder = Holder(division_of(sizes), seed)
        allocator = holder.allocator
        holder.take(holder.division.wanted(30, 1))
        holder.take(Wanted(expert_pages=allocator.available(EXPERT)))
        holder.random.shuffle(holder.held)
        while holder.held:
            allocator.free(holder.held.pop())
            for kind in (EXPERT, SSM):
                found = allocator.emptiest(kind)
                if found is not None:
                    assert found[1] >= 1
                    before = allocator.free_huge_pages
                    empty(holder, found[0])
                    assert allocator.free_huge_pages == before + 1
                    emptied += 1
        allocator.check_integrity()
    assert emptied > 20 or holder.division.geometry.pages_per_huge(EXPERT) == 1, "nothing was tested"


def empty(holder: Holder, number: int) -> None:
    """Move everything out of a huge page."""
    allocator = holder.allocator
    allocator.withhold([number])
    for pages in [pages for pages in holder.held if allocator.huge_page_of(pages[0]) == number]:
        owner = allocator.owner_of(pages[0])
        assert owner is not None
        holder.held += allocator.allocate_runs(owner, 1, len(pages))
        holder.held.remove(pages)
        allocator.free(pages)
    allocator.release([number])


def test_free_runs() -> None:
    division = division_of(SIZES[1])
    allocator = PageAllocator(division.geometry, 4 * division.geometry.huge_page_bytes)
    assert allocator.free_runs(CONV, 3) == 0, "no page is split yet"
    runs = allocator.allocate_runs(CONV, 3, 3)
    per_parent = division.geometry.layout(CONV).per_parent
    assert allocator.free_runs(CONV, 3) == per_parent // 3 - 3
    allocator.free(runs[1])
    assert allocator.free_runs(CONV, 3) == per_parent // 3 - 2
    assert allocator.free_runs(CONV, per_parent + 1) == 0
    assert PageAllocator(PoolGeometry.from_bytes(2560, 256), 5120).free_runs(CONV, 3) == 0


class Pool:
    """A pool with state blocks: 5 layers of states [2, 4, 8] float32 and rows [48]."""

    def __init__(self, huge: int) -> None:
        geometry = PoolGeometry.from_bytes(1024, 256, 256, 192)
        self.layout = StateLayout.build(geometry, LAYERS, ROWS)
        self.pool = PagePool(geometry, huge * geometry.huge_page_bytes, poison=True)
        layers = [0, 1, 3, 4, 6]
        views = SSMView(self.pool, (2, 4, 8)), ConvView(self.pool, 48, ROWS, torch.float32)
        self.states = StateBlocks(self.pool, layers, *views, self.layout)


def numbers(block_states: list[torch.Tensor]) -> list[float]:
    return [float(state.sum()) for state in block_states]


def test_states_are_cleared_copied_and_freed() -> None:
    bench = Pool(20)
    states = bench.states
    a, b = states.allocate(), states.allocate()
    assert states.places == {0: 0, 1: 1, 3: 2, 4: 3, 6: 4}
    assert [s.shape for s in (a.recurrent[4], a.convolution[4])] == [(2, 4, 8), (3, 48)]
    assert all(state.isnan().all() for state in (*a.recurrent, *a.convolution)), "poisoned until it is cleared"
    states.clear(a)
    for place, state in enumerate((*a.recurrent, *a.convolution)):
        assert not state.any()
        state += place + 1
    states.copy(a, b)
    a.recurrent[0] += 5
    assert numbers(b.recurrent) == [64.0 * (place + 1) for place in range(5)]
    assert numbers(b.convolution) == [144.0 * (place + 6) for place in range(5)]
    states.free(a)
    assert numbers(b.recurrent)[0] == 64.0, "they share nothing"
    states.free(b)
    assert not states.live and bench.pool.allocator.free_huge_pages == 20


def test_all_or_nothing() -> None:
    bench = Pool(20)
    taken = bench.pool.allocate(EXPERT, 20 - bench.layout.huge_pages)  # just the recurrent states would fit
    with pytest.raises(OutOfPages):
        bench.states.allocate()
    assert bench.pool.allocator.owned(SSM) == 0 and not bench.states.live
    bench.pool.free(taken[: bench.layout.runs])
    bench.states.free(bench.states.allocate())


def test_states_move_with_their_contents() -> None:
    bench = Pool(24)
    states, allocator = bench.states, bench.pool.allocator
    blocks = [states.allocate() for _ in range(3)]
    for index, block in enumerate(blocks):
        for place, state in enumerate((*block.recurrent, *block.convolution)):
            state.fill_(100 * index + place)
    states.free(blocks.pop(0))
    before = [[*map(numbers, (block.recurrent, block.convolution))] for block in blocks]
    highest = max(allocator.huge_page_of(run[0]) for block in blocks for run in (*block.ssm, *block.conv))
    leaving = set(range(highest - 2, highest + 1))
    allocator.withhold(leaving)
    assert states.vacate(leaving) > 0
    assert not any(allocator.held_in_withheld(kind) for kind in (SSM, CONV))
    assert [[*map(numbers, (block.recurrent, block.convolution))] for block in blocks] == before
    assert states.vacate(leaving) == 0
    allocator.release(leaving)
    allocator.check_integrity()
