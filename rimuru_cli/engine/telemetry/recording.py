"""Recordings: frames in a compressed file, most of them as what changed since the frame before.

    8 bytes  "RIMUREC1"
    zlib stream of records, flushed once a second, so that a killed recorder's file plays up to its last second
    record   u32 length, u32 crc32, then the bytes of a frame as in `wire.py`, with these arrays:
               a table          as it is, in every 128th frame and where its shape changed otherwise than in the next line
               table + "#"      int32 [1], its number of rows, if some were added (of -1, before the changes below)
               table + "^"      bits, eight to a byte: which numbers of the flattened table grew by 1, where many did and none by more
               table + "+"      else uint8, by how much each grew, where many did and none by more than 255
               table + "@"      else int32, places in the flattened table that changed, each less the one before, and
               table + "="      their new values, each less the one before
               "scores16"       scores as float16, about once a second (they change all the time and are shown coarsely)
             Except in every 128th frame, the head has only new events, and the engine only if something about it changed.

A recording may come from a stranger: whatever is too large, cut off or wrong ends it there, and what came before still plays.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.assemble import Head
from rimuru_cli.engine.telemetry.layout import MOST_PAGES, DamagedTables
from rimuru_cli.engine.telemetry.tables import Tables
from rimuru_cli.engine.telemetry.wire import MOST_EVENTS, TABLE_TYPES, head_of, split, tables_of
from rimuru_models.errors import RimuruError, UsageError

MAGIC = b"RIMUREC1"
MOST_FILE_BYTES = 1 << 30
MOST_RECORD_BYTES = 64 << 20
MOST_RECORDS = 1 << 18
MOST_BYTES = 1 << 29
KEY_EVERY = 128

RECORD = struct.Struct("<II")
_CHUNK = 1 << 16
SCORES = "scores16"
_DELTA_TYPES = {
    SCORES: ("<f2", 2),
    **{f"{name}#": ("<i4", 1) for name in TABLE_TYPES},
    **{f"{name}^": ("|u1", 1) for name in TABLE_TYPES},
    **{f"{name}+": ("|u1", 1) for name in TABLE_TYPES},
    **{f"{name}@": ("<i4", 1) for name in TABLE_TYPES},
    **{f"{name}=": (dtype, 1) for name, (dtype, _) in TABLE_TYPES.items()},
}
RECORD_TYPES = {**TABLE_TYPES, **_DELTA_TYPES}


@dataclass(frozen=True)
class Record:
    """One frame of a recording: when it was taken, its bytes, and whether it needs none before it."""

    time: float
    data: bytes
    key: bool


@dataclass(frozen=True)
class Recording:
    """A recording in memory.

    Attributes:
        records: in the order they were taken, at least one; the first is a key frame.
        damage: why the file plays only up to there; None if it is whole.
    """

    records: tuple[Record, ...]
    damage: str | None = None

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the last."""
        return self.records[-1].time - self.records[0].time


