"""Whether a sequence is worth the experts that leave for it: the rule, the scheduler that obeys it, and what the engine tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import CONTEXT, prompts_of
from engines import GREEDY, assert_all_free, load_engine, resident_tokens, run_all

from rimuru_cli.engine.admission import PACED_FROM, AdmissionStats, eager, paced
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import KVView
from rimuru_cli.engine.request import Request, SamplingParams
from rimuru_cli.engine.scheduler import Scheduler
from rimuru_cli.engine.sequence import Sequence


def stats(running: int = 40, displaced: float = 5.0, expert: float = 1e-3, step: float | None = 0.1) -> AdmissionStats:
    return AdmissionStats(running, displaced, expert, step)


@pytest.mark.parametrize(
    ("case", "worth"),
    [
        (stats(), False),  # 40 * 5 ms against 100 ms
        (stats(displaced=2.5), True),  # just as long
        (stats(step=0.3), True),
        (stats(step=None), False),
        (stats(running=PACED_FROM - 1, displaced=1e6, step=None), True),
        (stats(expert=0.0, step=None), True),
    ],
)
def test_a_sequence_is_worth_what_it_does_not_slow_down(case: AdmissionStats, worth: bool) -> None:
    assert paced(case) is worth
    assert eager(case)


@pytest.mark.parametrize("running", [10, 40, 200])
def test_the_rule_is_that_of_tokens_per_second(running: int) -> None:
    """B / T >= (B - 1) / (T - h e), for steps whose time is all spent on bringing experts."""
    step, expert = 0.5, 1e-3
    for displaced in (0.5, 1.0, 2.0, 4.0, 8.0, 20.0, 60.0):
        faster = running / step >= (running - 1) / (step - displaced * expert)
        assert paced(stats(running, displaced, expert, step)) is faster


class _Room:
    """A pool of eight blocks of four tokens; experts could give way at any time, and are asked if somebody is worth it."""

    def __init__(self, worth: bool) -> None:
        page = 4 * 2 * 8 * 4
        pool = PagePool(PoolGeometry.from_bytes(page, page), 8 * page)
        self.blocks = KVBlocks(pool, KVView(pool, 1, 8, 4, torch.float32), 1)
        self.asked: list[int] = []
        self.sizes: list[int] = []

        def decide(blocks: int) -> bool:
            self.sizes.append(blocks)
            return worth

        def make_room(pages: int) -> bool:
            self.asked.append(pages)
            return False

        self.scheduler = Scheduler(
            self.blocks, lambda: pool.allocator.available(PageKind.KV), make_room, decide, max_batch_tokens=64, max_sequences=8
        )
        self.count = 0

    def add(self, tokens: int) -> Sequence:
        self.count += 1
        ids = [100 * self.count + i for i in range(tokens)]
        sequence = Sequence(Request(self.count, tuple(ids), SamplingParams()), ids, 1000)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[int]:
        plan = self.scheduler.schedule()
        for rows in plan:
            rows.sequence.computed += rows.count
            rows.sequence.tokens.append(7)
        return [rows.sequence.request.id for rows in plan]


@pytest.mark.parametrize("worth", [False, True])
def test_experts_are_asked_only_for_those_who_are_worth_it(worth: bool) -> None:
    room = _Room(worth)
    room.add(16)
    assert room.step() == [1] and room.sizes == [], "what is free is given to anybody"
    room.add(16)
    assert room.step() == [1]
    assert room.sizes == [4] and bool(room.asked) is worth


def test_who_grows_takes_the_place_of_the_youngest_who_is_not_worth_it() -> None:
    room = _Room(False)
    room.add(15)
    room.add(10)
    for _ in range(2):
        room.step()
    assert room.asked == [] and room.scheduler.preemptions == 0
    for _ in range(8):
        room.step()
    assert room.scheduler.preemptions > 0 and [s.request.id for s in room.scheduler.running] == [1]


def test_a_policy_that_admits_nobody_cannot_stop_the_engine(qwen3: Path) -> None:
    """Whoever is alone displaces experts whatever the policy says, both when it starts and when it grows."""
    config = EngineConfig(context=CONTEXT, device="cpu", max_batch_tokens=24, admission=lambda stats: False)
    engine = load_engine(qwen3, 0.3, config)
    prompts = prompts_of()
    requests = [engine.submit(prompt, replace(GREEDY, max_tokens=40)) for prompt in prompts]
    run_all(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == resident_tokens(qwen3, prompt, 40)
    assert_all_free(engine)
