"""Changing an engine's memory ceiling from the dashboard: how far a key goes, and the wait for what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rimuru_cli.engine.telemetry.frame import CeilingAnswer, Frame
from rimuru_cli.tui import words
from rimuru_cli.tui.state import PoolState

SETTLE_SECONDS = 0.6
"""Presses in quick succession make one request."""
PATIENCE_SECONDS = 20.0
_TOLD_SECONDS = 8.0


def step_bytes(ceiling: int) -> int:
    """How much one press changes: the power of two at or below a sixteenth of the ceiling."""
    sixteenth = max(1, ceiling // 16)
    return 1 << (sixteenth.bit_length() - 1)


def next_ceiling(now: int, least: int, direction: int) -> int:
    """The ceiling after one press up (1) or down (-1): a whole number of steps, and never below the least."""
    step = step_bytes(now)
    wished = (now // step + 1) * step if direction > 0 else (-(-now // step) - 1) * step
    return max(least, wished)


@dataclass
class CeilingWish:
    """One change on its way.

    Attributes:
        before: the frame at the first press, to tell afterwards what changed.
        wanted: the ceiling that is asked for.
        pressed: when a key was last pressed, on the monotonic clock.
        sent: when the request went out; None while presses may still follow.
        known: the answer to an earlier request that was known then.
    """

    before: Frame
    wanted: int
    pressed: float
    sent: float | None = None
    known: CeilingAnswer | None = None

    def words_now(self) -> str:
        """What to say while it is on its way."""
        old = words.size(self.before.engine.ceiling_bytes)
        state = "waiting for the engine" if self.sent is not None else "..."
        return f"ceiling {old} to {words.size(self.wanted)}: {state}"

    def outcome(self, frame: Frame) -> str | None:
        """What became of it, once the engine has answered this wish."""
        answer = frame.answer
        if self.sent is None or answer is None or answer == self.known or answer.bytes_asked != self.wanted:
            return None
        if not answer.ok:
            return f"The ceiling stays at {words.size(frame.engine.ceiling_bytes)}: {answer.text}"
        experts = frame.counters.resident_experts - self.before.counters.resident_experts
        moved = f"{abs(experts):,} experts {'retired' if experts < 0 else 'admitted'} so far" if experts else "no expert moved yet"
        pool = f"pool {words.size(self.before.engine.pool_bytes)} to {words.size(frame.engine.pool_bytes)}"
        old, new = words.size(self.before.engine.ceiling_bytes), words.size(frame.engine.ceiling_bytes)
        return f"Ceiling {old} to {new}: {pool}, {moved}. {answer.text}"


class CeilingDesk:
    """Takes presses of `+` and `-`, makes one request of several, and tells what became of it.

    Args:
        pool: what is shown.
        tell: says something to the person for some seconds.
        ask: sends a request to the engine.

    Attributes:
        wish: the change that is on its way.
    """

    def __init__(self, pool: PoolState, tell: Callable[[str, float], None], ask: Callable[[int], None]) -> None:
        self._pool, self._tell, self._ask = pool, tell, ask
        self.wish: CeilingWish | None = None

    def press(self, direction: int) -> None:
        """Ask for more (1) or less (-1); presses in quick succession add up."""
        frame = self._pool.frame
        if frame is None or self._pool.gone:
            self._tell("There is no running engine whose ceiling could be changed.", _TOLD_SECONDS)
            return
        if not self._pool.status.can_control:
            self._tell("The ceiling of this engine cannot be changed from here; a recording has none at all.", _TOLD_SECONDS)
            return
        wish = self.wish
        if wish is None or wish.sent is not None:
            wish = CeilingWish(frame, frame.engine.ceiling_bytes, 0.0)
        wanted = next_ceiling(wish.wanted, frame.engine.least_ceiling_bytes, direction)
        if wanted == wish.wanted:
            self._tell(f"{words.size(wanted)} is the least that this model runs with.", _TOLD_SECONDS)
            return
        wish.wanted, wish.pressed = wanted, self._pool.clock()
        self.wish = wish
        self._tell(wish.words_now(), _TOLD_SECONDS)

    def settle(self) -> None:
        """Send a wish once no more presses come, and tell what became of it. Called again and again."""
        wish, now, frame = self.wish, self._pool.clock(), self._pool.frame
        if wish is None or frame is None:
            return
        if wish.sent is None:
            if now - wish.pressed >= SETTLE_SECONDS:
                wish.sent, wish.known = now, frame.answer
                self._ask(wish.wanted)
                self._tell(wish.words_now(), PATIENCE_SECONDS)
        elif (outcome := wish.outcome(frame)) is not None:
            self.wish = None
            self._tell(outcome, 2 * _TOLD_SECONDS)
        elif now - wish.sent > PATIENCE_SECONDS:
            self.wish = None
            self._tell("The engine has not answered yet; it looks at wishes between two steps.", _TOLD_SECONDS)

    def not_delivered(self) -> None:
        """The request found nobody."""
        self.wish = None
        self._tell("The engine has ended, so its ceiling stays what it was.", _TOLD_SECONDS)
