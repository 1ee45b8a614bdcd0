"""The engine's process behind the chat window: starting it, talking with it, and never leaving it behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from textual.message import Message

from rimuru_cli.chat import protocol
from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.sources import EngineEntry, FrameSource, SourceState

COMMAND: Final = (sys.executable, "-m", "rimuru_cli.chat.child")
_LAST_WORDS: Final = 30
_LEAVE_SECONDS: Final = 6.0
_TERMINATE_SECONDS: Final = 2.0


class EngineSaid(Message):
    """A message from the engine's process."""

    def __init__(self, message: protocol.ToWindow) -> None:
        super().__init__()
        self.message = message


class EngineEnded(Message):
    """The engine's process has ended; `last_words` is the end of what it wrote to stderr."""

    def __init__(self, code: int, last_words: str) -> None:
        super().__init__()
        self.code = code
        self.last_words = last_words


class ChatLink:
    """One engine process and the line to it.

    Args:
        post: takes messages for the app from any thread; returns False once the app is gone.
        command: what to start; tests start something else.
    """

    def __init__(self, post: Callable[[Message], bool], command: Sequence[str] = COMMAND) -> None:
        self._post = post
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._threads: list[threading.Thread] = []

    def start(self, first: protocol.Start) -> None:
        """Start the process and tell it what to load.

        Raises:
            OSError: it cannot be started.
        """
        # A Ctrl-C in the terminal is the window's affair; the process ignores it, and on Windows must not get it at all.
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, creationflags=flags, env=_environment()
        )
        for name, work in (("engine", self._listen), ("engine-stderr", self._keep_last_words)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self.send(first)

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return None if self._process is None else self._process.pid

    def send(self, message: protocol.ToEngine) -> None:
        """Say something to the engine. If it is gone already, `EngineEnded` is on its way."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            process.stdin.write(protocol.encode(message))
            process.stdin.flush()

    def stop(self) -> None:
        """Ask the process to leave, and see to it that it does. May be called twice."""
        process = self._process
        if process is None:
            return
        self.send(protocol.Leave())
        with self._lock, contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        for seconds, harder in ((_LEAVE_SECONDS, process.terminate), (_TERMINATE_SECONDS, process.kill)):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                harder()
        else:
            process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)

    def _listen(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None, "started with pipes"
        while True:
            try:
                line = process.stdout.readline(protocol.MAX_LINE_BYTES)
                if not line:
                    break
                message: Any = protocol.decode(line)
            except (OSError, ValueError) as error:
                self._last_words.append(f"unreadable: {error}")
                process.kill()
                break
            self._post(EngineSaid(message))
        code = process.wait()
        # Its last words may still be in the other pipe.
        self._threads[-1].join(timeout=1.0)
        self._post(EngineEnded(code, "\n".join(self._last_words)))

    def _keep_last_words(self) -> None:
        process = self._process
        assert process is not None and process.stderr is not None, "started with pipes"
        with contextlib.suppress(OSError, ValueError):
            for line in process.stderr:
                self._last_words.append(line.decode("utf-8", "replace").rstrip())


def _environment() -> dict[str, str]:
    """The process's environment: as here, with text as UTF-8 whatever the locale says."""
    return {**os.environ, "PYTHONIOENCODING": "utf-8:replace", "PYTHONUNBUFFERED": "1"}


class OwnEngine:
    """A source of frames that shows the chat's own engine and no other, from the moment that its model is loaded.

    Args:
        open_source: gives the source of a process's frames.
    """

    def __init__(self, open_source: Callable[[int], FrameSource]) -> None:
        self._open = open_source
        self._source: FrameSource | None = None
        self._seen = False

    def begin(self, pid: int) -> None:
        """The engine of this process is loaded."""
        if self._source is None:
            self._source = self._open(pid)

    @property
    def state(self) -> SourceState:
        """See `FrameSource.state`."""
        return "waiting" if self._source is None else self._source.state

    @property
    def can_control(self) -> bool:
        """See `FrameSource.can_control`."""
        return self._source is not None and self._source.can_control

    def poll(self) -> Frame | None:
        """See `FrameSource.poll`; once the engine has ended, no other one is attached to."""
        if self._source is None or (self._seen and self._source.state == "waiting"):
            return None
        frame = self._source.poll()
        self._seen = self._seen or frame is not None
        return frame

    def engines(self) -> list[EngineEntry]:
        """See `FrameSource.engines`."""
        return [] if self._source is None else self._source.engines()

    def attach(self, engine_id: str) -> bool:
        """See `FrameSource.attach`."""
        return self._source is not None and self._source.attach(engine_id)

    def request_ceiling(self, ceiling_bytes: int) -> bool:
        """See `FrameSource.request_ceiling`."""
        return self._source is not None and self._source.request_ceiling(ceiling_bytes)

    def close(self) -> None:
        """See `FrameSource.close`."""
        if self._source is not None:
            self._source.close()
