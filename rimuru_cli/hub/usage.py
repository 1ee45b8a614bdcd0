"""When rimuru last used a model, and where its folder is: one small file a folder in rimuru's data, so that `list` knows local folders too.

Times of access that a file system keeps are switched off on many machines, and looking at a model changes them; so rimuru notes its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rimuru_cli.hub import paths

FORMAT = 1
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Use:
    """The last use of a model's folder; `used_at` is aware of its time zone."""

    path: Path
    used_at: datetime


def record_use(path: Path) -> None:
    """Note that the model in this folder is being used now. A disk that takes nothing is no reason to stop."""
    path = Path(os.path.abspath(path))
    file = _file(path)
    new = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    value = {"format": FORMAT, "path": str(path), "used_at": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(new, file)
    except (OSError, UnicodeEncodeError):  # a folder's name may hold bytes that are no text
        with contextlib.suppress(OSError):
            new.unlink()


def last_uses() -> dict[Path, Use]:
    """Folder, with links resolved -> its last use, of all that were noted and can be understood, whether or not they still exist."""
    found = {}
    with contextlib.suppress(OSError):
        for file in sorted(_folder().glob("*.json")):
            use = _read(file)
            if use is not None:
                found[Path(os.path.realpath(use.path))] = use
    return found


def forget(path: Path) -> None:
    """Drop the note of a folder, which has been deleted."""
    with contextlib.suppress(OSError):
        _file(Path(os.path.abspath(path))).unlink(missing_ok=True)


def _folder() -> Path:
    return paths.data_dir() / "used"


def _file(path: Path) -> Path:
    return _folder() / f"{hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:24]}.json"


def _read(file: Path) -> Use | None:
    try:
        if file.stat().st_size > _MOST_BYTES:
            return None
        value = json.loads(file.read_text(encoding="utf-8"))
        path, used_at = Path(value["path"]), datetime.fromisoformat(value["used_at"])
        if value["format"] != FORMAT or not path.is_absolute() or used_at.tzinfo is None:
            return None
        return Use(path, used_at)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
