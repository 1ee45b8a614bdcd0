"""Models with recurrent layers on the way of a GPU, emulated on the CPU, and on a GPU where there is one: the text of plain memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import CONTEXT, CeilingMover, adversary, converse, prompts_of
from engines import GREEDY, answer, load_engine, resident_tokens, run_all
from hybrids import NAMES, assert_merged, write_hybrid
from tiny_checkpoints import HYBRIDS, write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device.runner import DeviceRunner
from rimuru_cli.engine.device.states import DeviceStates
from rimuru_cli.engine.engine import Engine

DEVICES = ["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])]


@pytest.fixture(params=DEVICES)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24)


def runner_of(engine: Engine) -> DeviceRunner:
    runner = engine._parts.runner
    assert isinstance(runner, DeviceRunner)
    return runner


def states_of(engine: Engine) -> DeviceStates:
    states = runner_of(engine)._states
    assert states is not None
    return states


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_every_pool_size_gives_the_resident_text(name: str, share: float, hybrid: Any, config: EngineConfig) -> None:
    folder, said = hybrid(name)
    engine = load_engine(folder, share, config)
    assert converse(engine) == said
    assert_merged(engine)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_shrinks_and_expands_at_every_step(name: str, seed: int, hybrid: Any, config: EngineConfig) -> None:
    folder, said = hybrid(name)
    engine = load_engine(folder, 0.4, replace(config, adjuster=adversary(seed)))
    assert converse(engine) == said
    assert len(engine.snapshot().events) > 5, "the adversary moved nothing"
    assert_merged(engine)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3_next"])
def test_a_ceiling_that_moves_all_the_time(name: str, hybrid: Any, config: EngineConfig) -> None:
    folder, said = hybrid(name)
    engine = load_engine(folder, 0.5, replace(config, adjuster=adversary(3)))
    mover = CeilingMover(engine, seed=5, highest=engine.info.memory_bytes + engine.info.pool_bytes // 2)
    assert converse(engine, each_step=mover) == said
    assert mover.refused and any(change.moved_bytes for change in mover.changes)
    assert_merged(engine)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("pinned", [0.0, 0.5])
def test_experts_that_stay_on_disk(name: str, pinned: float, hybrid: Any, config: EngineConfig) -> None:
    """A step that lacked one is computed again, from the states before it."""
    folder, said = hybrid(name)
    with load_engine(folder, 0.0, config) as engine:
        whole = engine.info.pinned_bytes
    engine = load_engine(folder, 0.3, replace(config, pinned_bytes=int(pinned * whole), adjuster=adversary(1)))
    assert converse(engine) == said
    assert engine.snapshot().host_brought > 0, "the host brought nothing, so nothing was tested"
    assert_merged(engine)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_that_lacked_an_expert_is_taken_back(name: str, hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured step is on a GPU: everything is queued, and only then it shows that an expert was not there."""
    folder, said = hybrid(name)
    engine = load_engine(folder, 0.3, EngineConfig(device="emulated", context=CONTEXT, device_batch_tokens=24, pinned_bytes=0))
    runner, experts = runner_of(engine), engine._parts.experts
    dice = random.Random(3)

    def served(rows: int) -> torch.Tensor:
        # The reference cannot compute without an expert, so the host brings it here too, and the step is found wanting all the same.
        experts._service.serving = True  # type: ignore[union-attr]
        return runner._model.logits(runner._run(rows))

    monkeypatch.setattr(runner, "_graphs_wanted", True)
    monkeypatch.setattr(runner, "_replay", served)
    monkeypatch.setattr(experts, "lacked", lambda: dice.random() < 0.4)
    taken_back: list[int] = []
    undo = states_of(engine).undo
    whole = undo.take_back

    def count() -> None:
        taken_back.append(len(undo._states.ahead))
        whole()

    monkeypatch.setattr(undo, "take_back", count)
    assert converse(engine) == said
    assert sum(taken_back) > 10
    assert_merged(engine)


@pytest.mark.parametrize("more", range(6))
def test_a_text_that_is_resumed_beside_another_counts_with_all_its_blocks(more: int, hybrid: Any, config: EngineConfig) -> None:
    """Blocks that nobody held are held again, so they cannot be given up any more for what a step needs: wherever the pool ends, either
    both run or one waits."""
    folder, _ = hybrid("granitemoehybrid")
    config = replace(config, device_batch_tokens=16)
    with load_engine(folder, 0.0, config) as engine:
        least, huge = engine.info.pool_bytes, engine._parts.pool.geometry.huge_page_bytes
    engine = Engine.load(folder, replace(config, pool_bytes=least + more * huge, poison=True))
    opening, beside = [(7 * i) % 128 for i in range(90)], [(5 * i + 3) % 128 for i in range(20)]
    said = answer(engine, opening).output_ids
    first = engine.submit(beside, replace(GREEDY, max_tokens=40))
    for _ in range(6):
        engine.step()
    turn = [*opening, *said, 1, 2, 3, 4, 5]
    second = engine.submit(turn, replace(GREEDY, max_tokens=10))
    run_all(engine)
    assert first.output_ids == resident_tokens(folder, beside, 40)
    assert second.output_ids == resident_tokens(folder, turn, 10)
    assert_merged(engine)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["2:3", "granitemoehybrid"])
