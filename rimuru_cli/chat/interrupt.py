"""Ctrl-C while the engine works: a flag that is looked at between steps, because a step must never be torn in the middle."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptFlag:
    """While entered, Ctrl-C counts instead of raising KeyboardInterrupt. Outside the main thread it does nothing.

    The third Ctrl-C ends the process after all: whoever presses it twice in vain must be able to leave a step that never ends.

    Attributes:
        count: how often Ctrl-C was pressed since entering.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: object = None
        self._installed = False

    def __bool__(self) -> bool:
        return self.count > 0

    def __enter__(self) -> InterruptFlag:
        self.count = 0
        # Where the parent ignores Ctrl-C (a background job of a shell), it stays ignored.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._pressed)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._installed:
            # None means that the previous handler was not set from Python; the default is the closest there is.
            previous = self._previous if self._previous is not None else signal.default_int_handler
            signal.signal(signal.SIGINT, previous)  # type: ignore[arg-type]
            self._installed = False

    def _pressed(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            raise SystemExit(130)
