"""One file from the hub to the disk, however often the way there breaks.

Bytes go into a part file at the place where they belong, as soon as they arrive, so whatever kills the process leaves a beginning of the
file and the next process goes on at its end. The checksum is taken on the way; a file gets its final name only with the right one.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rimuru_cli.hub.integrity import ContentHash, hash_file
from rimuru_cli.hub.patience import Cancelled, Patience, Temporary
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_models.errors import RimuruError, VerificationError

if TYPE_CHECKING:
    from httpx2 import Response

ATTEMPTS = 7
"""Attempts in a row that bring nothing, before a transfer gives up; about half a minute of waiting when connections are refused."""
BUDGET_SECONDS = 600.0
"""Longest that a rate limit may hold a transfer up."""

_LOOK_BYTES = 16 << 20
_IN_BETWEEN = "something between here and the hub may answer in its place (a login page of the network, a proxy); try another network"
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)


@dataclass(frozen=True)
class Origin:
    """Where files come from: `org/name` and a commit of 40 hex digits."""

    repository: str
    commit: str


class Tally:
    """Counts bytes for a progress display; any thread may call it.

    Attributes:
        done: bytes of the model that are there, wherever they came from.
        received: bytes that came over the network.
        checked: bytes of files that were there before and have been read to check them.
    """

    def __init__(self, done: int = 0) -> None:
        self._lock = threading.Lock()
        self.done = done
        self.received = 0
        self.checked = 0

    def arrived(self, num_bytes: int) -> None:
        """Bytes came over the network."""
        with self._lock:
            self.done += num_bytes
            self.received += num_bytes

    def correct(self, num_bytes: int) -> None:
        """Bytes are there that nobody fetched just now, or (negative) turned out not to be."""
        with self._lock:
            self.done += num_bytes

    def has_checked(self, num_bytes: int) -> None:
        """Bytes that were there have been read."""
        with self._lock:
            self.checked += num_bytes


class PartFile:
    """The beginning of a file, open for writing at its end. Only one process at a time has it open (see `RepositoryCache.lock`).

    Writing is positional: where a file system only pretends to lock, two writers put the same bytes into the same places.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: what has been written is on its way to the disk even if this process is killed the next moment.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    @property
    def num_bytes(self) -> int:
        """Bytes that are there."""
        return os.fstat(self._descriptor).st_size

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at their place."""
        view = memoryview(data)
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def cut(self, num_bytes: int) -> None:
        """Drop everything from there on."""
        os.ftruncate(self._descriptor, num_bytes)

    def check_name(self) -> None:
        """Make sure that the file still has its name.

        Raises:
            RimuruError: somebody deleted it (POSIX; elsewhere an open file cannot be deleted).
        """
        if os.fstat(self._descriptor).st_nlink == 0:
            raise RimuruError(
                f"Another program deleted {self.path} while it was being downloaded.",
                hint="type the same command again, and leave the cache alone until it is done (`hf cache prune` deletes unfinished files)",
            )

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._descriptor)


def receive(
    hub: Hub, origin: Origin, file: RemoteFile, start: int, stop: int, take: Callable[[int, bytes], None], patience: Patience
) -> None:
    """Hand the bytes of a file from `start` to `stop` (exclusive) to `take`, each once and in order, over as many connections as it needs.

    Args:
        hub: whom to ask.
        origin: which repository and commit.
        file: which file.
        start: first byte.
        stop: where to stop; the connection is closed there, whatever the server would go on to send.
        take: called with (offset, bytes).
        patience: when to give up.

    Raises:
        RimuruError: refused, or given up.
        Cancelled: the hub's `cancelled` was set.
    """
    offset, whole = start, False  # whole: the server cannot send parts
    while offset < stop:
        try:
            asked = 0 if whole else offset
            with hub.open(
                origin.repository, origin.commit, file.name, asked, None if whole or stop == file.num_bytes else stop
            ) as response:
                skip = offset - _first_byte(response, asked, file.num_bytes)
                for chunk in response.iter_bytes():  # unpacks what a server compresses although it was told not to
                    if hub.cancelled.is_set():
                        raise Cancelled
                    if skip >= len(chunk):
                        skip -= len(chunk)
                        continue
                    data = chunk[skip : skip + stop - offset]
                    skip = 0
                    take(offset, data)
                    offset += len(data)
                    patience.progress()
                    if offset == stop:
                        return
            raise Temporary(f"{hub.host} closed the connection early", hint="check the network connection; what has arrived is kept")
        except _NoRanges:
            whole = True
        except Temporary as error:
            patience.after(error)


class _NoRanges(Exception):
    """The answer is not the part that was asked for; the whole file may still be had."""


def _first_byte(response: Response, asked: int, num_bytes: int) -> int:
    """Where in the file the answer begins: at `asked`, or at 0 when the server sends all of it regardless."""
    plain = response.headers.get("content-encoding", "identity").strip().lower() in ("", "identity")
    length = response.headers.get("content-length", "")
    announced = int(length) if plain and length.isascii() and length.isdigit() and len(length) < 19 else None
    if response.status_code == 200:
        if announced not in (None, num_bytes):
            # Taken as a beginning, a page of somebody in between would spoil what follows it.
            raise Temporary(f"the hub sent {announced} bytes of a file that has {num_bytes}", hint=_IN_BETWEEN)
        return 0
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("content-range", "").strip())
        if match is not None and plain and int(match[1]) == asked and match[3] in ("*", str(num_bytes)):
            if announced not in (None, int(match[2]) + 1 - asked):
                raise Temporary(f"the hub sent {announced} bytes as bytes {match[1]} to {match[2]} of a file", hint=_IN_BETWEEN)
            return asked
    elif response.status_code != 416:
        raise Temporary(f"the hub's answer makes no sense (HTTP {response.status_code})")
    if asked == 0:
        raise Temporary("the hub sent a part of a file that nobody asked for")
    raise _NoRanges


class Transfer:
    """Fetches files of one commit.

    Args:
        hub: whom to ask.
        origin: repository and commit.
        tally: told how many bytes are there.
    """

    def __init__(self, hub: Hub, origin: Origin, tally: Tally) -> None:
        self._hub = hub
        self._origin = origin
        self._tally = tally

    def fetch(self, file: RemoteFile, part: Path, counted: int) -> str:
        """Complete `part` with the content of `file`, on the disk and with the right checksum. Whoever calls holds the lock and renames it.

        Args:
            file: what to fetch.
            part: the part file; what it holds is kept and not fetched again.
            counted: how many of its bytes the tally has been told of already.

        Returns:
            sha256 of the content, hex.

        Raises:
            VerificationError: the hub sends other content than it announces, twice.
            RimuruError: refused, or given up; the part stays.
            Cancelled: the hub's `cancelled` was set; the part stays.
            OSError: the disk is full, say; the part stays.
        """
        with PartFile(part) as target:
            for attempt in (1, 2):
                kept = target.num_bytes
                if kept > file.num_bytes:  # no beginning of this file
                    target.cut(0)
                    kept = 0
                self._tally.correct(kept - counted)
                content = hash_file(part, file.num_bytes, file.etag, limit=kept, cancelled=self._hub.cancelled)
                self._rest(target, file, content, kept)
                if content.matches():
                    target.sync()
                    target.check_name()
                    return content.sha256
                # A beginning that was damaged (the machine crashed, another tool's half), or bytes that were damaged on the way.
                target.cut(0)
                counted = file.num_bytes
                if attempt == 1 and self._hub.notice is not None:
                    self._hub.notice(f"{file.name} arrived damaged and is fetched again")
            self._tally.correct(-counted)
        part.unlink(missing_ok=True)
        raise VerificationError(
            f"{file.name} of {self._origin.repository} arrived with the wrong checksum twice: {content.found} instead of {file.etag}.",
            hint="nothing of it is kept; something on the way changes files, or the hub's copy is damaged: try another network, or later",
        )

    def _rest(self, target: PartFile, file: RemoteFile, content: ContentHash, kept: int) -> None:
        look = kept + _LOOK_BYTES

        def take(offset: int, data: bytes) -> None:
            nonlocal look
            target.write(offset, data)
            content.update(data)
            self._tally.arrived(len(data))
            if offset >= look:
                look = offset + _LOOK_BYTES
                target.check_name()

        receive(self._hub, self._origin, file, kept, file.num_bytes, take, self._hub.patience(ATTEMPTS, BUDGET_SECONDS))
