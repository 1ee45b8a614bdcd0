"""The memory ceiling moves in the middle of answers: same text, memory really given back, refusals that change nothing."""

from __future__ import annotations

import itertools
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil
import pytest
import torch
from elastic import CONTEXT, CeilingMover, adversary, converse, prompts_of
from engines import GREEDY, answer, assert_all_free, load_engine, resident_tokens, run_all
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.adjuster import Decision, hold
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.backing import PlainBacking
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_models.errors import DoesNotFitError, UsageError

DEVICES = [
    "cpu",
    "emulated",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.fixture(params=DEVICES)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24, max_batch_tokens=24)


def _room_for_all(engine: Engine) -> int:
    """A ceiling under which all experts fit into the pool, and somewhat more."""
    residency = engine._parts.residency
    return engine.info.memory_bytes + residency.total * residency.pages_per_expert * engine.info.page_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_ceilings_at_random_steps(
    family: str, seed: int, config: EngineConfig, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    engine = load_engine(checkpoints[family], 0.5, replace(config, adjuster=adversary(seed)) if seed else config)
    mover = CeilingMover(engine, seed, highest=_room_for_all(engine))
    assert converse(engine, each_step=mover) == expected[family]
    assert len(mover.changes) > 20 and mover.refused > 2
    assert any(c.retired_experts for c in mover.changes) and any(c.moved_bytes for c in mover.changes)
    if not engine._parts.pool.data.is_cuda:
        assert any(c.returned_bytes for c in mover.changes) and any(c.taken_bytes for c in mover.changes)
    engine.close()
    engine.check_integrity()
    assert engine.snapshot().free_bytes == engine.info.pool_bytes == engine._parts.pool.num_bytes


def test_lowered_and_raised_in_mid_answer_the_text_is_the_same(qwen3: Path, config: EngineConfig) -> None:
    prompt = prompts_of()[0]
    engine = load_engine(qwen3, 1.0, config)
    first = engine.info
    request = engine.submit(prompt, replace(GREEDY, max_tokens=40))
    while len(request.output_ids) < 15:
        engine.step()
    lowered = engine.set_memory(engine.least_memory)
    assert lowered.pool_bytes < first.pool_bytes and lowered.retired_experts > 0
    assert engine.info.memory_bytes == lowered.memory_bytes < first.memory_bytes
    assert engine.info.context_limit <= first.context_limit
    resident = engine.snapshot().resident_experts
    while len(request.output_ids) < 30:
        engine.step()
        engine.check_integrity()
    raised = engine.set_memory(first.memory_bytes)
    assert (raised.memory_bytes, raised.pool_bytes) == (first.memory_bytes, first.pool_bytes)
    run_all(engine)
    assert request.output_ids == resident_tokens(qwen3, prompt, 40)
    assert engine.info == first
    assert engine.snapshot().resident_experts > resident, "no expert came back"
    assert_all_free(engine)


def test_the_ceiling_can_be_raised_beyond_the_first_one(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.0, config)
    before = engine.snapshot()
    change = engine.set_memory(_room_for_all(engine))
    assert change.pool_bytes > before.pool_bytes and change.context_limit >= engine.info.context_limit
    request = answer(engine, prompts_of()[0], replace(GREEDY, max_tokens=60))
    assert engine.snapshot().resident_experts > before.resident_experts
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 60)
    engine.close()
    assert engine.snapshot().free_bytes == engine.info.pool_bytes


def test_a_conversation_kept_for_reuse_survives_where_experts_can_make_room(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 1.0, config)
    first = answer(engine, prompts_of()[1])
    change = engine.set_memory(engine.info.memory_bytes - engine.info.pool_bytes // 3)
    assert change.retired_experts > 0 and change.evicted_tokens == 0
    second = answer(engine, [*prompts_of()[1], *first.output_ids, 9])
    assert second.timings.cached_tokens == 9 + 19
    assert second.output_ids == resident_tokens(qwen3, [*prompts_of()[1], *first.output_ids, 9], 20)


def test_the_least_ceiling_is_the_least(qwen3: Path, config: EngineConfig) -> None:
    """One byte below is refused with that number, the number itself is accepted, and the answer goes on."""
    engine = load_engine(qwen3, 1.0, config)
    idle = engine.least_memory
    request = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=60))
    while not request.output_ids:
        engine.step()
    least = engine.least_memory
    assert least >= idle
    with pytest.raises(DoesNotFitError, match="What is running needs") as caught:
        engine.set_memory(least - 1)
    said = int(re.search(r"at least ([\d,]+) MiB", caught.value.what)[1].replace(",", ""))  # type: ignore[index]
    assert (said - 1) << 20 < least <= said << 20
    assert caught.value.hint is not None and f"{said}MiB" in caught.value.hint
    engine.set_memory(least)
    run_all(engine)
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 60)
    assert engine.least_memory == idle
    with pytest.raises(DoesNotFitError, match="The model needs"):
        engine.set_memory(idle - 1)


