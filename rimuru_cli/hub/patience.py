"""How long to try again: what is worth another attempt, how long to wait before it, and when to give up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rimuru_models.errors import RimuruError

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0


class Cancelled(Exception):
    """Somebody else asked this thread to stop; not an error of its own."""


class UnreachableError(RimuruError):
    """The hub cannot be asked: no network, HF_HUB_OFFLINE, trouble on its side, or a rate limit that has not passed."""


class Temporary(Exception):
    """Something that may go away by itself: a lost connection, an overloaded server, a rate limit.

    Attributes:
        what: what happened, without a final full stop.
        hint: what to do if it does not go away.
        retry_after: seconds that the server asked to wait, or None.
    """

    def __init__(self, what: str, *, hint: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.retry_after = retry_after


class Patience:
    """Counts attempts that brought nothing. Waits grow: 0.5, 1, 2, … at most 30 seconds, or what the server asks for.

    Args:
        attempts: give up after so many attempts in a row without progress.
        budget: longest time in seconds that a server may make us wait without progress, in all.
        cancelled: ends a wait.
        notice: told why and how long there is a wait.
        wait: for tests; waits for so many seconds and says whether it was cancelled meanwhile.
    """

    def __init__(
        self,
        attempts: int,
        budget: float,
        cancelled: threading.Event,
        notice: Callable[[str], None] | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._attempts = attempts
        self._budget = budget
        self._cancelled = cancelled
        self._notice = notice
        self._wait = wait or cancelled.wait
        self._failures = 0
        self._asked = 0.0

    def progress(self) -> None:
        """Something arrived: start counting anew."""
        self._failures = 0
        self._asked = 0.0

    def after(self, error: Temporary) -> None:
        """Wait until the next attempt.

        Raises:
            UnreachableError: it has been tried often enough; says what went wrong the last time.
            Cancelled: during the wait.
        """
        self._failures += 1
        seconds = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (self._failures - 1))
        if error.retry_after is not None:
            seconds = max(0.0, error.retry_after)
            self._asked += seconds
        if self._failures >= self._attempts or self._asked > self._budget:
            raise UnreachableError(f"{error.what}.", hint=error.hint) from error
        if self._notice is not None:
            self._notice(f"{error.what}; trying again in {seconds:.0f} s" if seconds >= 1 else f"{error.what}; trying again")
        if self._wait(seconds):
            raise Cancelled
