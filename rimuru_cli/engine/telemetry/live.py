"""Frames of a running engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.assemble import FrameAssembler, Head
from rimuru_cli.engine.telemetry.discovery import is_alive, open_engine, running_engines
from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.engine.telemetry.layout import DamagedTables
from rimuru_cli.engine.telemetry.segment import Segment, beat_now
from rimuru_cli.engine.telemetry.sources import EngineEntry, SourceState
from rimuru_cli.engine.telemetry.tables import Tables
from rimuru_cli.engine.telemetry.wire import TABLE_TYPES, head_of, split, tables_of

_BEAT_SECONDS = 0.5
_LOOK_SECONDS = 0.5  # between two looks for an engine
_CHECK_SECONDS = 1.0  # between two looks whether the engine still lives
_SILENT_MS = 1_500

Tap = Callable[[Head, Tables], None]


class LiveSource:
    """A `FrameSource` over the engines of one folder; attaches to the newest one, and to the next one when that ends.

    Args:
        folder: see `Publisher`.
        pid: attach to this process's engine first.
        tap: told what every frame is made of (a recorder).
    """

    def __init__(self, folder: Path, *, pid: int | None = None, tap: Tap | None = None) -> None:
        self._folder, self._pid, self._tap = folder, pid, tap
        self._segment: Segment | None = None
        self._engine_id: str | None = None
        self._number = 0
        self._assembler = FrameAssembler()
        self._looked = self._beaten = self._checked = float("-inf")
        self._closed = False

    @property
    def state(self) -> SourceState:
        """See `FrameSource.state`."""
        return "waiting" if self._segment is None else "live"

    @property
    def can_control(self) -> bool:
        """See `FrameSource.can_control`."""
        return self._segment is not None

    def poll(self) -> Frame | None:
        """See `FrameSource.poll`."""
        if self._closed:
            return None
        now = time.monotonic()
        if self._segment is None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._attach_newest()
        segment = self._segment
        if segment is None:
            return None
        if now - self._beaten >= _BEAT_SECONDS:
            self._beaten = now
            segment.set(words.READER_BEAT, beat_now())
        frame = self._next_frame(segment)
        if frame is None and not self._still_there(segment, now):
            self._detach()
        return frame

    def engines(self) -> list[EngineEntry]:
        """See `FrameSource.engines`."""
        return running_engines(self._folder, self._engine_id if self._segment is not None else None)

    def attach(self, engine_id: str) -> bool:
        """See `FrameSource.attach`."""
        if self._closed:
            return False
        segment = open_engine(self._folder, engine_id)
        if segment is None:
            return False
        self._take(segment, engine_id)
        return True

    def request_ceiling(self, ceiling_bytes: int) -> bool:
        """See `FrameSource.request_ceiling`."""
        segment = self._segment
        if segment is None or not 0 < ceiling_bytes < 1 << 62:
            return False
        segment.set(words.READER_BEAT, beat_now())
        segment.ask(ceiling_bytes, secrets.randbits(62) + 1)
        return True

    def close(self) -> None:
        """See `FrameSource.close`."""
        self._closed = True
        self._detach()

    def _attach_newest(self) -> None:
        engines = running_engines(self._folder)
        if self._pid is not None:
            engines = [entry for entry in engines if entry.pid == self._pid] or engines
        self._pid = None
        if engines:
            self.attach(engines[0].engine_id)

    def _take(self, segment: Segment, engine_id: str) -> None:
        self._detach()
        self._segment, self._engine_id = segment, engine_id
        self._beaten = float("-inf")
        self._checked = time.monotonic()

    def _detach(self) -> None:
        segment, self._segment = self._segment, None
        self._number = 0
        if segment is not None:
            segment.close()

    def _next_frame(self, segment: Segment) -> Frame | None:
        try:
            found = segment.read(after=self._number)
            if found is None:
                return None
            self._number, data = found
            raw, arrays = split(data, TABLE_TYPES)
            head, tables = head_of(raw), tables_of(arrays)
            frame = self._assembler.frame(head, tables)
        except DamagedTables:  # another one comes
            return None
        if self._tap is not None:
            self._tap(head, tables)
        return frame

    def _still_there(self, segment: Segment, now: float) -> bool:
        """Whether more frames can come; also follows an engine into a larger file."""
        state = segment.get(words.STATE)
        if state == words.ALIVE:
            if now - self._checked < _CHECK_SECONDS or beat_now() - segment.get(words.BEAT) < _SILENT_MS:
                return True
            self._checked = now
            return is_alive(segment)
        if state == words.MOVED and self._engine_id is not None:
            larger = open_engine(self._folder, self._engine_id)
            if larger is not None:
                self._take(larger, self._engine_id)
                return True
        return False
