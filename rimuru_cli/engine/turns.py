"""One user of an engine at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
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
