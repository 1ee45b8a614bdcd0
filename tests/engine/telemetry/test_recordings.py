"""Recordings: what is played is what was seen, from any place on; damage ends them, and nothing worse."""

from __future__ import annotations

import errno
import io
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_engine import SCENARIOS, SyntheticEngine

from rimuru_cli.engine.telemetry import record, recording
from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.record import Recorder
from rimuru_cli.engine.telemetry.recording import MAGIC, RECORD, Recording, load_recording, read_recording
from rimuru_cli.engine.telemetry.replay import DEMO_FILE, ReplaySource, demo_source
from rimuru_models.errors import RimuruError, UsageError

COLUMNS = ("offset", "size", "level", "kind", "layer", "owner", "part", "loaded_step", "used_step")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def recorded(path: Path, *, frames_each: int = 8, hybrid: bool = False, **more: Any) -> list[Frame]:
    """A recording of a made-up engine through all its scenes, and its frames."""
    engine = SyntheticEngine(300, layers=4, experts=16, top_k=2, hybrid=hybrid)
    recorder = Recorder(path, hz=10.0, **more)
    seen = []
    for scenario in (*SCENARIOS, "decode", "decode"):
        for _ in range(frames_each):
            frame = engine.next(scenario)  # type: ignore[arg-type]
            seen.append(frame)
            recorder(replace(engine.head(frame.busy, 0.0), number=frame.number, time=frame.time, counters=frame.counters), engine.tables())
            engine._frames -= 1  # the head above was the same moment again
    recorder.close()
    assert recorder.frames == len(seen) and recorder.stopped is None
    return seen


def same(played: Frame | None, seen: Frame) -> None:
    assert played is not None and played.number == seen.number
    assert (played.engine, played.counters, played.events, played.busy) == (seen.engine, seen.counters, seen.events, seen.busy)
    for name in COLUMNS[:-2]:
        assert np.array_equal(getattr(played.pages, name), getattr(seen.pages, name)), name
    assert np.array_equal(played.experts.resident, seen.experts.resident)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_recording_plays_as_it_was_seen(hybrid: bool, tmp_path: Path) -> None:
    seen = recorded(tmp_path / "a", hybrid=hybrid, frames_each=20)  # more than one key frame
    clock = Clock()
    source = ReplaySource(load_recording(tmp_path / "a"), clock=clock)
    for frame in seen:
        clock.now = 100.0 + frame.time - seen[0].time + 1e-3
        played = source.poll()
        same(played, frame)
        assert played is not None
        for name in COLUMNS[-2:]:
            assert np.array_equal(getattr(played.pages, name), getattr(frame.pages, name)), name
        assert source.poll() is None, "a frame is given once"
    assert source.duration == pytest.approx(seen[-1].time - seen[0].time)
    clock.now += 5
    assert source.state == "ended" and source.position == source.duration
    (entry,) = source.engines()
    assert entry.engine_id == seen[0].engine.engine_id and source.attach(entry.engine_id)
    assert not source.can_control and not source.request_ceiling(1 << 30)
    source.close()
    assert source.poll() is None


def test_seeking_and_speed(tmp_path: Path) -> None:
    seen = recorded(tmp_path / "a", frames_each=20)
    clock = Clock()
    source = ReplaySource(load_recording(tmp_path / "a"), clock=clock)
    rng = np.random.default_rng(0)
    source.set_speed(0.0)
    assert source.state == "paused"
    for index in rng.integers(0, len(seen), 40):
        source.seek(seen[index].time - seen[0].time + 1e-3)
        same(source.poll(), seen[index])
        assert source.poll() is None
    source.seek(-5)
    same(source.poll(), seen[0])
    source.seek(1e9)
    same(source.poll(), seen[-1])
    source.seek(0)
    source.set_speed(4.0)
    clock.now += 0.5001
    same(source.poll(), seen[20])
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            source.set_speed(factor)


def test_a_loop_begins_again(tmp_path: Path) -> None:
    seen = recorded(tmp_path / "a")
    clock = Clock()
    source = ReplaySource(load_recording(tmp_path / "a"), loop=True, clock=clock)
    same(source.poll(), seen[0])
    clock.now += source.duration * 1000 + 0.2001
    same(source.poll(), seen[2])
    assert source.state == "live"
    source.set_speed(0.0)
    source.seek(source.duration)
    same(source.poll(), seen[-1])


def test_frames_come_no_faster_than_asked_for(tmp_path: Path) -> None:
    engine = SyntheticEngine(300, layers=4, experts=16, top_k=2)
    recorder = Recorder(tmp_path / "a", hz=2.0)
    for _ in range(41):
        engine.next("decode")
        recorder(engine.head(True, 0.1), engine.tables())
        engine._frames -= 1
    recorder.close()
    assert recorder.frames == 9
    assert load_recording(tmp_path / "a").duration == pytest.approx(4.0)


