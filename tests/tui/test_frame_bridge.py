"""The worker thread between source and app."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from textual.message import Message
from tui_parts import HandPlayback, HandSource, entry_of, played, small_engine

from rimuru_cli.tui.bridge import FrameBridge
from rimuru_cli.tui.messages import EnginesListed, FrameArrived, SourceFailed

FRAMES = played(small_engine(), ("decode", 5))


class Posted:
    """Takes messages as an app would."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.alive = True
        self.take: Callable[[], None] | None = None

    def __call__(self, message: Message) -> bool:
        self.messages.append(message)
        if isinstance(message, FrameArrived) and self.take is not None:
            self.take()
        return self.alive

    def wait(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 5.0
        while not holds():
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.005)

    def frames(self) -> list[int]:
        return [m.frame.number for m in self.messages if isinstance(m, FrameArrived) and m.frame is not None]


def test_frames_arrive_in_order_with_the_state_of_the_source() -> None:
    source, posted = HandPlayback(*FRAMES, state="paused"), Posted()
    bridge = FrameBridge(source, posted, fps=1000)
    posted.take = bridge.taken
    bridge.start()
    posted.wait(lambda: len(posted.frames()) == 5)
    bridge.stop()
    assert posted.frames() == [frame.number for frame in FRAMES]
    arrived = next(m for m in posted.messages if isinstance(m, FrameArrived))
    assert (arrived.status.state, arrived.status.position, arrived.status.duration) == ("paused", 12.0, 60.0)
    assert source.closed == 1
    bridge.stop()
    assert source.closed == 1


def test_a_slow_app_is_not_buried() -> None:
    source, posted = HandSource(*FRAMES), Posted()
    bridge = FrameBridge(source, posted, fps=1000)
    bridge.start()
    posted.wait(lambda: posted.frames())
    time.sleep(0.2)
    assert len(posted.frames()) == 1, "the next comes when the app has taken the last"
    bridge.taken()
    posted.wait(lambda: len(posted.frames()) == 2)
    bridge.stop()


def test_time_passes_also_without_frames() -> None:
    posted = Posted()
    bridge = FrameBridge(HandSource(), posted)
    posted.take = bridge.taken
    bridge.start()
    posted.wait(lambda: sum(isinstance(m, FrameArrived) for m in posted.messages) >= 2)
    bridge.stop()
    assert posted.frames() == []


def test_only_one_thread_touches_the_source() -> None:
    source, posted = HandSource(), Posted()
    bridge = FrameBridge(source, posted)
    seen: list[int] = []
    bridge.start()
    bridge.ask(lambda given: seen.append(threading.get_ident()))
    posted.wait(lambda: seen and source.threads)
    bridge.stop()
    assert source.threads == set(seen) and threading.get_ident() not in source.threads


def test_the_list_of_engines_is_posted_when_it_changes() -> None:
    source, posted = HandSource(), Posted()
    source.listed = [entry_of(FRAMES[0])]
    bridge = FrameBridge(source, posted)
    posted.take = bridge.taken
    bridge.start()
    posted.wait(lambda: any(isinstance(m, EnginesListed) for m in posted.messages))
    source.listed = []
    bridge.ask(lambda given: None)
    posted.wait(lambda: sum(isinstance(m, EnginesListed) for m in posted.messages) == 2)
    bridge.stop()
    lists = [m.engines for m in posted.messages if isinstance(m, EnginesListed)]
    assert [len(engines) for engines in lists] == [1, 0]


def test_a_source_that_fails_ends_the_bridge_and_says_why() -> None:
    source, posted = HandSource(), Posted()
    source.fails = OSError("gone")
    bridge = FrameBridge(source, posted)
    bridge.start()
    posted.wait(lambda: any(isinstance(m, SourceFailed) for m in posted.messages))
    posted.wait(lambda: source.closed)
    bridge.stop()


def test_an_app_that_is_gone_ends_the_bridge() -> None:
    source, posted = HandSource(*FRAMES), Posted()
    posted.alive = False
    FrameBridge(source, posted).start()
    posted.wait(lambda: source.closed)


def test_a_bridge_that_never_ran_closes_its_source() -> None:
    source = HandSource()
    FrameBridge(source, Posted()).stop()
    assert source.closed == 1


@pytest.mark.parametrize("fps", [0.0, -5.0, 1e9])
def test_rates_are_bounded(fps: float) -> None:
    assert 1 / 20 <= FrameBridge(HandSource(), Posted(), fps)._period <= 10.0


def test_the_dashboard_never_loads_torch() -> None:
    """It would take seconds to start and hundreds of megabytes to watch an engine that has it loaded already."""
    code = (
        "import sys; import rimuru_cli.tui.app, rimuru_cli.tui.chat_app\n"
        "import rimuru_cli.engine.telemetry.live, rimuru_cli.engine.telemetry.replay\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'triton', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
