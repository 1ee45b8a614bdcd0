"""Ctrl-C while the engine works or a library loads: it is looked at afterwards, because neither must be torn in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType


class InterruptFlag:
    """While entered, Ctrl-C counts instead of raising KeyboardInterrupt. Outside the main thread it does nothing.

    Args:
        patience: so many presses only count; the next one ends the process after all, because whoever presses in vain must be able to
            leave a step that never ends. None: never.

    Attributes:
        count: how often Ctrl-C was pressed since entering.
    """

    def __init__(self, patience: int | None = 2) -> None:
        self.count = 0
        self._patience = patience
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
        if self._patience is not None and self.count > self._patience:
            raise SystemExit(130)


@contextlib.contextmanager
def loading_libraries() -> Iterator[None]:
    """Hold Ctrl-C back while libraries such as torch are imported; it then raises KeyboardInterrupt at the end of the block.

    Torn in the middle they abort the process, or fail later with errors that blame somebody else.
    """
    with InterruptFlag(patience=None) as interrupt:
        try:
            yield
        finally:
            if interrupt:
                raise KeyboardInterrupt