def test_an_answer_without_an_end_of_its_own_ends_with_the_smaller_context(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", max_position_embeddings=4096)
    engine = load_engine(folder, 1.0, EngineConfig(max_batch_tokens=64))
    request = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=None))
    while len(request.output_ids) < 5:
        engine.step()
    change = engine.set_memory(engine.least_memory)
    assert change.context_limit < 4096
    assert any("allows" in notice for notice in engine.info.notices)
    run_all(engine)
    assert request.finish_reason == "length" and request.num_tokens == change.context_limit
    count = len(request.output_ids)
    assert request.output_ids == resident_tokens(folder, prompts_of()[0], count)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_ceiling_that_is_no_size_is_refused(wrong: int, qwen3: Path) -> None:
    with load_engine(qwen3, 0.5, EngineConfig(context=CONTEXT)) as engine, pytest.raises(UsageError, match="positive"):
        engine.set_memory(wrong)


def test_more_than_the_machine_has_is_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_engine(qwen3, 0.0, EngineConfig(context=CONTEXT)) as engine:
        before = engine.snapshot()
        monkeypatch.setattr("rimuru_cli.engine.ceiling._free_bytes", lambda parts: 4096)
        with pytest.raises(DoesNotFitError, match="only 0 MiB are free"):
            engine.set_memory(engine.info.memory_bytes + (64 << 20))
        assert engine.snapshot() == before


def test_a_system_that_has_no_more_memory_after_all_leaves_everything_as_it_was(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(qwen3, 0.0, EngineConfig(context=CONTEXT))
    request = engine.submit(prompts_of()[0], GREEDY)
    engine.step()
    before = engine.snapshot()

    def refuse(num_bytes: int) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(engine._parts.pool._backing, "resize", refuse)
    with pytest.raises(DoesNotFitError, match="no more"):
        engine.set_memory(engine.info.memory_bytes + (1 << 20))
    assert engine.snapshot() == before
    run_all(engine)
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 20)


def test_a_closed_engine_has_no_ceiling(qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.5, EngineConfig(context=CONTEXT))
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.set_memory(1 << 40)


def test_where_memory_cannot_be_given_back_the_person_is_told(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rimuru_cli.engine.memory.page_pool.backing_for",
        lambda reserve, num_bytes, device: PlainBacking(num_bytes, device, "this GPU's driver has no virtual memory"),
    )
    engine = load_engine(qwen3, 1.0, EngineConfig(context=CONTEXT))
    first = engine.info
    assert not any("virtual memory" in notice for notice in first.notices)
    change = engine.set_memory(engine.least_memory)
    assert change.returned_bytes == 0 and change.pool_bytes < first.pool_bytes
    assert engine.snapshot().withheld_bytes == first.pool_bytes - change.pool_bytes
    assert any("virtual memory" in notice and "without giving it back" in notice for notice in engine.info.notices)
    request = answer(engine, prompts_of()[0])
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 20)
    engine.set_memory(first.memory_bytes)
    assert engine.info == first and engine.snapshot().withheld_bytes == 0


def test_memory_really_goes_back_to_the_system(tmp_path: Path) -> None:
    """With experts of some size: the process shrinks by what the ceiling was lowered."""
    folder = write_tiny_checkpoint(tmp_path / "big", "qwen3_moe", moe_intermediate_size=512, hidden_size=512, num_experts=16)
    engine = Engine.load(folder, EngineConfig(device="cpu", context=64, resident_share=1.0))
    process = psutil.Process()
    pool, before = engine.info.pool_bytes, process.memory_info().rss
    change = engine.set_memory(engine.least_memory)
    assert change.returned_bytes == pool - change.pool_bytes > 64 << 20
    given = before - process.memory_info().rss
    assert given > 0.8 * change.returned_bytes - (8 << 20)
    engine.close()


