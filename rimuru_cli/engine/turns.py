"""One user of an engine at a time, and what nobody may break off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import wraps
from types import FrameType
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class TakesTurns(Protocol):
    """Whoever uses it holds `_turn`: the thread that steps, or a publisher that looks on while nothing happens."""

    _turn: threading.RLock


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method while nobody else uses the object. A method may call others of its kind."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            return method(self, *args, **kwargs)

    return run


class undisturbed(ContextDecorator):
    """Hold Ctrl-C back until a block or a function is over. Only the main thread is ever interrupted by it; elsewhere nothing changes.

    Used in every step, so without the detours of a generator.
    """

    def __init__(self) -> None:
        self._handler: object = None
        self._pressed: FrameType | None = None
        self._held = False

    def _recreate_cm(self) -> undisturbed:
        return undisturbed()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._press)
            if not callable(self._handler):  # ignored, or it ends the process at once
                self._restore()

    def __exit__(self, *exc_info: object) -> None:
        handler = self._handler
        if callable(handler):
            self._restore()
            if self._held:
                handler(signal.SIGINT, self._pressed)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._held, self._pressed = True, frame

    def _restore(self) -> None:
        # None: it was not set from Python; the default is the closest there is.
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._handler is None else self._handler)  # type: ignore[arg-type]