def test_sequences_side_by_side(name: str, count: int, hybrid: Any, config: EngineConfig) -> None:
    folder, _ = hybrid(name)
    engine = load_engine(folder, 1.0, replace(config, context=96, device_batch_tokens=40))
    prompts = [[(7 * i + 31 * p + 3) % 128 for i in range(5 + 4 * p)] for p in range(count)]
    requests = [engine.submit(prompt, replace(GREEDY, max_tokens=10 + 3 * p)) for p, prompt in enumerate(prompts)]
    run_all(engine)
    for p, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert request.output_ids == resident_tokens(folder, prompt, 10 + 3 * p)
    assert_merged(engine)


def decoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every decode step that the device is asked for from now on, those launched ahead included."""
    runner, rows = runner_of(engine), []
    decode = runner._decode

    def watch(count: int) -> torch.Tensor:
        rows.append(count)
        return decode(count)

    monkeypatch.setattr(runner, "_decode", watch)
    return rows


def test_the_next_step_is_launched_ahead_where_it_can_be_taken_back(
    hybrid: Any, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = hybrid("qwen3_5_moe")
    engine = load_engine(folder, 1.0, config)
    undo = states_of(engine).undo
    for sequences, room in ((1, 8), (3, 8), (3, 2)):
        monkeypatch.setattr(undo, "sequences", min(room, undo.sequences))
        requests = [engine.submit([5 + s, 6, 7], replace(GREEDY, max_tokens=12)) for s in range(sequences)]
        engine.step()  # the prompts
        with monkeypatch.context() as patch:
            rows, taken = decoded(engine, patch), []
            while engine.has_work:
                before = len(rows)
                engine.step()
                taken.append(len(rows) - before)
        assert len(taken) == 11
        ahead = sequences <= room
        assert (2 in taken) == ahead, "launched ahead, or not"
        assert [r.output_ids for r in requests] == [resident_tokens(folder, [5 + s, 6, 7], 12) for s in range(sequences)]
    assert_merged(engine)


@pytest.mark.parametrize("what", ["cancel", "another", "preempt", "stop", "ceiling", "forget"])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "granitemoehybrid"])
def test_a_step_computed_in_vain_leaves_no_trace(name: str, what: str, hybrid: Any, config: EngineConfig) -> None:
    """States go back, whoever takes them next: the sequence itself, a bookmark, or another sequence that resumes from it."""
    folder, _ = hybrid(name)
    engine = load_engine(folder, 1.0, config)
    prompt, other = prompts_of()[1], prompts_of()[2]
    request = engine.submit(prompt, replace(GREEDY, max_tokens=40))
    expected = resident_tokens(folder, prompt, 40)
    if what == "stop":
        end = expected.index(expected[17])  # the likeliest next token ends the answer, and a step behind it is queued
        engine.eos_ids = frozenset({expected[end]})
        request = _anew(engine, request, replace(GREEDY, max_tokens=40, ignore_eos=False))
        run_all(engine)
        assert request.output_ids == expected[:end]
    while what != "stop" and len(request.output_ids) < 15:
        engine.step()
    follower = None
    if what == "cancel":
        assert engine._parts.recurrent is not None and engine._parts.recurrent.states.ahead, "no step was launched ahead"
        engine.cancel(request)
    elif what == "another":
        follower = engine.submit(other, GREEDY)
    elif what == "preempt":
        engine._scheduler._preempt(engine._scheduler.running[-1])
    elif what == "ceiling":
        engine.set_memory(engine.least_memory)
        follower = engine.submit(other, GREEDY)
    elif what == "forget":
        engine.forget()
    engine.check_integrity()
    run_all(engine)
    if what not in ("cancel", "stop"):
        assert request.output_ids == expected
    if follower is not None:
        assert follower.output_ids == resident_tokens(folder, other, 20)
    engine.eos_ids = frozenset()
    text = [*prompt, *request.output_ids, 9, 8]
    again = answer(engine, text)
    assert again.timings.cached_tokens >= len(prompt), "nothing was resumed from, so nothing was tested"
    assert again.output_ids == resident_tokens(folder, text, 20)
    assert_merged(engine)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "granitemoehybrid"])
def test_what_is_kept_of_a_cancelled_answer_is_what_was_asked_for(
    name: str, hybrid: Any, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the step behind it that was queued already."""
    folder, _ = hybrid(name)
    kept = []
    for ahead in (False, True):
        engine = load_engine(folder, 1.0, config)
        if not ahead:
            monkeypatch.setattr(runner_of(engine), "launch_ahead", lambda likeliest, arriving: None)
        request = engine.submit(prompts_of()[1], replace(GREEDY, max_tokens=40))
        while len(request.output_ids) < 15:
            engine.step()
        recurrent = engine._parts.recurrent
        assert recurrent is not None and bool(recurrent.states.ahead) == ahead
        engine.cancel(request)
        bookmark = max(recurrent.bookmarks.all(), key=lambda bookmark: bookmark.length)
        assert bookmark.length == len(prompts_of()[1]) + 14
        kept.append([state.clone() for state in (*bookmark.states.recurrent, *bookmark.states.convolution)])
        assert_merged(engine)
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def _anew(engine: Engine, request: Any, params: Any) -> Any:
    engine.cancel(request)
    return engine.submit(request.prompt_ids, params)


