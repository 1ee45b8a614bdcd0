"""How long ago a page got its owner. Frames tell steps; this makes time of them, so that brightness fades alike on every machine."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.tui.palette import BASE, FRESH, WARM

FRESH_SECONDS: Final = 0.7
WARM_SECONDS: Final = 2.0


class StepClock:
    """Remembers when steps were seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._engine_id = ""

    def add(self, frame: Frame) -> None:
        """Take a frame in; another engine or an earlier moment starts anew, and what such a first frame holds is not "just loaded"."""
        step = max(frame.counters.step, frame.counters.tables_step)
        if frame.engine.engine_id != self._engine_id or (self._seen and frame.time < self._seen[-1][0]):
            self._seen.clear()
            self._engine_id = frame.engine.engine_id
        self._seen.append((frame.time, step))
        while len(self._seen) > 2 and self._seen[1][0] < frame.time - 2 * WARM_SECONDS:
            self._seen.popleft()

    def step_at(self, moment: float) -> int:
        """The last step seen at or before a moment; the first one seen for earlier moments."""
        step = self._seen[0][1] if self._seen else 0
        for time, number in self._seen:
            if time > moment:
                break
            step = number
        return step

    def shades(self, loaded_step: NDArray[np.int32], now: float) -> NDArray[np.uint8]:
        """FRESH, WARM or BASE for each page, by the step before which it was loaded."""
        shades = np.full(loaded_step.shape, BASE, dtype=np.uint8)
        shades[loaded_step > self.step_at(now - WARM_SECONDS)] = WARM
        shades[loaded_step > self.step_at(now - FRESH_SECONDS)] = FRESH
        return shades
