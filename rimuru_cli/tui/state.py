"""Everything that the widgets draw from: the newest frame, the last minutes, and when what was loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.frame import AdjusterRecord, CeilingAnswer, Frame
from rimuru_cli.engine.telemetry.sources import EngineEntry
from rimuru_cli.tui.ages import StepClock
from rimuru_cli.tui.history import History
from rimuru_cli.tui.messages import SourceStatus

_MOST_EVENTS = 500
_SPANS = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass
class PoolState:
    """The state of the dashboard.

    Attributes:
        frame: the newest frame, also after its engine ended; None before the first.
        status: how the source stands.
        engines: engines that run now.
        events: the adjuster's decisions seen so far, oldest first.
        window_seconds: how much of the past the charts show.
        clock: the monotonic clock; tests put their own.
    """

    frame: Frame | None = None
    status: SourceStatus = field(default_factory=SourceStatus)
    engines: tuple[EngineEntry, ...] = ()
    events: list[AdjusterRecord] = field(default_factory=list)
    window_seconds: float = 120.0
    clock: Callable[[], float] = time.monotonic
    history: History = field(default_factory=History)
    steps: StepClock = field(default_factory=StepClock)
    _arrived: float = 0.0

    def add(self, frame: Frame) -> None:
        """Take a frame in."""
        last = self.frame
        if last is None or frame.engine.engine_id != last.engine.engine_id or frame.time < last.time:
            self.events.clear()
        known = self.events[-1].number if self.events else -1
        self.events.extend(event for event in frame.events if event.number > known)
        del self.events[:-_MOST_EVENTS]
        self.history.add(frame)
        self.steps.add(frame)
        self.frame = frame
        self._arrived = self.clock()

    @property
    def now(self) -> float:
        """The moment that is shown: the newest frame's, and what has passed since then, unless a recording stands still."""
        if self.frame is None:
            return 0.0
        passed = self.clock() - self._arrived if self.status.state in ("live", "waiting") else 0.0
        return self.frame.time + max(0.0, passed)

    @property
    def shown_seconds(self) -> float:
        """How much of the past the charts show now: what there is, rounded up, as long as that is less than `window_seconds`."""
        return min(self.window_seconds, next((span for span in _SPANS if self.history.length <= span), self.window_seconds))

    @property
    def gone(self) -> bool:
        """Whether the engine that was shown has ended."""
        return self.frame is not None and self.status.state == "waiting"

    @property
    def hit_rate(self) -> float | None:
        """Hits of the last ten seconds, or of the whole run where there were no selections lately."""
        recent = self.history.hit_rate(10.0)
        return recent if recent is not None or self.frame is None else self.frame.counters.hit_rate

    @property
    def answer(self) -> CeilingAnswer | None:
        """What became of the last request for another ceiling."""
        return None if self.frame is None else self.frame.answer

    def shades(self) -> NDArray[np.uint8]:
        """How brightly each page of the newest frame is drawn now."""
        assert self.frame is not None, "only a frame has pages"
        return self.steps.shades(self.frame.pages.loaded_step, self.now)