def test_scattered_pages_are_gathered_before_a_ceiling_is_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that lie between others leave gaps when they end; what is left over is moved together."""
    gathered: list[int] = []
    gather = KVBlocks.gather
    monkeypatch.setattr(KVBlocks, "gather", lambda blocks: gathered.append(gather(blocks)) or gathered[-1])
    # Experts leave at once, and those that stay lie high, so that conversations take the low pages which a smaller pool will consist of.
    shrink = Decision(100, 0, "sequences need pages")
    config = EngineConfig(device="cpu", context=64, max_batch_tokens=64, block_tokens=2, adjuster=lambda stats: shrink)
    engine = load_engine(qwen3, 1.0, config)
    answer(engine, [1], replace(GREEDY, max_tokens=2))
    engine._allocator.withhold(range(140))
    engine._parts.residency.move_from(0)
    engine._allocator.release(range(140))
    prompts = [[i + 1, 2, 3] for i in range(3)]
    requests = [engine.submit(prompt, replace(GREEDY, max_tokens=61)) for prompt in prompts]
    for _ in range(50):
        engine.step()
    for request in requests[1:]:
        engine.cancel(request)
    engine._parts.blocks.evict(1 << 30)
    assert engine._allocator.gaps(PageKind.KV) > 0
    engine.set_memory(engine.least_memory)
    engine.check_integrity()
    assert gathered and gathered[0] > 0, "nothing was scattered, so nothing was tested"
    run_all(engine)
    assert requests[0].output_ids == resident_tokens(qwen3, prompts[0], 61)
    assert_all_free(engine)


def test_ctrl_c_waits_until_the_ceiling_has_moved(qwen3: Path, config: EngineConfig) -> None:
    """Whatever it comes into the middle of: pages have owners, memory is where the tables say, and the answer goes on."""
    engine = load_engine(qwen3, 0.5, config)
    request = engine.submit(prompts_of()[1], replace(GREEDY, max_tokens=60))
    highest, low = _room_for_all(engine), False
    for nth in range(1, 400, 9):
        calls = itertools.count(1)

        def press(frame: FrameType, event: str, arg: object, calls: Iterator[int] = calls, nth: int = nth) -> None:
            if next(calls) == nth:
                signal.raise_signal(signal.SIGINT)

        engine.step()
        low = not low
        ceiling, was = engine.least_memory if low else highest, engine.info.memory_bytes
        before = sys.gettrace()
        pressed = False
        try:
            sys.settrace(press)
            engine.set_memory(ceiling)
        except KeyboardInterrupt:
            pressed = True
        finally:
            sys.settrace(before)
        engine.check_integrity()
        assert pressed == (next(calls) > nth)
        assert engine.info.memory_bytes == ceiling or (engine.info.memory_bytes == was and nth < 20), "only before it began"
        assert engine.info.pool_bytes == engine._parts.plan.pool == engine._parts.pool.num_bytes
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run_all(engine)
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[1], 60)
    assert_all_free(engine)


@pytest.mark.parametrize("kind", [PageKind.KV, PageKind.EXPERT])
def test_a_copy_that_fails_on_the_way_leaves_no_page_behind(
    kind: PageKind, qwen3: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(qwen3, 1.0, replace(config, adjuster=hold))
    request = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=40))
    while len(request.output_ids) < 5:
        engine.step()
    pool, before = engine._parts.pool, engine.info
    move = pool.move

    def fail(moved: PageKind, *args: object) -> None:
        if moved is kind:
            raise torch.OutOfMemoryError("no room for the copy")
        move(moved, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(pool, "move", fail)
        if kind is PageKind.KV:
            engine.set_memory(engine.least_memory)
        residency = engine._parts.residency
        residency.shrink(1)
        residency.move(residency.entries[residency.resident][0].tolist())
    engine.check_integrity()
    assert engine.info == before and pool.num_bytes == before.pool_bytes
    run_all(engine)
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 40)
    assert_all_free(engine)


def test_an_answer_without_an_end_of_its_own_goes_on_under_a_higher_ceiling(tmp_path: Path, config: EngineConfig) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", max_position_embeddings=4096)
    engine = load_engine(folder, 0.0, replace(config, context=600, max_batch_tokens=64, device_batch_tokens=64))
    first = engine.info.context_limit
    assert first < 600
    prompt = [(7 * i + i * i) % 128 for i in range(first - 8)]
    endless, promised = (engine.submit(prompt, replace(GREEDY, max_tokens=count)) for count in (None, 50))
    while len(endless.output_ids) < 3:
        engine.step()
    engine.set_memory(_room_for_all(engine))
    assert engine.info.context_limit == 600
    run_all(engine)
    assert endless.num_tokens == 600 and promised.num_tokens == first
    assert endless.output_ids == resident_tokens(folder, prompt, 600 - len(prompt))
    assert_all_free(engine)
