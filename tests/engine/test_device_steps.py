"""Which way a step of the device's engine goes (on demand or streamed), the pages lent for it, and that neither shows in the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import CONTEXT, adversary
from engines import GREEDY, answer, assert_all_free, load_engine, resident_tokens, run_all
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device import choice as step_choice
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.link import LinkRates, on_demand_is_quicker
from rimuru_cli.engine.device.plan import buffer_experts
from rimuru_cli.engine.device.replay import ReplayedRouting
from rimuru_cli.engine.device.runner import DeviceRunner, _Captured
from rimuru_cli.engine.device.streaming import ScratchPages
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.memory.geometry import PageKind

DEVICES = ["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])]
RATES = LinkRates()


@pytest.fixture(params=DEVICES)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16 another kernel or another order of sums shows."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("half") / "model", "qwen3_moe", dtype=torch.bfloat16)


def experts_of(engine: Engine) -> DeviceExperts:
    experts = engine._parts.experts
    assert isinstance(experts, DeviceExperts)
    return experts


def scratch_of(engine: Engine) -> ScratchPages:
    scratch = engine._parts.buffers
    assert isinstance(scratch, ScratchPages)
    return scratch


def test_one_token_is_never_streamed() -> None:
    assert on_demand_is_quicker(1, 8, 1.0, [128] * 4, LinkRates(fetch=1.0, copy=1e9))


def test_many_tokens_touch_what_is_absent_anyway_and_the_copy_engine_is_faster() -> None:
    absent = [80] * 48
    assert on_demand_is_quicker(8, 8, 0.1, absent, RATES)
    assert on_demand_is_quicker(16, 8, 0.1, absent, RATES)
    assert not on_demand_is_quicker(64, 8, 0.6, absent, RATES)
    # A slower kernel shifts the border, a faster one shifts it back.
    assert not on_demand_is_quicker(16, 8, 0.1, absent, LinkRates(fetch=5e9, copy=55e9))
    assert on_demand_is_quicker(64, 8, 0.6, absent, LinkRates(fetch=56e9, copy=55e9))


@given(st.integers(2, 64), st.integers(1, 8), st.floats(0.0, 1.0), st.lists(st.integers(0, 128), min_size=1, max_size=6))
def test_fewer_misses_never_speak_for_streaming(rows: int, top_k: int, misses: float, absent: list[int]) -> None:
    if on_demand_is_quicker(rows, top_k, misses, absent, RATES):
        assert on_demand_is_quicker(rows, top_k, misses / 2, absent, RATES)
        assert on_demand_is_quicker(rows - 1, top_k, misses, absent, RATES)


@pytest.mark.parametrize(("absent", "size", "experts"), [(0, 9 << 20, 0), (4, 9 << 20, 8), (100, 9 << 20, 129), (5, 352 << 20, 6)])
def test_buffers_hold_a_layer_and_a_part_of_the_next(absent: int, size: int, experts: int) -> None:
    assert buffer_experts(absent, size) == experts


def test_a_short_prompt_takes_the_quicker_way_and_says_the_same(qwen3: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [3, 50, 7, 99, 12, 64]
    expected = resident_tokens(qwen3, prompt, 20)
    for quicker in (False, True):
        monkeypatch.setattr(step_choice, "on_demand_is_quicker", lambda *_, quicker=quicker: quicker)
        engine = load_engine(qwen3, 0.2, config)
        assert answer(engine, prompt).output_ids == expected
        streamed = experts_of(engine).streamed_steps
        assert streamed == (0 if quicker else 1), "one token at a time is never streamed"
        assert_all_free(engine)


@pytest.mark.parametrize("length", [2, 6, 20])
def test_bits_do_not_depend_on_the_way_or_the_pool(half: Path, length: int, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(7 * i + 31 * p) % 128 for i in range(length)] for p in range(3)]
    seen = []
    for share, quicker in ((1.0, True), (0.4, True), (0.0, True), (0.0, False), (0.3, False)):
        monkeypatch.setattr(step_choice, "on_demand_is_quicker", lambda *_, quicker=quicker: quicker)
        engine = load_engine(half, share, config)
        requests = [engine.submit(prompt, replace(GREEDY, max_tokens=8)) for prompt in prompts]
        seen.append(list(_logits(engine)))
        assert [len(request.output_ids) for request in requests] == [8, 8, 8]
        assert_all_free(engine)
    for other in seen[1:]:
        assert len(other) == len(seen[0])
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def _logits(engine: Engine) -> Iterator[torch.Tensor]:
    runner = engine._parts.runner
    forward, logits = runner.forward, []

    def watch(plan: object) -> torch.Tensor | None:
        out = forward(plan)  # type: ignore[arg-type]
        logits.append(None if out is None else out.clone())
        return out

    runner.forward = watch  # type: ignore[method-assign, assignment]
    run_all(engine)
    yield from (out for out in logits if out is not None)


def test_scratch_is_lent_to_steps_that_need_it_and_comes_back(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.0, replace(config, context=48, adjuster=adversary(3)))
    scratch = scratch_of(engine)
    prompts = [[7 + i, 3, 5 + i, 100 - i] for i in range(4)]
    requests = [engine.submit(prompt, replace(GREEDY, max_tokens=12)) for prompt in prompts]
    lent: list[int] = []
    run_all(engine, lambda: lent.append(scratch.experts))
    assert max(lent) > 0, "four tokens with three of eight experts each need more than the floor of six"
    assert engine.snapshot().bytes_by_kind["buffer"] == scratch.num_pages * engine.info.page_bytes
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == resident_tokens(qwen3, prompt, 12)
    last = engine.submit([9, 4], replace(GREEDY, max_tokens=3))
    run_all(engine)
    assert scratch.num_pages == 0 and bool((scratch.rows == -1).all()), "one token alone needs none"
    assert last.output_ids == resident_tokens(qwen3, [9, 4], 3)
    assert_all_free(engine)


def test_a_recorded_routing_replaces_the_routers_choice(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 1.0, config)
    experts, shape = experts_of(engine), engine._parts.model.config
    layers, device = len(shape.moe_layers), engine._parts.device
    first = torch.arange(shape.top_k).repeat(1, layers, 1, 1)
    experts.override = ReplayedRouting(first, torch.full(first.shape, 1.0 / shape.top_k), device)
    request = engine.submit([5], replace(GREEDY, max_tokens=6))
    run_all(engine)
    scores = engine._parts.residency.tables.scores  # type: ignore[union-attr]
    assert bool((scores[:, : shape.top_k] > 0).all()) and not bool(scores[:, shape.top_k :].any())
    assert request.output_ids != resident_tokens(qwen3, [5], 6)
    experts.override = None
    assert answer(engine, [5], replace(GREEDY, max_tokens=6)).output_ids == resident_tokens(qwen3, [5], 6)


def test_the_miss_rate_follows_what_happens(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.0, config)
    experts = experts_of(engine)
    before = experts._miss_rate
    assert before == pytest.approx(1.0 - engine.snapshot().resident_share)
    request = answer(engine, [1, 2, 3, 4])
    hits = request.expert_hits / request.expert_uses
    assert experts._miss_rate != before
    assert abs(experts._miss_rate - (1.0 - hits)) < abs(1.0 - (1.0 - hits)), "it has come nearer to the share of misses than to 1"


def decoded(engine: Engine) -> list[int]:
    """Rows of every decode step that the device is asked for from now on, those launched ahead included."""
    runner, rows = engine._parts.runner, []
    decode = runner._decode  # type: ignore[union-attr]

    def watch(count: int) -> torch.Tensor:
        rows.append(count)
        return decode(count)

    runner._decode = watch  # type: ignore[method-assign, union-attr]
    return rows


def test_the_next_step_is_launched_before_the_host_knows_the_token(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.3, config)
    engine.submit([5, 6, 7], replace(GREEDY, max_tokens=12))
    engine.step()  # the prompt
    rows, taken = decoded(engine), []
    while engine.has_work:
        before = len(rows)
        engine.step()
        taken.append(len(rows) - before)
    # Each step but the first finds its result and launches the next; the last but one knows that no other follows.
    assert len(taken) == 11 and sum(taken) <= 11 + 3, "steps were computed in vain"
    assert any(count == 2 for count in taken) and taken[-1] == 0
    assert_all_free(engine)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_in_vain_change_nothing(qwen3: Path, seed: int, config: EngineConfig) -> None:
    """Sequences come and go and are cancelled in mid-answer, beside a random adjuster: each time what was launched is not needed."""
    engine = load_engine(qwen3, 0.1, replace(config, adjuster=adversary(seed)))
    first = engine.submit([3, 1, 4, 1, 5], replace(GREEDY, max_tokens=30))
    late, cancelled, sampled = None, None, None
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if len(first.output_ids) == 6 and late is None:
            late = engine.submit([2, 7], replace(GREEDY, max_tokens=10))
            cancelled = engine.submit([9, 9, 9], replace(GREEDY, max_tokens=25))
        if cancelled is not None and len(cancelled.output_ids) == 5 and cancelled.finish_reason is None:
            engine.cancel(cancelled)
            sampled = engine.submit([8, 8], replace(GREEDY, temperature=0.9, seed=1, max_tokens=6))
    assert late is not None and cancelled is not None and sampled is not None
    assert first.output_ids == resident_tokens(qwen3, [3, 1, 4, 1, 5], 30)
    assert late.output_ids == resident_tokens(qwen3, [2, 7], 10)
    assert cancelled.output_ids == resident_tokens(qwen3, [9, 9, 9], len(cancelled.output_ids))
    requests = (first, late, cancelled, sampled)
    assert sum(request.expert_uses for request in requests) == engine.snapshot().expert_uses, "a step in vain was counted"
    assert sum(request.expert_hits for request in requests) == engine.snapshot().expert_hits
    assert_all_free(engine)


def test_pages_that_move_between_a_step_and_the_next(qwen3: Path, config: EngineConfig) -> None:
    """What was launched ahead knows the old places; those after it must not."""
    engine = load_engine(qwen3, 0.5, config)
    request = engine.submit([5, 6, 7], replace(GREEDY, max_tokens=40))
    blocks, pool = engine._parts.blocks, engine._parts.pool
    while engine.has_work:
        engine.step()
        if not engine.has_work:
            break
        held = [block for sequence in engine._sequences.values() for block in sequence.blocks]
        pages = [page for block in held for page in block.pages]
        if pool.allocator.available(PageKind.KV) >= len(pages):
            blocks.move(pages)
        engine.check_integrity()
    assert request.output_ids == resident_tokens(qwen3, [5, 6, 7], 40)
    assert_all_free(engine)


def test_a_sampled_token_is_not_guessed(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.3, config)
    engine.submit([5, 6, 7], replace(GREEDY, temperature=1.5, seed=3, max_tokens=8))
    engine.step()
    rows = decoded(engine)
    run_all(engine)
    assert rows == [1] * 7


def test_a_recorder_sees_every_step(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.3, config)
    request = engine.submit([5, 6, 7], replace(GREEDY, max_tokens=10))
    for _ in range(4):
        engine.step()
    seen: list[int] = []
    with engine.recording(lambda layer, ids, weights: seen.append(layer)):
        run_all(engine)
    layers = len(engine._parts.model.config.moe_layers)
    assert len(seen) == layers * 6, "a step that was launched ahead was taken unseen"
    assert request.output_ids == resident_tokens(qwen3, [5, 6, 7], 10)


def test_a_replayed_routing_goes_step_by_step_whatever_is_launched_ahead(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 1.0, config)
    experts, shape = experts_of(engine), engine._parts.model.config
    layers, top_k = len(shape.moe_layers), shape.top_k
    ids = torch.stack([torch.arange(step % 3, step % 3 + top_k).repeat(layers, 1, 1) for step in range(9)])
    experts.override = ReplayedRouting(ids, torch.full(ids.shape, 1.0 / top_k), engine._parts.device)
    request = engine.submit([5], replace(GREEDY, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.cancel(request)
    other = engine.submit([6], replace(GREEDY, max_tokens=30))
    engine.step()
    scores = engine._parts.residency.tables.scores  # type: ignore[union-attr]
    engine._parts.residency.pull()  # type: ignore[union-attr]
    assert int(experts.override.at) in (6, 7), "the step in vain was not taken back"
    assert other.finish_reason is None and bool((scores[:, : top_k + 2] > 0).all())
    engine.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_guesses_change_no_text(half: Path, qwen3: Path, share: float, config: EngineConfig) -> None:
    prompt = [3, 50, 7, 99, 12, 64]
    for folder in (qwen3, half):
        texts, fetched = [], []
        for prediction in (False, True):
            engine = load_engine(folder, share, replace(config, prediction=prediction))
            texts.append(answer(engine, prompt).output_ids)
            fetched.append(experts_of(engine).fetched)
            assert_all_free(engine)
        assert texts[0] == texts[1] and len(texts[0]) == 20
        assert fetched[1] != fetched[0] or share == 1.0, "nothing was guessed"
        assert share < 1.0 or fetched == [0, 0]


def test_guesses_stand_a_random_adjuster_and_a_second_sequence(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.1, replace(config, prediction=True, adjuster=adversary(4)))
    first = engine.submit([3, 1, 4, 1, 5], replace(GREEDY, max_tokens=25))
    for _ in range(8):
        engine.step()
        engine.check_integrity()
    second = engine.submit([2, 7], replace(GREEDY, max_tokens=6))
    run_all(engine)
    assert first.output_ids == resident_tokens(qwen3, [3, 1, 4, 1, 5], 25)
    assert second.output_ids == resident_tokens(qwen3, [2, 7], 6)
    assert first.expert_hits + second.expert_hits == engine.snapshot().expert_hits
    assert_all_free(engine)


def test_buffers_come_back_for_a_conversation_that_needs_their_pages(tmp_path: Path, config: EngineConfig) -> None:
    """They hold more than the least while there is room; the last blocks of the longest conversation are in that."""
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", num_experts=32, num_experts_per_tok=2)
    engine = load_engine(folder, 0.0, replace(config, context=508, device_batch_tokens=256))
    prompt = [(7 * i + i * i) % 128 for i in range(480)]  # whole blocks, so that the first token said needs another
    request = engine.submit(prompt, replace(GREEDY, max_tokens=28))
    run_all(engine)
    assert request.output_ids == resident_tokens(folder, prompt, 28)
    assert engine.snapshot().preemptions == 0
    assert_all_free(engine)


def test_a_step_in_vain_leaves_the_ranking_as_it_was(qwen3: Path, config: EngineConfig) -> None:
    scores = []
    for ahead in (True, False):
        engine = load_engine(qwen3, 1.0, config)
        if not ahead:
            engine._parts.runner.launch_ahead = None  # type: ignore[method-assign, assignment]
        for prompt in ([5, 6, 7], [9, 4]):
            request = engine.submit(prompt, replace(GREEDY, max_tokens=30))
            while len(request.output_ids) < 6:
                engine.step()
            engine.cancel(request)
        answer(engine, [1, 2], replace(GREEDY, max_tokens=3))
        scores.append(engine._parts.residency.tables.scores.cpu())  # type: ignore[union-attr]
        engine.close()
    assert torch.equal(*scores), "what was computed in vain was counted"


def test_graphs_of_a_recording_go_with_it(qwen3: Path, config: EngineConfig) -> None:
    """A graph reads the recording where it lay when it was captured; another one may lie there later."""
    engine = load_engine(qwen3, 1.0, config)
    runner, experts = engine._parts.runner, experts_of(engine)
    assert isinstance(runner, DeviceRunner)
    captured: list[object] = []

    class Graph:
        def replay(self) -> None:
            pass

    def capture(rows: int) -> _Captured:
        captured.append(experts.override)
        return _Captured(Graph(), torch.zeros(rows, 1))  # type: ignore[arg-type]

    runner._capture = capture  # type: ignore[method-assign]
    ids = torch.arange(3).repeat(1, 4, 1, 1)
    runner._replay(1)
    for _ in range(3):
        experts.override = ReplayedRouting(ids, torch.ones(ids.shape), engine._parts.device)
        for _ in range(2):
            runner._replay(1)
        runner._replay(2)
        assert len(runner._graphs) == 3
    experts.override = None
    runner._replay(1)
    assert len(captured) == 1 + 3 * 2 and len({id(override) for override in captured}) == 4
    engine.close()
