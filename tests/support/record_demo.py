"""Records the demonstration that comes with the dashboard: a real chat with the demonstration model, on the CPU, in about two minutes.

    python tests/support/record_demo.py OUT.rimurec

The pool is half as large as all experts. The conversation grows until it holds most of it; then the ceiling is raised, and experts come in.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rimuru_cli.chat import loading
from rimuru_cli.chat.session import ChatSession
from rimuru_cli.engine.telemetry.live import LiveSource
from rimuru_cli.engine.telemetry.publish import Publisher
from rimuru_cli.engine.telemetry.record import Recorder
from rimuru_cli.engine.telemetry.recording import Recording, Unpacker, load_recording
from rimuru_cli.hub.paths import runtime_dir
from rimuru_cli.output import Output
from rimuru_cli.settings import resolve

MOST_BYTES = 195_000
FRAMES_PER_SECOND = (5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
SCORE_SECONDS = 12.0
ANSWER_TOKENS = 56
MORE_BYTES = 64 << 20
TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
PIECES = (1300, 1500, 1700, 1700)  # characters of the text that are pasted in each turn


def main(file: Path) -> None:
    """Record, then keep as many frames as may come with every installation."""
    settings = resolve({"temperature": "0.7", "seed": "7", "max_tokens": str(ANSWER_TOKENS), "dashboard": False})
    with tempfile.TemporaryDirectory() as folder:
        everything = Path(folder) / "everything"
        with loading.opened_session(loading.load_model, None, settings, Output()) as session, _recorded(session, everything):
            _talk(session)
        recording = load_recording(everything)
        for hz in FRAMES_PER_SECOND:
            small = Path(folder) / f"{hz}"
            _thin(recording, small, hz)
            if small.stat().st_size <= MOST_BYTES:
                break
        else:
            sys.exit(f"However few frames are kept, they take more than {MOST_BYTES:,} bytes.")
        shutil.copyfile(small, file)
    Output().line(f"{file}: {file.stat().st_size:,} bytes, {recording.duration:.0f} s, {hz:g} frames a second")


def _talk(session: ChatSession) -> None:
    time.sleep(1.5)
    _ask(session, "Hello! In two sentences: what is a slime?")
    text, start = TEXT.read_text(encoding="utf-8"), 0
    for size in PIECES:
        _ask(session, f"What does this say? {text[start : start + size]}")
        start += size
    time.sleep(1.5)
    session.clear()
    _ask(session, "Name three colours.")
    engine = session.engine
    engine.set_memory(engine.info.memory_bytes + MORE_BYTES)  # type: ignore[attr-defined]
    _ask(session, "Write a short poem about the sea.")
    time.sleep(1.5)


def _thin(recording: Recording, file: Path, hz: float) -> None:
    recorder, unpacker = Recorder(file, hz=hz, score_seconds=SCORE_SECONDS), Unpacker()
    for record in recording.records:
        recorder(*unpacker.apply(record.data, key=record.key))
    recorder.close()


def _ask(session: ChatSession, question: str) -> None:
    turn = session.ask(question, lambda: False)
    for _ in session.pieces(turn):
        pass
    session.settle(turn)


@contextlib.contextmanager
def _recorded(session: ChatSession, file: Path) -> Iterator[None]:
    """Publish the session's engine and record it from a second thread, as another process would."""
    folder = runtime_dir()
    session.engine.publish(Publisher(folder, "demo"))  # type: ignore[attr-defined]
    recorder = Recorder(file)
    source = LiveSource(folder, tap=recorder)
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            source.poll()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        source.close()
        recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