def test_nothing_is_overwritten_and_nothing_empty_is_left(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="already"):
        Recorder(tmp_path / "a")
    with pytest.raises(UsageError, match="written"):
        Recorder(tmp_path / "no" / "a")
    recorder = Recorder(tmp_path / "b")
    recorder.close()
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_ends_the_recording_only(tmp_path: Path) -> None:
    engine = SyntheticEngine(300, layers=4, experts=16, top_k=2)
    recorder = Recorder(tmp_path / "a")

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    recorder._file = Full()
    engine.next("decode")
    recorder(engine.head(True), engine.tables())
    recorder(engine.head(True), engine.tables())
    recorder.close()
    assert recorder.stopped is not None and "No space" in recorder.stopped


def test_a_killed_recorder_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100_000))
    monkeypatch.setattr(record.time, "monotonic", lambda: float(next(ticks)))  # each frame is flushed
    engine = SyntheticEngine(300, layers=4, experts=16, top_k=2)
    recorder = Recorder(tmp_path / "a")
    for _ in range(10):
        engine.next("decode")
        recorder(engine.head(True), engine.tables())
    data = (tmp_path / "a").read_bytes()
    recording = read_recording(io.BytesIO(data), "x")
    assert len(recording.records) == 10 and recording.damage == "it is cut off"


def whole(tmp_path: Path) -> tuple[bytes, int]:
    path = tmp_path / "whole"
    if not path.exists():
        recorded(path, frames_each=3)
    return path.read_bytes(), 24


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damage_ends_a_recording(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content, count = whole(tmp_path_factory.getbasetemp())
    at = data.draw(st.integers(0, len(content) - 1))
    broken = (
        content[:at]
        if data.draw(st.booleans())
        else content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    )
    try:
        recording = read_recording(io.BytesIO(broken), "x")
    except RimuruError:
        return
    assert recording.damage is not None or len(recording.records) == count
    source = ReplaySource(recording)
    source.set_speed(0.0)
    for moment in np.linspace(0, source.duration, 5):
        source.seek(float(moment))
        source.poll()


def _file(*bodies: bytes, wrong_crc: bool = False) -> io.BytesIO:
    records = b"".join(RECORD.pack(len(body), zlib.crc32(body) ^ wrong_crc) + body for body in bodies)
    return io.BytesIO(MAGIC + zlib.compress(records))


@pytest.mark.parametrize(
    "file",
    [
        io.BytesIO(b""),
        io.BytesIO(MAGIC),
        io.BytesIO(b"\x80\x04\x95pickle"),
        io.BytesIO(MAGIC + b"noise" * 100),
        io.BytesIO(MAGIC + zlib.compress(b"")),
        io.BytesIO(MAGIC + zlib.compress(RECORD.pack(1 << 31, 0))),
        io.BytesIO(MAGIC + zlib.compress(b"\xff" * (1 << 26), 9)),  # 64 MiB in 64 KB
        _file(b""),
        _file(b"x" * 100),
        _file(b"x" * 100, wrong_crc=True),
    ],
    ids=range(10),
)
def test_what_is_no_recording_is_refused(file: io.BytesIO) -> None:
    file.seek(0)
    with pytest.raises(RimuruError, match="x"):
        read_recording(file, "x")


def test_a_missing_or_enormous_file_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no recording"):
        load_recording(tmp_path / "nowhere")
    with pytest.raises(UsageError):
        load_recording(tmp_path)
    (tmp_path / "a").write_bytes(b"x" * 100)
    monkeypatch.setattr(recording, "MOST_FILE_BYTES", 50)
    with pytest.raises(UsageError, match="larger"):
        load_recording(tmp_path / "a")


def test_limits_end_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_RECORDS", 5)
    engine = SyntheticEngine(300, layers=4, experts=16, top_k=2)
    recorder = Recorder(tmp_path / "a")
    for _ in range(8):
        engine.next("decode")
        recorder(engine.head(True), engine.tables())
    recorder.close()
    assert recorder.frames == 5 and recorder.stopped is not None
    assert len(load_recording(tmp_path / "a").records) == 5


def test_the_demonstration_plays_to_its_end_and_is_small() -> None:
    from importlib.resources import files

    data = files("rimuru_cli.engine.telemetry").joinpath(DEMO_FILE).read_bytes()
    recording: Recording = read_recording(io.BytesIO(data), DEMO_FILE)
    assert len(data) < 200_000 and recording.damage is None and recording.duration > 20
    source = demo_source()
    source.set_speed(0.0)
    context, residents = [], []
    for moment in np.linspace(0, source.duration, 30):
        source.seek(float(moment))
        frame = source.poll()
        if frame is not None:
            assert sum(frame.pages.bytes_by_kind().values()) == frame.engine.pool_bytes
            context.append(frame.counters.context_used)
            residents.append(frame.counters.resident_experts)
    assert len(context) > 10
    assert max(context) > 1000 and min(residents) < 0.7 * max(residents), "the conversation does not grow at the experts' cost"
