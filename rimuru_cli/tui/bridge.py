"""The worker thread between a source of frames and the app: it asks the source, and posts what is new, ten times a second
unless another rate is asked for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from textual.message import Message

from rimuru_cli.engine.telemetry.sources import EngineEntry, FrameSource
from rimuru_cli.tui.messages import EnginesListed, FrameArrived, SourceFailed, SourceStatus

FPS: Final = 10.0
MAX_FPS: Final = 20.0
_ENGINES_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 0.25
"""Without a new frame the app still hears this often that time passed."""
_QUIET_SECONDS: Final = 3.0
_QUIET_PERIOD: Final = 0.2
"""When nothing was new for a while, the source is asked this often."""


class FrameBridge:
    """Owns a source while it runs: nobody else may touch it, for sources are not thread-safe; `ask` hands calls over.

    Args:
        source: where frames come from. It is closed when the bridge stops.
        post: takes a message for the app, from any thread; False when the app is gone.
        fps: frames a second at most, up to `MAX_FPS`.
    """

    def __init__(self, source: FrameSource, post: Callable[[Message], bool], fps: float = FPS) -> None:
        self._source = source
        self._post = post
        self._period = 1.0 / min(MAX_FPS, max(0.1, fps))
        self._calls: queue.SimpleQueue[Callable[[FrameSource], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._taken = threading.Event()
        self._taken.set()
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)
        self._engines: tuple[EngineEntry, ...] | None = None
        self._engines_at = 0.0

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the source. May be called twice."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is None:
            self._source.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def ask(self, call: Callable[[FrameSource], None]) -> None:
        """Have a call made on the thread that owns the source, soon."""
        self._calls.put(call)
        self._wake.set()

    def taken(self) -> None:
        """The app has dealt with the last frame; the next may come. A slow app thus skips frames instead of falling behind."""
        self._taken.set()

    def post(self, message: Message) -> None:
        """Post to the app; for calls given to `ask`."""
        if not self._post(message):
            self._stopping.set()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._post(SourceFailed(error))
        finally:
            self._source.close()

    def _loop(self) -> None:
        new_at = told_at = time.monotonic()
        status: SourceStatus | None = None
        while not self._stopping.is_set():
            began = time.monotonic()
            self._make_calls()
            if self._taken.is_set():
                frame = self._source.poll()
                now_status = self._status()
                if frame is not None or now_status.state != (status.state if status else None):
                    new_at = began
                if new_at == began or began - told_at >= _TICK_SECONDS:
                    status, told_at = now_status, began
                    self._taken.clear()
                    self.post(FrameArrived(frame, status))
            if began - self._engines_at >= _ENGINES_SECONDS:
                self._list_engines(began)
            period = self._period if began - new_at < _QUIET_SECONDS else max(self._period, _QUIET_PERIOD)
            self._wake.wait(max(0.0, began + period - time.monotonic()))
            self._wake.clear()

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call(self._source)
            self._engines_at = 0.0

    def _list_engines(self, now: float) -> None:
        engines = tuple(self._source.engines())
        if engines != self._engines:
            self._engines = engines
            self.post(EnginesListed(engines))
        self._engines_at = now

    def _status(self) -> SourceStatus:
        source = self._source
        position, duration = getattr(source, "position", None), getattr(source, "duration", None)
        return SourceStatus(source.state, source.can_control, position, duration)