@pytest.mark.parametrize("torn", ["forward", "sample"])
def test_a_step_that_fails_half_way_costs_states_but_no_text(
    torn: str, hybrid: Any, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = hybrid("qwen3_5_moe")
    engine = load_engine(folder, 0.5, config)
    runner = runner_of(engine)
    monkeypatch.setattr(runner, "_graphs_wanted", False)  # a graph cannot fail half-way
    requests = [engine.submit(prompt, replace(GREEDY, max_tokens=40)) for prompt in prompts_of()[:2]]
    steps = 0

    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    while engine.has_work:
        steps += 1
        if steps in (2, 9, 10, 30):
            with monkeypatch.context() as patch:
                if torn == "sample":
                    patch.setattr("rimuru_cli.engine.engine.sample", fail)
                else:
                    patch.setattr(type(engine._parts.model.layers[2].mixer), "forward", _fails_in(2, fail))  # type: ignore[attr-defined]
                with suppress(OSError):
                    engine.step()
        else:
            engine.step()
        engine.check_integrity()
    assert requests[0].output_ids == said[0] and requests[1].output_ids == said[1][:40]
    assert_merged(engine)


def _fails_in(layer: int, fail: Callable[..., None]) -> Callable[..., torch.Tensor]:
    from rimuru_models.delta_net import GatedDeltaNet

    whole = GatedDeltaNet.forward

    def forward(self: GatedDeltaNet, *args: Any) -> torch.Tensor:
        if self.layer == layer:
            fail()
        return whole(self, *args)

    return forward


def test_long_prompts_leave_states_on_the_way_in_the_middle_of_a_step(hybrid: Any, config: EngineConfig) -> None:
    """Several sequences at once, some cut in the middle of their rows, one of a single row: each is resumed from what it left."""
    folder, _ = hybrid("qwen3_5_moe")
    engine = load_engine(folder, 1.0, replace(config, context=None, device_batch_tokens=128))
    engine._scheduler.interval = 32  # type: ignore[attr-defined]
    texts = [[(13 * i + 41 * p + i * i) % 128 for i in range(length)] for p, length in enumerate((90, 33, 70))]
    requests = [engine.submit(text, GREEDY) for text in texts]
    run_all(engine)
    assert [r.output_ids for r in requests] == [resident_tokens(folder, text, 20) for text in texts]
    lengths = {bookmark.length for bookmark in engine._parts.recurrent.bookmarks.all()}  # type: ignore[union-attr]
    assert {32, 64} <= lengths
    for text, shared in zip(texts, (70, 32, 66), strict=True):
        edited = [*text[:shared], 1, 2, 3, 4, 5, 6, 7, 8, 9]
        request = answer(engine, edited)
        assert request.timings.cached_tokens >= shared // 32 * 32 - 16
        assert request.output_ids == resident_tokens(folder, edited, 20)
    assert_merged(engine)


@pytest.mark.parametrize("family", HYBRIDS)
def test_half_precision_repeats_itself_exactly(family: str, tmp_path: Path, config: EngineConfig) -> None:
    """bfloat16 is computed in bfloat16 here, so the text may differ from float32's; it must still not depend on the pool."""
    folder = write_tiny_checkpoint(tmp_path / "half", family, dtype=torch.bfloat16)
    texts = [
        answer(load_engine(folder, share, replace(config, adjuster=adversary(seed))), prompts_of()[0]).output_ids
        for seed, share in enumerate((1.0, 0.4, 0.0))
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 20


def test_what_is_told_about_the_model(hybrid: Any, config: EngineConfig) -> None:
    engine = load_engine(hybrid("qwen3_5_moe")[0], 1.0, config)
    assert "Of this checkpoint, the part that reads images (2 tensors) is not used." in engine.info.notices
    request = engine.submit(prompts_of()[1], GREEDY)
    engine.step()
    kinds = engine.snapshot().bytes_by_kind
    mixer = engine._parts.model.config.recurrent
    assert mixer is not None and kinds["ssm"] >= 3 * mixer.state_bytes and kinds["conv"] >= 3 * 3 * mixer.conv_row_bytes(4)
    engine.cancel(request)
    assert_merged(engine)


def test_memory_of_a_hybrid_that_is_too_small_says_the_minimum(tmp_path: Path, config: EngineConfig) -> None:
    from rimuru_models.errors import DoesNotFitError

    with pytest.raises(DoesNotFitError, match=r"at least [\d,]+ MiB of device memory"):
        load_engine(write_hybrid(tmp_path, "1:1"), 0.0, replace(config, memory_bytes=1 << 20))
