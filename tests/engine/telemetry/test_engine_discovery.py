"""Who runs: engines that were killed, numbers that were given out again, other containers, other files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.discovery import running_engines
from rimuru_cli.engine.telemetry.live import LiveSource
from rimuru_cli.engine.telemetry.places import private_folder, process_space, process_start
from rimuru_cli.engine.telemetry.segment import Segment, beat_now

PATIENCE = 60.0

ENGINE = """
import sys, time
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from engines import GREEDY
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.telemetry.publish import Publisher
engine = Engine.load(Path(sys.argv[1]), EngineConfig(device="cpu", context=256))
engine.publish(Publisher(Path(sys.argv[2]), "run"))
if sys.argv[4] == "leave":
    sys.exit()
print("ready", flush=True)
while True:
    for _ in engine.generate([5, 6, 7], GREEDY):
        time.sleep(0.002)
"""


def start_engine(checkpoint: Path, folder: Path, what: str) -> subprocess.Popen[str]:
    support = str(Path(__file__).parents[2] / "support")
    command = [sys.executable, "-c", ENGINE, str(checkpoint), str(folder), support, what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def make(folder: Path, *, pid: int, start: int = 0, space: int | None = None, engine_id: str = "a" * 16) -> Segment:
    card = {"engine_id": engine_id, "role": "chat", "model": "m\x1b[2J", "device": "cpu", "started": 5.0}
    own = {words.PID: pid, words.PID_SPACE: process_space() if space is None else space, words.PROCESS_START: start}
    return Segment.create(private_folder(folder) / f"{pid}-{engine_id}-1.engine", 4096, card, own)


def make_silent(segment: Segment) -> None:
    segment.set(words.BEAT, max(0, beat_now() - 60_000))


def test_numbers_that_no_process_has_and_cards_without_end_are_no_engines(tmp_path: Path) -> None:
    make(tmp_path / "run", pid=(1 << 64) - 1).close()
    deep = make(tmp_path / "run", pid=os.getpid(), engine_id="b" * 16)
    text = b"[" * 3000
    deep._bytes[1024 : 1024 + len(text)] = text
    deep.set(words.CARD_BYTES, len(text))
    deep.close()
    assert running_engines(tmp_path / "run") == []


def test_an_engine_that_is_killed_is_gone_at_once(qwen3: Path, tmp_path: Path) -> None:
    with start_engine(qwen3, tmp_path / "run", "stay") as process:
        source = LiveSource(tmp_path / "run", pid=process.pid)
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            end, frames = time.monotonic() + PATIENCE, []
            while len(frames) < 5 and time.monotonic() < end:
                frame = source.poll()
                frames += [] if frame is None else [frame]
            assert [frame.engine.pid for frame in frames] == [process.pid] * 5
            assert frames[-1].counters.decode_tokens > 0
            (entry,) = source.engines()
            assert (entry.pid, entry.role, entry.attached, entry.responding) == (process.pid, "run", True, True)
            process.kill()
            # Not waited for yet, so it is a zombie, whose number is still taken.
            end = time.monotonic() + PATIENCE
            while running_engines(tmp_path / "run") and time.monotonic() < end:
                time.sleep(0.01)
            assert list((tmp_path / "run").iterdir()) == [], "what it left behind is still there"
            while source.state != "waiting" and time.monotonic() < end:
                source.poll()
            assert source.state == "waiting"
        finally:
            process.kill()
            source.close()


@pytest.mark.skipif(os.name != "posix", reason="signals are a matter of POSIX")
def test_an_engine_that_is_stopped_does_not_respond_but_is_not_swept(qwen3: Path, tmp_path: Path) -> None:
    with start_engine(qwen3, tmp_path / "run", "stay") as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGSTOP)
            (path,) = (tmp_path / "run").iterdir()
            segment = Segment.open(path)
            assert segment is not None
            make_silent(segment)
            (entry,) = running_engines(tmp_path / "run")
            assert not entry.responding
            os.kill(process.pid, signal.SIGCONT)
            end = time.monotonic() + PATIENCE
            while not running_engines(tmp_path / "run")[0].responding and time.monotonic() < end:
                time.sleep(0.01)
            assert running_engines(tmp_path / "run")[0].responding
            segment.close()
        finally:
            process.kill()


def test_a_process_that_leaves_without_closing_takes_its_file_away(qwen3: Path, tmp_path: Path) -> None:
    with start_engine(qwen3, tmp_path / "run", "leave") as process:
        assert process.wait(PATIENCE) == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_a_number_that_was_given_out_again_is_another_process(tmp_path: Path) -> None:
    segment = make(tmp_path, pid=os.getpid(), start=process_start(os.getpid()) - 3_600_000)
    make_silent(segment)
    assert running_engines(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_was_set_kills_nobody(tmp_path: Path) -> None:
    make(tmp_path, pid=os.getpid(), start=process_start(os.getpid()) - 3_600_000)
    (entry,) = running_engines(tmp_path)
    assert (entry.pid, entry.model) == (os.getpid(), "m\ufffd[2J")


def test_an_engine_in_another_container_lives_as_long_as_it_gives_signs(tmp_path: Path) -> None:
    dead = 2**22 + 1  # beyond any process number of this system
    segment = make(tmp_path, pid=dead, space=process_space() + 1)
    assert [entry.pid for entry in running_engines(tmp_path)] == [dead]
    make_silent(segment)
    assert running_engines(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1, "whether it is dead cannot be known here"


def test_a_dead_number_is_swept_whatever_its_last_sign(tmp_path: Path) -> None:
    make(tmp_path, pid=2**22 + 1)
    assert running_engines(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_other_files_are_left_alone_until_they_are_surely_dead(tmp_path: Path) -> None:
    private_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    unfinished = tmp_path / f"{2**22 + 1}-{'b' * 16}-1.engine"
    of_the_living = tmp_path / f"{os.getpid()}-{'c' * 16}-1.engine"
    for path in (unfinished, of_the_living):
        path.write_bytes(b"\0" * 8192)
    assert running_engines(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
    for path in (unfinished, of_the_living):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert running_engines(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([of_the_living.name, "notes.txt"])


def test_a_folder_that_is_not_there_has_no_engines(tmp_path: Path) -> None:
    assert running_engines(tmp_path / "nowhere") == []
    source = LiveSource(tmp_path / "nowhere")
    assert source.poll() is None and source.engines() == [] and not source.can_control
    source.close()
    source.close()


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    make(tmp_path / "run", pid=os.getpid(), start=process_start(os.getpid()))
    assert len(running_engines(tmp_path / "run")) == 1
    os.chown(tmp_path / "run", 12345, 12345)
    assert running_engines(tmp_path / "run") == []
    with pytest.raises(PermissionError):
        private_folder(tmp_path / "run")
