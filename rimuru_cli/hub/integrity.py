"""Checksums as the hub keeps them: sha256 of large files, git's sha1 of small ones. Both in one pass."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from rimuru_cli.hub.patience import Cancelled

_CHUNK_BYTES = 1 << 20
_SHA256_DIGITS = 64


class ContentHash:
    """The checksums of one file's content, fed piece by piece from its beginning.

    Args:
        num_bytes: size of the whole file, which git's checksum covers.
        etag: the expected checksum, which says of what kind it is.
    """

    def __init__(self, num_bytes: int, etag: str) -> None:
        self._etag = etag
        self._sha256 = hashlib.sha256()
        # git's name for a blob: sha1 of b"blob <size>\0" and the content (git-scm.com/book, "Git Objects"); no protection, only a checksum
        self._git = None if len(etag) == _SHA256_DIGITS else hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        """Take in the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    def matches(self) -> bool:
        """Whether what was taken in is the expected content."""
        return (self._git or self._sha256).hexdigest() == self._etag

    @property
    def found(self) -> str:
        """The checksum of what was taken in, of the expected kind, hex."""
        return (self._git or self._sha256).hexdigest()

    @property
    def sha256(self) -> str:
        """sha256 of what was taken in, hex, whatever the kind of the expected checksum."""
        return self._sha256.hexdigest()


def hash_file(
    path: Path,
    num_bytes: int,
    etag: str,
    *,
    limit: int | None = None,
    report: Callable[[int], None] | None = None,
    cancelled: threading.Event | None = None,
) -> ContentHash:
    """Read a file and return its checksums.

    Args:
        path: the file.
        num_bytes: the size it should have.
        etag: the checksum it should have.
        limit: read only so many bytes from its beginning; None: all.
        report: told how many bytes more have been read.
        cancelled: ends the reading.

    Raises:
        Cancelled: `cancelled` was set.
        OSError: it cannot be read.
    """
    content = ContentHash(num_bytes, etag)
    left = limit
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES if left is None else min(_CHUNK_BYTES, left)):
            if cancelled is not None and cancelled.is_set():
                raise Cancelled
            content.update(chunk)
            if left is not None:
                left -= len(chunk)
            if report is not None:
                report(len(chunk))
    return content
