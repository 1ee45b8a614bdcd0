"""Writing recordings; see `recording.py` for what is in them."""

from __future__ import annotations

import contextlib
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.assemble import Head
from rimuru_cli.engine.telemetry.frame import EngineIdentity
from rimuru_cli.engine.telemetry.recording import KEY_EVERY, MAGIC, MOST_FILE_BYTES, MOST_RECORDS, RECORD, SCORES, longer
from rimuru_cli.engine.telemetry.tables import Tables
from rimuru_cli.engine.telemetry.wire import HeadWriter, array_items, joined, pieces_of
from rimuru_models.errors import UsageError


class Recorder:
    """Writes a recording; give it as `tap` to a `LiveSource`.

    Args:
        path: a file that is not there yet.
        hz: most frames a second.
        score_seconds: least time between two frames that tell scores.

    Attributes:
        frames: written so far.
        stopped: why nothing more is written (disk full, size limit), or None.

    Raises:
        UsageError: the file is there already, or cannot be made.
    """

    def __init__(self, path: Path, *, hz: float = 10.0, score_seconds: float = 1.0) -> None:
        try:
            self._file: BinaryIO | None = path.open("xb")
            self._file.write(MAGIC)
        except FileExistsError as error:
            raise UsageError(f"There is a file {path} already.", hint="Name another one, or delete it first.") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error
        self._path = path
        self._interval, self._score_seconds = 1.0 / hz, score_seconds
        self._zip = zlib.compressobj(9)
        self._heads = HeadWriter()
        self._last: dict[str, NDArray[Any]] = {}
        self._last_event = -1
        self._engine: EngineIdentity | None = None
        self._written = len(MAGIC)
        self._frame_time = self._score_time = self._flush_time = float("-inf")
        self.frames = 0
        self.stopped: str | None = None

    def __call__(self, head: Head, tables: Tables) -> None:
        """Add a frame, unless the last one was just before it."""
        if self._file is None or 0 <= head.time - self._frame_time < 0.95 * self._interval:
            return
        self._frame_time = head.time
        key = self.frames % KEY_EVERY == 0
        new = head.events if key else tuple(event for event in head.events if event.number > self._last_event)
        self._last_event = max((event.number for event in head.events), default=-1)
        same = head.engine == self._engine and not key
        self._engine = self._engine if same and self._engine is not None else head.engine
        text = self._heads.json(replace(head, events=new, engine=self._engine), brief=not key)
        pieces, total = pieces_of(text, self._arrays(head, tables, key=key))
        body = joined(pieces, total)
        out = self._zip.compress(RECORD.pack(len(body), zlib.crc32(body))) + self._zip.compress(body)
        now = time.monotonic()
        if now - self._flush_time >= 1.0:
            self._flush_time = now
            out += self._zip.flush(zlib.Z_SYNC_FLUSH)
        self._write(out)
        self.frames += 1
        if self.frames >= MOST_RECORDS or self._written > MOST_FILE_BYTES:
            self._write(self._zip.flush())
            self._end("the recording has reached the largest size that is kept")

    def close(self) -> None:
        """Finish the file; one without frames is taken away. May be called twice."""
        if self._file is None:
            return
        if self.frames:
            self._write(self._zip.flush())
        self._end(self.stopped)
        if not self.frames:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _write(self, data: bytes) -> None:
        try:
            if self._file is not None and data:
                self._file.write(data)
                self._file.flush()
                self._written += len(data)
        except OSError as error:
            self._end(f"the recording ended: {error.strerror or error}")

    def _end(self, why: str | None) -> None:
        file, self._file = self._file, None
        self.stopped = why
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.stopped = why or f"the recording ended: {error.strerror or error}"

    def _arrays(self, head: Head, tables: Tables, *, key: bool) -> list[tuple[str, NDArray[Any]]]:
        items: list[tuple[str, NDArray[Any]]] = []
        for name, table in array_items(tables):
            if name == "scores":
                if key or head.time - self._score_time >= self._score_seconds:
                    self._score_time = head.time
                    items.append((SCORES, table.astype("<f2")))
                continue
            last = self._last.get(name)
            self._last[name] = table.copy()
            if key or last is None or last.shape[1:] != table.shape[1:] or len(last) > len(table):
                items.append((name, table))
                continue
            if len(last) < len(table):
                items.append((f"{name}#", np.array([len(table)], dtype="<i4")))
            items += _changes(name, longer(last, len(table)).reshape(-1), table.reshape(-1))
        return items


def _changes(name: str, before: NDArray[Any], now: NDArray[Any]) -> list[tuple[str, NDArray[Any]]]:
    """What makes one flat table of whole numbers into another, in as few bytes as is easy."""
    places = np.flatnonzero(before != now)
    if not len(places):
        return []
    grown = now - before
    if len(places) > len(now) // 8 and grown.min() >= 0 and grown.max() <= 255:
        return [(f"{name}^", np.packbits(grown.astype(np.bool_)))] if grown.max() == 1 else [(f"{name}+", grown.astype("|u1"))]
    # Pages that are taken together lie side by side, so their differences are nearly all the same and compress to nothing.
    values = np.diff(now[places], prepend=now.dtype.type(0))
    return [(f"{name}@", np.diff(places, prepend=0).astype("<i4")), (f"{name}=", values.astype(now.dtype))]
