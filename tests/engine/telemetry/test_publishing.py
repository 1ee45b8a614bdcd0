"""Engines that publish, and readers that look on: what is shown is what is there, and nothing of it disturbs an answer."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from elastic import CONTEXT, adversary, converse, prompts_of
from engines import GREEDY, load_engine, run_all
from hybrids import write_hybrid

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.link import LinkRates
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.telemetry import publish
from rimuru_cli.engine.telemetry.discovery import running_engines
from rimuru_cli.engine.telemetry.frame import BUFFER, CONV, EXPERT, KINDS, KV, SSM, Frame
from rimuru_cli.engine.telemetry.live import LiveSource
from rimuru_cli.engine.telemetry.publish import Publisher, try_to_publish

PATIENCE = 30.0


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame after each step, whatever that costs."""
    monkeypatch.setattr(publish, "_MOST_HZ", 1e6)
    monkeypatch.setattr(publish, "_SHARE", 1e6)


GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.fixture(params=["cpu", "emulated", GPU])
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LiveSource]:
    source = LiveSource(tmp_path / "run")
    yield source
    source.close()


def published(engine: Engine, tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "run", "chat", hz=1e6)
    engine.publish(publisher)
    return publisher


def wait_for(source: LiveSource, good: Callable[[Frame], bool]) -> Frame:
    """The first frame that is good; the test fails if none comes."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        frame = source.poll()
        if frame is not None and good(frame):
            return frame
        time.sleep(0.01)
    raise AssertionError("no such frame came")


def states_of(frame: Frame) -> list[tuple[int, int, str]]:
    """The map in the allocator's words."""
    names = ["expert" if kind == BUFFER else KINDS[kind] for kind in frame.pages.kind]
    return list(zip(frame.pages.offset.tolist(), frame.pages.size.tolist(), names, strict=True))


def pool_states(engine: Engine) -> list[tuple[int, int, str]]:
    pool = engine._parts.pool
    found = [(r.offset_bytes, r.length_bytes, r.state) for r in pool.allocator.regions() if r.offset_bytes < pool.num_bytes]
    return [(offset, size, "tail" if state == "unused" else state) for offset, size, state in found]


