"""Which rows run in a step, in which order, and who gives way when pages are lacking."""

from __future__ import annotations

import pytest
import torch

from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import KVView
from rimuru_cli.engine.request import Request, RequestStatus, SamplingParams
from rimuru_cli.engine.scheduler import Scheduler
from rimuru_cli.engine.sequence import Sequence

LAYERS, SIZE = 2, 4


class Bench:
    """A scheduler over a pool of `num_blocks` token blocks, of which `held` are taken by experts that make_room may retire."""

    def __init__(self, num_blocks: int, held: int = 0, *, max_batch_tokens: int = 16, max_sequences: int = 4) -> None:
        page_bytes = SIZE * 2 * 8 * 4
        self.pool = PagePool(PoolGeometry.from_bytes(page_bytes, page_bytes), num_blocks * LAYERS * page_bytes)
        self.blocks = KVBlocks(self.pool, KVView(self.pool, 1, 8, SIZE, torch.float32), LAYERS)
        self.experts = self.pool.allocate(PageKind.EXPERT, held * LAYERS)
        self.asked: list[int] = []
        self.scheduler = Scheduler(
            self.blocks,
            lambda: self.pool.allocator.available(PageKind.KV),
            self._make_room,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
        )
        self.count = 0

    def _make_room(self, num_pages: int) -> bool:
        self.asked.append(num_pages)
        lacking = num_pages - self.pool.allocator.available(PageKind.KV)
        if lacking > len(self.experts):
            return False
        self.pool.free([self.experts.pop() for _ in range(lacking)])
        return True

    def add(self, num_tokens: int, first: int = 0) -> Sequence:
        self.count += 1
        tokens = [first + 1000 * self.count + i for i in range(num_tokens)]
        sequence = Sequence(Request(self.count, tuple(tokens), SamplingParams()), tokens, 10_000)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int, bool]]:
        """(request, rows, samples) of one step; sampled sequences get a next token."""
        plan = self.scheduler.schedule()
        rows = [(r.sequence.request.id, r.count, r.samples) for r in plan]
        for scheduled in plan:
            sampled = scheduled.samples
            scheduled.sequence.computed += scheduled.count
            assert len(scheduled.sequence.blocks) * SIZE >= scheduled.sequence.computed
            if sampled:
                scheduled.sequence.tokens.append(7)
        return rows


def test_a_long_prompt_is_computed_in_pieces() -> None:
    bench = Bench(20)
    bench.add(37)
    assert [bench.step() for _ in range(4)] == [[(1, 16, False)], [(1, 16, False)], [(1, 5, True)], [(1, 1, True)]]


def test_an_answer_does_not_stall_behind_somebodys_prompt() -> None:
    bench = Bench(40)
    bench.add(3)
    bench.step()
    bench.add(40)
    assert bench.step() == [(1, 1, True), (2, 15, False)]
    assert bench.step() == [(1, 1, True), (2, 15, False)]


def test_short_prompts_share_a_step() -> None:
    bench = Bench(40)
    for length in (5, 6, 9):
        bench.add(length)
    assert bench.step() == [(1, 5, True), (2, 6, True), (3, 5, False)]


def test_no_more_sequences_than_allowed_run_at_once() -> None:
    bench = Bench(40, max_sequences=2)
    for _ in range(3):
        bench.add(2)
    assert [r[0] for r in bench.step()] == [1, 2]
    bench.scheduler.remove(bench.scheduler.running[0])
    assert [r[0] for r in bench.step()] == [2, 3]


def test_nothing_to_do() -> None:
    assert Bench(4).scheduler.schedule() == []


def test_experts_give_way_before_anybody_is_preempted() -> None:
    bench = Bench(6, held=3)
    sequence = bench.add(12)
    bench.step()
    for _ in range(8):
        bench.step()
    assert bench.asked and bench.scheduler.preemptions == 0
    assert len(sequence.blocks) == 5


def test_blocks_kept_for_reuse_give_way_before_experts() -> None:
    bench = Bench(6, held=3)
    first = bench.add(12)
    bench.step()
    bench.scheduler.remove(first)
    assert bench.blocks.idle_pages == 3 * LAYERS
    bench.add(12)
    bench.step()
    assert bench.asked == [] and bench.blocks.idle_pages == 0


def test_the_youngest_gives_way_and_comes_back() -> None:
    bench = Bench(6, max_batch_tokens=64)
    old, young = bench.add(8), bench.add(8)
    bench.step()
    assert [s.request.id for s in bench.scheduler.running] == [1, 2]
    for _ in range(8):
        bench.step()
    assert bench.scheduler.preemptions == 1
    assert young.request.status is RequestStatus.WAITING and old.request.status is RequestStatus.RUNNING
    bench.scheduler.remove(old)
    bench.step()
    assert young.request.status is RequestStatus.RUNNING and young.computed == len(young.tokens) - 1


def test_a_newcomer_waits_until_its_whole_prompt_fits() -> None:
    bench = Bench(6)
    bench.add(12)
    bench.step()
    bench.add(12)
    assert [r[0] for r in bench.step()] == [1]
    assert len(bench.scheduler.waiting) == 1


def test_a_newcomer_that_does_not_fit_costs_nobody_the_blocks_kept_for_reuse() -> None:
    bench = Bench(8)
    finished = bench.add(8)
    bench.step()
    bench.scheduler.remove(finished)
    bench.add(12)
    bench.step()
    bench.add(24)
    assert [r[0] for r in bench.step()] == [2]
    assert bench.blocks.idle_pages == 2 * LAYERS


def test_experts_and_blocks_kept_for_reuse_give_way_together() -> None:
    bench = Bench(8, held=3)
    finished = bench.add(8)
    bench.step()
    bench.scheduler.remove(finished)
    sequence = bench.add(26)
    bench.step()
    bench.step()
    assert len(sequence.blocks) == 7 and bench.blocks.idle_pages == 0 and len(bench.experts) == LAYERS


@pytest.mark.parametrize("num_blocks", [5, 8, 13])
def test_everybody_finishes_whatever_the_pool(num_blocks: int) -> None:
    """No hang: with room for one sequence at least, all sequences reach their end."""
    bench = Bench(num_blocks, max_batch_tokens=7)
    goals = {id(bench.add(length)): length + 8 for length in (3, 9, 11, 5, 7)}
    for _ in range(400):
        bench.step()
        for sequence in list(bench.scheduler.running):
            if len(sequence.tokens) >= goals[id(sequence)]:
                bench.scheduler.remove(sequence)
        bench.pool.allocator.check_integrity()
        if not (bench.scheduler.running or bench.scheduler.waiting):
            break
    else:
        pytest.fail("some sequence never finished")
    bench.blocks.evict(10_000)
    assert bench.pool.allocator.owned(PageKind.KV) == 0
