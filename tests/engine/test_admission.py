"""Whether a sequence is worth the experts that leave for it: the rule, the scheduler that obeys it, and what the engine tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import CONTEXT, prompts_of
from engines import GREEDY, assert_all_free, load_engine, resident_tokens, run_all
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.engine.admission import PACED_FROM, AdmissionStats, Crowd, Group, eager, paced
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import KVView
from rimuru_cli.engine.request import Request, SamplingParams
from rimuru_cli.engine.scheduler import Scheduler
from rimuru_cli.engine.sequence import Sequence


def stats(
    running: int = 40, taken: float = 200.0, expert: float = 1e-3, step: float | None = 0.1, *, displaces: bool = True, **others: Any
) -> AdmissionStats:
    return AdmissionStats(running, displaces, taken, expert, step, **others)


@pytest.mark.parametrize(
    ("case", "worth"),
    [
        (stats(), False),  # 200 ms of experts against 100 ms
        (stats(taken=100.0), True),  # just as long
        (stats(step=0.3), True),
        (stats(step=None), False),
        (stats(taken=-50.0, step=0.0), True),  # not even the experts would fit
        (stats(running=PACED_FROM - 1, taken=1e6, step=None), True),
        (stats(running=PACED_FROM, taken=1e6, step=None), False),
        (stats(expert=0.0, step=None), True),
        (stats(displaces=False, step=None), True),
    ],
)
def test_a_sequence_is_worth_what_it_does_not_slow_down(case: AdmissionStats, worth: bool) -> None:
    assert paced(case) is worth
    assert eager(case)


@pytest.mark.parametrize("running", [10, 40, 200])
def test_the_rule_is_that_of_tokens_per_second(running: int) -> None:
    """B / T >= (B - 1) / (T - e M / B), for steps of 100 ms that bring 0.5 ms for every expert besides."""
    expert = 0.5e-3
    for taken in (1.0, 30.0, 60.0, 120.0, 199.0, 201.0, 500.0, 4000.0):
        step = 0.1
        faster = step <= expert * taken / running or running / step >= (running - 1) / (step - expert * taken / running)
        if step > expert * taken / running:
            assert paced(stats(running, taken, expert, step)) is faster


def crowd(captured: float | None = 0.01, wide: float | None = 0.05, reachable: int = 100) -> Crowd:
    return Crowd(64, captured, wide, reachable)


@pytest.mark.parametrize(
    ("case", "worth"),
    [
        (crowd(), False),  # 64 in 10 ms against 100 in 50
        (crowd(reachable=320), True),  # as many a second
        (crowd(captured=0.5, wide=0.7), True),
        (crowd(captured=None), False),
        (crowd(wide=None), False),
    ],
)
def test_more_than_a_graph_has_rows_come_only_if_all_of_them_are_faster(case: Crowd, worth: bool) -> None:
    assert paced(stats(running=65, displaces=False, crowd=case)) is worth
    assert eager(stats(running=65, displaces=False, crowd=case))


@pytest.mark.parametrize(
    ("group", "worth"),
    [
        # 64 * sqrt(40 / (2 * 400 * 10)) = 4.5
        (Group(waiting=50, room=3, tokens=400.0, step_seconds=0.01, prompt_seconds=0.05), False),
        (Group(waiting=50, room=4, tokens=400.0, step_seconds=0.01, prompt_seconds=0.05), True),
        (Group(waiting=2, room=2, tokens=400.0, step_seconds=0.01, prompt_seconds=0.05), True),  # all who are there
        (Group(waiting=2, room=0, tokens=400.0, step_seconds=0.01, prompt_seconds=0.01), True),  # a prompt costs nothing
        (Group(waiting=2, room=0, tokens=0.0, step_seconds=0.02, prompt_seconds=0.01), True),
    ],
)
def test_newcomers_come_in_groups_where_prompts_make_everybody_wait(group: Group, worth: bool) -> None:
    assert paced(stats(running=65, displaces=False, group=group)) is worth
    assert paced(stats(running=PACED_FROM - 1, displaces=False, group=group)), "a few do not wait for one another"


@given(
    st.integers(8, 1000),
    st.integers(0, 1000),
    st.integers(-5, 1000),
    st.floats(0, 1e5),
    st.floats(1e-6, 10),
    st.floats(0, 10),
)
def test_a_place_for_all_who_wait_is_always_enough(
    running: int, waiting: int, room: int, tokens: float, step: float, prompt: float
) -> None:
    assert Group(waiting, max(room, waiting), tokens, step, prompt).is_complete(running)


class _Room:
    """A pool of eight blocks of four tokens; experts could give way at any time, and are asked if somebody is worth it."""

    def __init__(self, worth: bool) -> None:
        page = 4 * 2 * 8 * 4
        pool = PagePool(PoolGeometry.from_bytes(page, page), 8 * page)
        self.blocks = KVBlocks(pool, KVView(pool, 1, 8, 4, torch.float32), 1)
        self.asked: list[int] = []
        self.sizes: list[tuple[int, bool]] = []
        self.comes = True

        def decide(blocks: int, joins: bool) -> bool:
            self.sizes.append((blocks, joins))
            return worth if blocks else self.comes

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
    assert room.sizes == [(0, True), (4, True)] and bool(room.asked) is worth


def test_nobody_joins_who_is_not_wanted_although_there_is_room() -> None:
    room = _Room(True)
    room.comes = False
    room.add(8)
    room.add(8)
    assert room.step() == [1], "who is alone is not asked about"
    assert room.step() == [1] and room.sizes == [(0, True)] * 2
    room.comes = True
    assert room.step() == [1, 2]


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


def test_a_sequence_counts_before_it_runs_as_it_does_afterwards(qwen3: Path) -> None:
    """With seven others, the eighth is asked about when it joins, as it is when it grows."""
    asked: list[AdmissionStats] = []

    def policy(case: AdmissionStats) -> bool:
        asked.append(case)
        return True

    engine = load_engine(qwen3, 0.5, EngineConfig(context=CONTEXT, device="cpu", max_batch_tokens=64, admission=policy))
    for number in range(PACED_FROM):
        engine.submit([number + 1, 2, 3], replace(GREEDY, max_tokens=20))
    engine.step()
    assert sorted({case.running for case in asked}) == list(range(2, PACED_FROM + 1))
    asked.clear()
    engine._worth.of(1, joins=False)
    assert [case.running for case in asked] == [PACED_FROM]
    run_all(engine)
    assert_all_free(engine)
