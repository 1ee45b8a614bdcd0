"""The last minutes of one engine in half-second slots, and the columns that charts draw from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.frame import KINDS, Counters, Frame

SLOT_SECONDS: Final = 0.5
SLOTS: Final = 1200
"""Ten minutes."""

_NUM_KINDS = len(KINDS)


@dataclass(frozen=True, eq=False)
class Columns:
    """What charts draw, one element a column, oldest first; NaN where nothing was seen.

    Attributes:
        seconds: how much time a column stands for.
        composition: float64 [kinds, columns], bytes of each kind at the end of the column.
        hit_rate: share of the column's selections that were hits.
        decode_rate, prefill_rate: tokens a second.
        link_rate: bytes a second.
        context: tokens of the longest sequence.
    """

    seconds: float
    composition: NDArray[np.float64]
    hit_rate: NDArray[np.float64]
    decode_rate: NDArray[np.float64]
    prefill_rate: NDArray[np.float64]
    link_rate: NDArray[np.float64]
    context: NDArray[np.float64]


class History:
    """Collects frames of one engine. A frame of another engine, or of an earlier moment (a replay that was wound back), starts it anew."""

    def __init__(self) -> None:
        self._clear(None)

    def _clear(self, engine_id: str | None) -> None:
        self.engine_id = engine_id
        self.last: Frame | None = None
        self._slot = 0
        self._first_slot = 0
        self._composition = np.full((_NUM_KINDS, SLOTS), np.nan)
        # Rows: uses, hits (sums); decode, prefill, link, context (last value seen); time-weighted means would only blur half a second.
        self._sums = np.zeros((2, SLOTS))
        self._values = np.full((4, SLOTS), np.nan)
        self._swaps = np.zeros(SLOTS)
        self._preemptions = np.zeros(SLOTS)

    def add(self, frame: Frame) -> None:
        """Take a frame in."""
        last = self.last
        slot = int(frame.time / SLOT_SECONDS)
        if last is None or frame.engine.engine_id != self.engine_id or frame.time < last.time or _went_back(frame.counters, last.counters):
            self._clear(frame.engine.engine_id)
            self._slot = self._first_slot = slot
            last = None
        # Nothing moves within a step, however long it takes: a gap that is one step had the composition of before it.
        self._advance(slot, still=last is not None and frame.counters.step <= last.counters.step + 1)
        at = slot % SLOTS
        now = frame.counters
        self._composition[:, at] = np.bincount(frame.pages.kind, weights=frame.pages.size, minlength=_NUM_KINDS)
        self._values[:, at] = (now.decode_rate, now.prefill_rate, now.link_rate, now.context_used)
        if last is not None:
            before = last.counters
            self._sums[:, at] += (now.expert_uses - before.expert_uses, now.expert_hits - before.expert_hits)
            self._swaps[at] += now.swaps - before.swaps
            self._preemptions[at] += now.preemptions - before.preemptions
        self.last = frame

    def _advance(self, slot: int, *, still: bool) -> None:
        """Go on to a later slot. Slots in between carry the last values on for two seconds and then show a gap; the composition is carried
        on as long as the pool stood still."""
        for passed in range(max(self._slot + 1, slot - SLOTS + 1), slot + 1):
            at, before = passed % SLOTS, (passed - 1) % SLOTS
            carried = passed - self._slot <= 2.0 / SLOT_SECONDS
            self._composition[:, at] = self._composition[:, before] if carried or still else np.nan
            self._values[:, at] = self._values[:, before] if carried else np.nan
            self._sums[:, at] = self._swaps[at] = self._preemptions[at] = 0
        self._slot = max(self._slot, slot)

    @property
    def length(self) -> float:
        """Seconds that are known."""
        return (self._slot - self._first_slot + 1) * SLOT_SECONDS

    def hit_rate(self, seconds: float) -> float | None:
        """Share of hits among the selections of the last seconds; None if there were none."""
        uses, hits = self._sums[:, self._recent(seconds)].sum(axis=1)
        return float(hits / uses) if uses > 0 else None

    def selections(self, seconds: float) -> int:
        """Selections of an expert by a token in the last seconds."""
        return int(self._sums[0, self._recent(seconds)].sum())

    def swaps(self, seconds: float) -> int:
        """Experts exchanged in the last seconds."""
        return int(self._swaps[self._recent(seconds)].sum())

    def preemptions(self, seconds: float) -> int:
        """Sequences preempted in the last seconds."""
        return int(self._preemptions[self._recent(seconds)].sum())

    def _recent(self, seconds: float) -> NDArray[np.int64]:
        count = min(max(1, round(seconds / SLOT_SECONDS)), self._slot - self._first_slot + 1, SLOTS)
        return np.arange(self._slot - count + 1, self._slot + 1) % SLOTS

    def columns(self, window_seconds: float, num_columns: int) -> Columns:
        """The last `window_seconds` as at most `num_columns` columns of whole slots each; columns begin at fixed moments, so that a chart
        moves by whole columns and never shimmers."""
        per_column = max(1, round(window_seconds / SLOT_SECONDS / max(1, num_columns)))
        count = min(num_columns, SLOTS // per_column)
        end = (self._slot // per_column + 1) * per_column
        slots = np.arange(end - count * per_column, end)
        seen = (slots >= self._first_slot) & (slots <= self._slot) & (slots > self._slot - SLOTS)
        at = slots % SLOTS
        sums = np.where(seen, self._sums[:, at], 0).reshape(2, count, per_column).sum(axis=2)
        values = np.where(seen, self._values[:, at], np.nan)
        means = _mean_of_known(values.reshape(4, count, per_column))
        composition = np.where(seen, self._composition[:, at], np.nan).reshape(_NUM_KINDS, count, per_column)
        with np.errstate(invalid="ignore", divide="ignore"):
            hit_rate = np.where(sums[0] > 0, sums[1] / sums[0], np.nan)
        return Columns(
            per_column * SLOT_SECONDS,
            _last_known(composition),
            hit_rate,
            means[0],
            means[1],
            means[2],
            _last_known(values.reshape(4, count, -1))[3],
        )


def _went_back(now: Counters, before: Counters) -> bool:
    return now.step < before.step or now.expert_uses < before.expert_uses


def _mean_of_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = ~np.isnan(values)
    count = known.sum(axis=-1)
    total = np.where(known, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _last_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The last element along the last axis that is not NaN; NaN where there is none."""
    known = ~np.isnan(values)
    last = values.shape[-1] - 1 - np.argmax(known[..., ::-1], axis=-1)
    picked: NDArray[np.float64] = np.take_along_axis(values, last[..., None], axis=-1)[..., 0]
    return picked
