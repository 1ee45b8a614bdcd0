"""Frames of a recording, at the pace they were taken, or any other."""

from __future__ import annotations

import io
import time
from bisect import bisect_right
from collections.abc import Callable
from importlib.resources import files

from rimuru_cli.engine.telemetry.assemble import FrameAssembler
from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.layout import DamagedTables
from rimuru_cli.engine.telemetry.recording import Recording, Unpacker, read_recording
from rimuru_cli.engine.telemetry.sources import EngineEntry, SourceState

DEMO_FILE = "demo.rimurec"


class ReplaySource:
    """A `Playback`: plays a recording once, or over and over.

    Args:
        recording: what to play.
        loop: begin again at the end.
        clock: gives seconds; tests put their own in its place.
    """

    def __init__(self, recording: Recording, *, loop: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = recording.records
        self._start = self._records[0].time
        self._times = [record.time - self._start for record in self._records]
        self._keys = [index for index, record in enumerate(self._records) if record.key]
        self._duration = recording.duration
        self._loop, self._clock = loop, clock
        self._speed = 1.0
        self._since = clock()
        self._from = 0.0  # position at `_since`
        self._unpacked = -1  # record that the unpacker is at
        self._shown = -1
        self._unpacker = Unpacker()
        self._assembler = FrameAssembler()
        self._last: Frame | None = None
        self._closed = False

    @property
    def state(self) -> SourceState:
        """See `FrameSource.state`."""
        if self._speed == 0.0:
            return "paused"
        return "ended" if not self._loop and self.position >= self._duration else "live"

    @property
    def can_control(self) -> bool:
        """A recording cannot be told anything."""
        return False

    @property
    def position(self) -> float:
        """See `Playback.position`."""
        passed = self._from + (self._clock() - self._since) * self._speed
        if self._loop and passed > self._duration > 0:
            return passed % self._duration
        return min(max(passed, 0.0), self._duration)

    @property
    def duration(self) -> float:
        """See `Playback.duration`."""
        return self._duration

    def seek(self, seconds: float) -> None:
        """See `Playback.seek`."""
        self._from, self._since = min(max(seconds, 0.0), self._duration), self._clock()
        self._shown = -1

    def set_speed(self, factor: float) -> None:
        """See `Playback.set_speed`.

        Raises:
            ValueError: a negative factor, or none.
        """
        if not 0.0 <= factor < float("inf"):
            raise ValueError(f"a recording cannot be played {factor} times as fast")
        self._from, self._since = self.position, self._clock()
        self._speed = factor

    def poll(self) -> Frame | None:
        """See `FrameSource.poll`."""
        if self._closed:
            return None
        wanted = max(0, bisect_right(self._times, self.position) - 1)
        if wanted == self._shown:
            return None
        frame = self._frame(wanted)
        self._shown = wanted
        self._last = frame or self._last
        return frame

    def engines(self) -> list[EngineEntry]:
        """See `FrameSource.engines`: the one that was recorded."""
        if self._last is None:
            return []
        engine = self._last.engine
        return [EngineEntry(engine.pid, engine.engine_id, engine.role, engine.model, engine.device, engine.started, True, True)]

    def attach(self, engine_id: str) -> bool:
        """See `FrameSource.attach`."""
        return self._last is not None and engine_id == self._last.engine.engine_id

    def request_ceiling(self, ceiling_bytes: int) -> bool:
        """Nobody is there to ask."""
        return False

    def close(self) -> None:
        """See `FrameSource.close`."""
        self._closed = True

    def _frame(self, wanted: int) -> Frame | None:
        """The frame of a record: from where the unpacker stands if that is before it, else from the last key frame."""
        first = self._unpacked + 1
        key = max(self._keys[: bisect_right(self._keys, wanted)])
        if not key <= first <= wanted:
            first = key
            self._assembler.forget()
        frame = None
        try:
            for index in range(first, wanted + 1):
                record = self._records[index]
                head, tables = self._unpacker.apply(record.data, key=record.key)
                self._unpacked = index
                if index == wanted:
                    frame = self._assembler.frame(head, tables)
        except DamagedTables:  # unreadable records were left out when the recording was read; this one contradicts its own pool
            return None
        return frame


def demo_source() -> ReplaySource:
    """The recording that comes with rimuru, over and over: a long chat with the demonstration model."""
    data = files("rimuru_cli.engine.telemetry").joinpath(DEMO_FILE).read_bytes()
    return ReplaySource(read_recording(io.BytesIO(data), "of the demonstration"), loop=True)
