"""A file in memory, shared by one engine and its readers: one page of numbers, then two places for frames.

The engine writes a frame into the place that does not hold the newest one and then says which is newest, so a reader has the time of a
whole frame to copy it, and it looks afterwards whether the place was written meanwhile. Numbers are aligned 64-bit words, which every
processor stores in one go. Whoever may open the file may read and write all of it: it is for one user only (mode 0600 in a folder of 0700).

The file is filled before it is mapped. A mapping of a file with holes would kill the process when the disk is full.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.telemetry.layout import DamagedTables

SUFFIX = ".engine"
VERSION = 1
ALIVE, CLOSED, MOVED = 1, 2, 3
"""States: publishing; the engine ended; it publishes in a larger file with the same engine id now."""

_MAGIC = int.from_bytes(b"rimuruT\0", "little")
_HEAD_BYTES = 4096
_CARD_AT = 1024
_MOST_BYTES = 1 << 30
_TRIES = 8

# Words of the first page. Written by the engine, up to FRAME before anybody looks:
MAGIC, FORMAT, PID, PID_SPACE, PROCESS_START, SLOT_BYTES, CARD_BYTES = range(7)
STATE, BEAT, FRAME = 8, 9, 10
_LENGTH, _OPENED, _SEALED = 12, 14, 16  # of the two places each: bytes; number of the frame, before and after writing
# Written by readers:
READER_BEAT, ASKED_BYTES, ASKED = 32, 33, 34

_fence = threading.Lock()


def fence() -> None:
    """Nothing written before is seen after anything written later: taking and giving up a lock twice is a full barrier everywhere."""
    with _fence:
        pass
    with _fence:
        pass


def beat_now() -> int:
    """Milliseconds of the clock that all processes of this machine share and nobody sets."""
    return time.monotonic_ns() // 1_000_000


class Segment:
    """The mapped file. Use `create` or `open`.

    Attributes:
        path: where it lies.
        card: who publishes here, as given to `create`.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._bytes = memoryview(mapping)
        self._words: NDArray[np.uint64] = np.frombuffer(mapping, dtype=np.uint64, count=_HEAD_BYTES // 8)
        self.card: dict[str, Any] = {}
        self.slot_bytes = 0

    @classmethod
    def create(cls, path: Path, slot_bytes: int, card: dict[str, Any], words: dict[int, int]) -> Segment:
        """Make the file and fill its first page; `words` are those up to PROCESS_START.

        Raises:
            OSError: the folder is not there, is not writable, or has no room. Nothing is left behind.
            FileExistsError: there is such a file.
        """
        slot_bytes = -(-slot_bytes // 4096) * 4096
        text = json.dumps(card).encode()
        assert _CARD_AT + len(text) <= _HEAD_BYTES, "the card fits the first page"
        total = _HEAD_BYTES + 2 * slot_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                zeros = memoryview(bytes(1 << 20))
                left = total
                while left:
                    left -= file.write(zeros[: min(left, len(zeros))])
                mapping = mmap.mmap(file.fileno(), total)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        segment = cls(path, mapping)
        segment.card, segment.slot_bytes = card, slot_bytes
        segment._bytes[_CARD_AT : _CARD_AT + len(text)] = text
        for place, value in (
            words | {FORMAT: VERSION, SLOT_BYTES: slot_bytes, CARD_BYTES: len(text), STATE: ALIVE, BEAT: beat_now()}
        ).items():
            segment.set(place, value)
        fence()
        segment.set(MAGIC, _MAGIC)
        return segment

    @classmethod
    def open(cls, path: Path) -> Segment | None:
        """Map an existing file; None if it is none of ours, of another format, or not finished yet.

        Raises:
            OSError: it cannot be opened (it may just have gone).
        """
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            if not _HEAD_BYTES <= size <= _MOST_BYTES:
                return None
            mapping = mmap.mmap(file.fileno(), size)
        segment = cls(path, mapping)
        if segment._read_card(size):
            return segment
        segment.close()
        return None

    def _read_card(self, size: int) -> bool:
        if self.get(MAGIC) != _MAGIC or self.get(FORMAT) != VERSION:
            return False
        self.slot_bytes, length = self.get(SLOT_BYTES), self.get(CARD_BYTES)
        if _HEAD_BYTES + 2 * self.slot_bytes != size or _CARD_AT + length > _HEAD_BYTES:
            return False
        try:
            card = json.loads(bytes(self._bytes[_CARD_AT : _CARD_AT + length]))
        except (ValueError, RecursionError):
            return False
        self.card = card if isinstance(card, dict) else {}
        return isinstance(card, dict)

    def get(self, word: int) -> int:
        """One number of the first page."""
        return int(self._words[word])

    def set(self, word: int, value: int) -> None:
        """Store one number."""
        self._words[word] = value

    def write(self, pieces: Sequence[tuple[int, bytes | memoryview]], total: int) -> None:
        """Publish a frame of so many bytes, at most `slot_bytes`."""
        assert total <= self.slot_bytes, f"a frame of {total} bytes does not fit {self.slot_bytes}"
        number = self.get(FRAME) + 1
        place = number % 2
        start = _HEAD_BYTES + place * self.slot_bytes
        self.set(_OPENED + place, number)
        fence()
        for offset, piece in pieces:
            self._bytes[start + offset : start + offset + len(piece)] = piece
        self.set(_LENGTH + place, total)
        fence()
        self.set(_SEALED + place, number)
        fence()
        self.set(FRAME, number)

    def read(self, after: int = 0) -> tuple[int, bytes] | None:
        """The newest frame's number and bytes; None if its number is `after`, or it was written again while being read, every time.

        Raises:
            DamagedTables: the numbers make no sense.
        """
        for _ in range(_TRIES):
            number = self.get(FRAME)
            if number in (0, after):
                return None
            fence()
            place = number % 2
            length = self.get(_LENGTH + place)
            whole = self.get(_SEALED + place) == number
            if whole and length > self.slot_bytes:
                raise DamagedTables("a frame is longer than its place")
            if whole:
                start = _HEAD_BYTES + place * self.slot_bytes
                data = bytes(self._bytes[start : start + length])
                fence()
                if self.get(_OPENED + place) == number:
                    return number, data
        return None

    def ask(self, ceiling_bytes: int, token: int) -> None:
        """Ask the engine for another ceiling; `token` is any number but zero, another one each time."""
        self.set(ASKED_BYTES, ceiling_bytes)
        fence()
        self.set(ASKED, token)

    def asked(self, last: int) -> tuple[int, int] | None:
        """A request that is not `last`: its token and the bytes."""
        token = self.get(ASKED)
        if token in (0, last):
            return None
        fence()
        return token, self.get(ASKED_BYTES)

    def close(self) -> None:
        """Unmap the file. It cannot be used afterwards; may be called twice."""
        self._words = np.zeros(0, dtype=np.uint64)
        self._bytes.release()
        # A view that somebody still holds keeps the mapping; it goes with the view then.
        with contextlib.suppress(BufferError):
            self._mapping.close()
