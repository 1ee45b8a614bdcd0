"""Files with weights as memory. The mapping is private (copy on write), because torch wants writable memory; nothing ever writes to it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

from rimuru_models.errors import CheckpointError


def map_file(path: Path, promised: int) -> mmap.mmap:
    """Map a whole file; its pages stay page cache that the system can drop and read again.

    Args:
        promised: bytes that its header was found to need.

    Raises:
        CheckpointError: it cannot be mapped, or has become shorter than that, so that touching it would fault.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}.") from None
    if len(mapping) < promised:
        raise _shrank(path, promised, len(mapping))
    return mapping


def _shrank(path: Path, promised: int, left: int) -> CheckpointError:
    return CheckpointError(
        f"{path} shrank from {promised} to {left} bytes while it was in use.",
        hint="Something else writes to it, a download or a copy perhaps: let that finish, then load the model again.",
    )


class MappedFiles:
    """Files that are mapped when they are first asked for. May be used from several threads.

    Memory of a file that has shrunk is gone: touching it kills the process, and nothing can catch that. So its size is looked at whenever
    it is asked for, which takes a microsecond, and by `check`.

    Args:
        needed: file -> bytes that its header was found to need.
    """

    def __init__(self, needed: Callable[[Path], int]) -> None:
        self._needed = needed
        self._held: dict[Path, tuple[mmap.mmap, int]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, path: Path) -> mmap.mmap:
        """A file's content.

        Raises:
            CheckpointError: it cannot be mapped, or is shorter than it was.
        """
        held = self._held.get(path)
        if held is None:
            with self._lock:
                assert not self._closed, "the reader is closed"
                held = self._held.get(path)
                if held is None:
                    needed = self._needed(path)
                    held = self._held[path] = map_file(path, needed), needed
        self._check(path, *held)
        return held[0]

    def check(self) -> None:
        """Look at the sizes of all files that are mapped.

        Raises:
            CheckpointError: one is shorter than it was; names it.
        """
        for path, held in tuple(self._held.items()):
            self._check(path, *held)

    def _check(self, path: Path, mapping: mmap.mmap, needed: int) -> None:
        size = mapping.size()
        if size < needed:
            raise _shrank(path, needed, size)

    def let_go(self) -> None:
        """Drop what was read so far from this process's memory; it is read again, mostly from the system's cache, when it is touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapping, _ in tuple(self._held.values()):
                mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give up the files; views that were handed out keep theirs."""
        self._closed = True
        self._held.clear()