def test_every_frame_shows_the_pool_as_it_is(
    config: EngineConfig, qwen3: Path, tmp_path: Path, source: LiveSource, every_step: None, expected: dict[str, list[list[int]]]
) -> None:
    engine = load_engine(qwen3, 0.0, replace(config, adjuster=adversary(0)))
    publisher = published(engine, tmp_path)
    wait_for(source, lambda frame: True)
    step, seen = engine.step, 0

    def watched_step() -> list[object]:
        nonlocal seen
        outputs = step()
        frame = source.poll()
        if frame is not None and frame.counters.step == engine._work.steps:
            seen += 1
            assert states_of(frame) == pool_states(engine)
            for sequence in engine._scheduler.running:
                rows = frame.pages.owner == sequence.request.id
                for position, block in enumerate(sequence.blocks):
                    ours = np.flatnonzero(rows & (frame.pages.kind == KV) & (frame.pages.part == position * engine.info.block_tokens))
                    by_layer = dict(zip(frame.pages.layer[ours].tolist(), (frame.pages.offset[ours] // 256).tolist(), strict=True))
                    assert by_layer == dict(enumerate(block.pages))
        return outputs

    engine.step = watched_step  # type: ignore[method-assign, assignment]
    assert converse(engine) == expected["qwen3_moe"], "looking on changed the text"
    assert seen > 20 and publisher.failure is None
    engine.close()


@pytest.mark.parametrize("name", ["qwen3_next", "2:3"])
def test_recurrent_states_are_shown_where_they_are(
    name: str, config: EngineConfig, tmp_path: Path, source: LiveSource, every_step: None
) -> None:
    folder = write_hybrid(tmp_path / "model", name)
    engine = load_engine(folder, 0.4, replace(config, max_batch_tokens=24, adjuster=adversary(0)))
    publisher = published(engine, tmp_path)
    wait_for(source, lambda frame: True)
    step, seen = engine.step, 0

    def watched_step() -> list[object]:
        nonlocal seen
        outputs = step()
        frame = source.poll()
        if frame is not None and frame.counters.step == engine._work.steps:
            assert states_of(frame) == pool_states(engine)
            pages, recurrent = frame.pages, engine._parts.recurrent
            assert recurrent is not None
            for sequence in engine._scheduler.running:
                assert sequence.states is not None
                seen += 1
                ours = [page for run in sequence.states.ssm for page in run][: len(recurrent.states.places)]
                rows = np.searchsorted(pages.offset, np.array(ours) * 256)
                assert (pages.kind[rows] == SSM).all() and (pages.owner[rows] == sequence.request.id).all()
                assert pages.layer[rows].tolist() == list(recurrent.states.places)
                for layer, place in recurrent.states.places.items():
                    number, inside = divmod(place, recurrent.states.layout.run_layers)
                    conv = recurrent.states.layout.conv_pages(sequence.states.conv[number], inside)
                    rows = np.searchsorted(pages.offset, np.array(conv) * 256)
                    assert (pages.kind[rows] == CONV).all() and (pages.layer[rows] == layer).all()
                    assert pages.part[rows].tolist() == list(range(len(conv)))
        return outputs

    engine.step = watched_step  # type: ignore[method-assign, assignment]
    converse(engine)
    assert seen > 20 and publisher.failure is None
    frame = wait_for(source, lambda frame: frame.counters.step == engine._work.steps and not frame.busy)
    assert (frame.pages.owner[frame.pages.kind == SSM] == -1).all(), "what is kept to resume from belongs to nobody"
    engine.close()


def test_a_file_that_was_taken_away_comes_back(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_CHECK_SECONDS", 0.0)
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    published(engine, tmp_path)
    shutil.rmtree(tmp_path / "run")
    end = time.monotonic() + PATIENCE
    while not running_engines(tmp_path / "run") and time.monotonic() < end:
        time.sleep(0.01)
    (entry,) = running_engines(tmp_path / "run")
    assert entry.pid == os.getpid()
    engine.close()
    assert running_engines(tmp_path / "run") == []


def test_experts_are_shown_where_they_are(config: EngineConfig, qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    engine = load_engine(qwen3, 0.0, config)
    published(engine, tmp_path)
    wait_for(source, lambda frame: True)
    engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    frame = wait_for(source, lambda frame: frame.counters.step == engine._work.steps and frame.counters.tables_step == frame.counters.step)
    engine.check_integrity()
    residency, pages = engine._parts.residency, frame.pages
    assert np.array_equal(frame.experts.resident, residency.resident)
    for layer, expert in np.argwhere(residency.resident):
        rows = np.flatnonzero((pages.kind == EXPERT) & (pages.layer == layer) & (pages.owner == expert))
        assert (pages.offset[rows] // 256)[np.argsort(pages.part[rows])].tolist() == residency.entries[layer, expert].tolist()
    assert frame.experts.layer_uses is not None and frame.experts.layer_uses.sum() == engine.snapshot().expert_uses
    assert frame.experts.layer_hits is not None and frame.experts.layer_hits.sum() == engine.snapshot().expert_hits
    if frame.experts.hits is not None:
        assert np.array_equal(frame.experts.hits.sum(axis=1), frame.experts.layer_uses)
    assert (frame.experts.used_step <= frame.counters.step).all()
    counters, snapshot = frame.counters, engine.snapshot()
    assert (counters.free_bytes, counters.tail_bytes) == (snapshot.free_bytes, snapshot.tail_bytes)
    assert counters.cached_tokens > 0 and counters.running == 0 and not frame.busy
    assert counters.context_used == counters.cached_tokens, "one text is kept, and it is the longest"
    engine.close()


def test_the_link_of_a_device_is_shown(qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    engine = load_engine(qwen3, 0.0, EngineConfig(device="emulated", context=CONTEXT, device_batch_tokens=24))
    experts, host = engine._parts.experts, engine._parts.host
    assert isinstance(experts, DeviceExperts)
    experts.rates = LinkRates(fetch=10e9, copy=20e9, measured=True)
    published(engine, tmp_path)
    assert wait_for(source, lambda frame: True).engine.link_ceiling == 20e9
    engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    frame = wait_for(source, lambda frame: frame.counters.step == engine._work.steps)
    fetched = int(engine._parts.residency.tables.counters[:, 2].sum())  # type: ignore[attr-defined]
    assert fetched > 0 and frame.counters.link_bytes == host.bytes_read + fetched * host.expert_bytes
    engine.close()


def test_counters_and_events_follow_the_work(qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    engine = load_engine(qwen3, 0.3, EngineConfig(device="cpu", context=CONTEXT, adjuster=adversary(1)))
    published(engine, tmp_path)
    before = wait_for(source, lambda frame: True)
    assert before.counters.step == 0 and before.counters.ttft is None and before.counters.hit_rate is None
    prompt = prompts_of()[1]
    request = engine.submit(prompt, replace(GREEDY, max_tokens=10))
    run_all(engine)
    frame = wait_for(source, lambda frame: frame.counters.step == engine._work.steps)
    assert frame.counters.prefill_tokens == len(prompt)
    assert frame.counters.decode_tokens == 9
    assert frame.counters.ttft == request.timings.ttft_seconds
    assert frame.counters.link_bytes == engine.snapshot().expert_bytes_read
    numbers = [event.number for event in frame.events]
    assert numbers == list(range(numbers[-1] - len(numbers) + 1, numbers[-1] + 1)) and len(numbers) > 3
    assert [event.reason for event in frame.events] == [event.reason for event in engine.snapshot().events]
    assert frame.engine.floor == engine._parts.residency.floor and frame.engine.pid == os.getpid()
    engine.close()


def test_an_idle_engine_answers_a_reader_that_comes_late(qwen3: Path, tmp_path: Path) -> None:
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    published(engine, tmp_path)
    engine.submit(prompts_of()[1], GREEDY)
    run_all(engine)
    source = LiveSource(tmp_path / "run")
    frame = wait_for(source, lambda frame: frame.counters.step == engine._work.steps)
    kept = frame.pages.part[(frame.pages.kind == KV) & (frame.pages.owner == -1)]
    assert len(kept) and (kept >= 0).all(), "where kept blocks belong was never looked up while they were in use"
    source.close()
    engine.close()


def test_the_ceiling_changes_on_request(config: EngineConfig, qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    engine = load_engine(qwen3, 1.0, config)
    published(engine, tmp_path)
    first = wait_for(source, lambda frame: True).engine
    wanted = (first.ceiling_bytes + first.least_ceiling_bytes) // 2
    assert source.can_control and source.request_ceiling(wanted)
    frame = wait_for(source, lambda frame: frame.answer is not None)
    assert frame.answer is not None and frame.answer.ok and frame.answer.bytes_asked == wanted
    assert "ceiling" in frame.answer.text
    assert frame.engine.ceiling_bytes == wanted == engine.info.memory_bytes
    assert frame.engine.pool_bytes == sum(frame.pages.bytes_by_kind().values()) < first.pool_bytes
    assert states_of(frame) == pool_states(engine)
    assert source.request_ceiling(1)
    frame = wait_for(source, lambda frame: frame.answer is not None and frame.answer.bytes_asked == 1)
    assert frame.answer is not None and not frame.answer.ok and "at least" in frame.answer.text
    assert frame.engine.ceiling_bytes == wanted
    engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    engine.check_integrity()
    engine.close()


def test_a_request_is_obeyed_in_the_middle_of_an_answer(qwen3: Path, tmp_path: Path, source: LiveSource, every_step: None) -> None:
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    published(engine, tmp_path)
    first = wait_for(source, lambda frame: True).engine
    request = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=30))
    engine.step()
    assert source.request_ceiling(first.ceiling_bytes - first.pool_bytes // 4)
    run_all(engine)
    assert len(request.output_ids) == 30
    frame = wait_for(source, lambda frame: frame.answer is not None)
    assert frame.answer is not None and frame.answer.ok
    engine.close()


@pytest.mark.parametrize("value", [0, -1, 1 << 62, 1 << 200])
def test_absurd_requests_are_not_even_sent(value: int, qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    published(engine, tmp_path)
    assert not source.request_ceiling(engine.info.memory_bytes), "not attached yet"
    wait_for(source, lambda frame: True)
    assert not source.request_ceiling(value)
    engine.close()


def test_nothing_is_written_while_nobody_looks_on(qwen3: Path, tmp_path: Path, every_step: None) -> None:
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    publisher = published(engine, tmp_path)
    engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    assert publisher._number == 1, "one frame, from before the first step"
    engine.close()


def test_a_frame_that_outgrows_its_place_moves(
    qwen3: Path, tmp_path: Path, source: LiveSource, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_SLOT_SLACK", 0)
    engine = load_engine(qwen3, 0.3, EngineConfig(device="cpu", context=CONTEXT, adjuster=adversary(0)))
    publisher = published(engine, tmp_path)
    wait_for(source, lambda frame: True)
    name = next((tmp_path / "run").iterdir()).name
    for prompt in prompts_of():
        engine.submit(prompt, GREEDY)
        while engine.has_work:
            engine.step()
            source.poll()
    assert publisher.failure is None
    assert [path.name for path in (tmp_path / "run").iterdir()] != [name], "the place was large enough: this test tests nothing"
    wait_for(source, lambda frame: frame.counters.step == engine._work.steps)
    engine.close()


def test_a_failure_ends_the_publishing_and_not_the_answer(
    qwen3: Path, tmp_path: Path, source: LiveSource, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    publisher = published(engine, tmp_path)
    wait_for(source, lambda frame: True)

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(publisher._collector, "collect", broken)
    request = engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    assert len(request.output_ids) == GREEDY.max_tokens
    assert publisher.failure == "ZeroDivisionError: oh"
    assert list((tmp_path / "run").iterdir()) == []
    end = time.monotonic() + PATIENCE
    while source.state != "waiting" and time.monotonic() < end:
        source.poll()
    assert source.state == "waiting"
    engine.close()


def test_two_engines_side_by_side(qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    config = EngineConfig(device="cpu", context=CONTEXT)
    old, new = load_engine(qwen3, 1.0, config), load_engine(qwen3, 0.0, config)
    published(old, tmp_path)
    time.sleep(0.01)
    published(new, tmp_path)
    frame = wait_for(source, lambda frame: True)
    listed = source.engines()
    assert [entry.attached for entry in listed] == [True, False] and listed[0].started > listed[1].started
    assert frame.engine.engine_id == listed[0].engine_id and frame.engine.pool_bytes == new._parts.pool.num_bytes
    assert source.attach(listed[1].engine_id)
    assert wait_for(source, lambda frame: True).engine.pool_bytes == old._parts.pool.num_bytes
    assert not source.attach("0123456789abcdef")
    assert source.state == "live", "a wrong wish leaves things as they are"
    old.close()
    wait_for(source, lambda frame: frame.engine.engine_id == listed[0].engine_id)  # by itself
    new.close()
    new.close()
    assert running_engines(tmp_path / "run") == [] and list((tmp_path / "run").iterdir()) == []


def test_a_reader_waits_for_the_next_engine(qwen3: Path, tmp_path: Path, source: LiveSource) -> None:
    config = EngineConfig(device="cpu", context=CONTEXT)
    assert source.poll() is None and source.state == "waiting" and source.engines() == []
    seen = set()
    for _ in range(2):
        engine = load_engine(qwen3, 1.0, config)
        published(engine, tmp_path)
        seen.add(wait_for(source, lambda frame: True).engine.engine_id)
        engine.close()
        end = time.monotonic() + PATIENCE
        while source.state != "waiting" and time.monotonic() < end:
            source.poll()
        assert source.state == "waiting"
    assert len(seen) == 2
    source.close()
    assert source.poll() is None and not source.attach(seen.pop())


@pytest.mark.parametrize("obstacle", ["file", "link", "parent"])
def test_without_a_folder_the_engine_works_all_the_same(obstacle: str, qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if obstacle == "file":
        folder.write_text("x", encoding="utf-8")
    elif obstacle == "parent":
        (tmp_path / "blocked").write_text("x", encoding="utf-8")
        folder = tmp_path / "blocked" / "run"
    else:
        (tmp_path / "elsewhere").mkdir()
        try:
            folder.symlink_to(tmp_path / "elsewhere")
        except OSError:
            pytest.skip("no links here")
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    notice = try_to_publish(engine, folder, "chat")
    assert notice is not None and "dashboard" in notice and str(folder) in notice
    assert running_engines(folder) == []
    engine.submit(prompts_of()[0], GREEDY)
    run_all(engine)
    engine.close()


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_a_folder_open_to_others_is_closed_first(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o777)
    (tmp_path / "run").chmod(0o777)
    engine = load_engine(qwen3, 1.0, EngineConfig(device="cpu", context=CONTEXT))
    published(engine, tmp_path)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    engine.close()
