"""What was typed before, in the file that the line editor of `rimuru chat` keeps: each entry is "# when" and its lines after a "+"."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Final

_MOST_BYTES: Final = 4 * 2**20
_MOST_ENTRIES: Final = 1000


class TypedHistory:
    """Goes back and forth through earlier messages and appends new ones.

    Args:
        file: the history file; None keeps nothing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._entries = _read(file) if file is not None else []
        self._at = len(self._entries)
        self._draft = ""

    def add(self, text: str) -> None:
        """Remember a message, here and in the file. A file that cannot be written is no reason to lose the message."""
        if not self._entries or self._entries[-1] != text:
            self._entries.append(text)
            if self._file is not None:
                _append(self._file, text)
        self._at = len(self._entries)

    def earlier(self, now: str) -> str | None:
        """The message before the one that is shown, or None at the beginning. `now` is kept if it is new."""
        if self._at == 0:
            return None
        if self._at == len(self._entries):
            self._draft = now
        self._at -= 1
        return self._entries[self._at]

    def later(self) -> str | None:
        """The message after the one that is shown, at last what was being typed; None if that is shown already."""
        if self._at >= len(self._entries):
            return None
        self._at += 1
        return self._draft if self._at == len(self._entries) else self._entries[self._at]


def _read(file: Path) -> list[str]:
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _MOST_BYTES))
            lines = stream.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    entries: list[str] = []
    current: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("+"):
            current.append(line[1:])
        elif current:
            entries.append("\n".join(current))
            current = []
    return entries[-_MOST_ENTRIES:]


def _append(file: Path, text: str) -> None:
    entry = f"\n# {datetime.now()}\n" + "".join(f"+{line}\n" for line in text.split("\n"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as stream:
            stream.write(entry.encode("utf-8", "replace"))
    except OSError:
        return