class Unpacker:
    """Turns records back into heads and tables, one after the other; a key frame may come after any."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self._head: Head | None = None

    def apply(self, data: bytes, *, key: bool) -> tuple[Head, Tables]:
        """The next frame.

        Raises:
            DamagedTables: it does not follow from what came before.
        """
        raw, arrays = split(data, RECORD_TYPES)
        if key:
            self._arrays, self._head = {}, None
        now = {name: array for name, array in arrays.items() if name in TABLE_TYPES}
        if SCORES in arrays:
            now["scores"] = arrays[SCORES].astype("<f4")
        for name, before in self._arrays.items():
            if name not in now:
                now[name] = _changed(name, before, arrays)
        last = self._head
        head, tables = head_of(raw, None if last is None else last.engine), tables_of(now)
        if last is not None:
            head = replace(head, events=(*last.events, *head.events)[-MOST_EVENTS:])
        self._arrays, self._head = now, head
        return head, tables


def load_recording(path: Path) -> Recording:
    """Read a whole recording.

    Raises:
        UsageError: it is not there, cannot be read, or is none.
        RimuruError: nothing of it can be played.
    """
    try:
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise UsageError(f"{path} is larger than any recording ({MOST_FILE_BYTES >> 30} GiB).")
        with path.open("rb") as file:
            return read_recording(file, str(path))
    except FileNotFoundError as error:
        raise UsageError(f"There is no recording {path}.", hint="Record one with: rimuru dashboard --record FILE") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_recording(file: BinaryIO, name: str) -> Recording:
    """Read a recording from an open file; see `load_recording`."""
    if file.read(len(MAGIC)) != MAGIC:
        raise UsageError(f"{name} is not a recording of the dashboard.", hint="Record one with: rimuru dashboard --record FILE")
    records: list[Record] = []
    damage = None
    unpacker = Unpacker()
    total = 0
    try:
        for data in _bodies(file):
            key = len(records) % KEY_EVERY == 0
            head, _ = unpacker.apply(data, key=key)
            if records and head.time < records[-1].time:
                raise DamagedTables("time goes backwards")
            total += len(data)
            if len(records) >= MOST_RECORDS or total > MOST_BYTES:
                raise DamagedTables("it is longer than any recording")
            records.append(Record(head.time, data, key))
    except DamagedTables as error:
        damage = str(error)
    if not records:
        raise RimuruError(f"Nothing of the recording {name} can be played: {damage or 'it is empty'}.")
    return Recording(tuple(records), damage)


def _bodies(file: BinaryIO) -> Iterator[bytes]:
    """The records' bytes. Raises DamagedTables where the file is cut off or wrong."""
    stream = _Stream(file)
    while True:
        prefix = stream.take(RECORD.size)
        if not prefix:
            return
        length, crc = RECORD.unpack(prefix)
        if length > MOST_RECORD_BYTES:
            raise DamagedTables("a record is too long")
        body = stream.take(length)
        if zlib.crc32(body) != crc:
            raise DamagedTables("a record is damaged")
        yield body


class _Stream:
    """Decompresses no more than is asked for, however much a few bytes would swell to."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zlib.decompressobj()

    def take(self, count: int) -> bytes:
        """Exactly `count` bytes; none at the end of the stream."""
        out = bytearray()
        while len(out) < count:
            data = self._zip.unconsumed_tail or self._file.read(_CHUNK)
            try:
                piece = self._zip.decompress(data, count - len(out))
            except zlib.error as error:
                raise DamagedTables(f"it cannot be decompressed: {error}") from error
            out += piece
            if not piece and not self._zip.unconsumed_tail and (self._zip.eof or not data):
                if out or not self._zip.eof:
                    raise DamagedTables("it is cut off")
                return b""
        return bytes(out)


def longer(table: NDArray[Any], rows: int) -> NDArray[Any]:
    """The table with rows of -1 added, up to so many."""
    return np.concatenate((table, np.full((rows - len(table), *table.shape[1:]), -1, dtype=table.dtype))) if rows > len(table) else table


def _changed(name: str, before: NDArray[Any], arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """The table after the changes that a record holds for it.

    Raises:
        DamagedTables: they are not changes of this table.
    """
    rows, bits, grown, places, values = (arrays.get(name + mark) for mark in "#^+@=")
    if rows is not None:
        if rows.shape != (1,) or not len(before) <= rows[0] <= MOST_PAGES or int(rows[0]) * math.prod(before.shape[1:]) > MOST_PAGES:
            raise DamagedTables(f"{name} has another number of rows")
        before = longer(before, int(rows[0]))
    after = before.reshape(-1)
    if bits is not None:
        if len(bits) != -(-len(after) // 8):
            raise DamagedTables(f"{name} grew by another size")
        after = after + np.unpackbits(bits, count=len(after))
    if grown is not None:
        if len(grown) != len(after):
            raise DamagedTables(f"{name} grew by another size")
        after = after + grown
    if (places is None) != (values is None):
        raise DamagedTables(f"{name} has changes without places")
    if places is not None and values is not None:
        places, values = np.cumsum(places, dtype=np.int64), np.cumsum(values, dtype=np.int64)
        if len(places) != len(values) or (len(places) and not (places.min() >= 0 and int(places.max()) < len(after))):
            raise DamagedTables(f"{name} changes outside of itself")
        after = after.copy()
        after[places] = values
    return after.astype(before.dtype, copy=False).reshape(before.shape)
