"""manifest.json: what a finished folder holds, and writing files so that they are on the disk before the manifest says so."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); 0 in all: not known."""

FILE_NAME = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """One file: its size, its sha256 (hex), and its time of modification when the sha256 was last seen to be right."""

    num_bytes: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    """Files of a folder by name, and the key of the recipe that made them."""

    recipe_key: str
    files: Mapping[str, FileRecord]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of `folder`; None when there is none, or none that can be understood."""
        try:
            value = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                return None
            return cls(str(value["recipe_key"]), {str(name): _record(record) for name, record in value["files"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    @classmethod
    def describe(cls, folder: Path, recipe_key: str, sha256: Mapping[str, str]) -> Manifest:
        """A manifest of files whose checksums have just been taken, in their present size and time of modification."""
        files = {}
        for name, digest in sha256.items():
            status = (folder / name).stat()
            files[name] = FileRecord(status.st_size, digest, status.st_mtime_ns)
        return cls(recipe_key, files)

    def write(self, folder: Path) -> None:
        """Put it into `folder`, replacing an older one in one step."""
        files = {name: asdict(record) for name, record in self.files.items()}
        text = json.dumps({"format": FORMAT, "recipe_key": self.recipe_key, "files": files}, indent=2)
        new = folder / f".{FILE_NAME}.{uuid.uuid4().hex}"
        try:
            write_new(new, text.encode("utf-8") + b"\n")
            os.replace(new, folder / FILE_NAME)
        finally:
            new.unlink(missing_ok=True)

    def glance(self, folder: Path) -> Literal["same", "touched", "broken"]:
        """Compare without reading: "same" size and time for every file, "touched" when only times differ, else "broken"."""
        touched = False
        for name, record in self.files.items():
            try:
                status = (folder / name).stat()
            except OSError:
                return "broken"
            if not stat.S_ISREG(status.st_mode) or status.st_size != record.num_bytes:
                return "broken"
            touched |= status.st_mtime_ns != record.mtime_ns
        return "touched" if touched else "same"

    def mismatches(self, folder: Path, stage: str, progress: Progress | None = None) -> list[str]:
        """Names of the files that are missing or whose sha256 is not the recorded one. Reads everything."""
        total, done = sum(record.num_bytes for record in self.files.values()), 0
        bad = []
        for name, record in self.files.items():
            path = folder / name
            right_size = path.is_file() and path.stat().st_size == record.num_bytes
            if not right_size or sha256_of(path, stage, progress, done, total) != record.sha256:
                bad.append(name)
            done += record.num_bytes
        return bad


def _record(value: Any) -> FileRecord:
    return FileRecord(int(value["num_bytes"]), str(value["sha256"]), int(value["mtime_ns"]))


def sha256_of(path: Path, stage: str, progress: Progress | None = None, done: int = 0, total: int | None = None) -> str:
    """sha256 of a file, hex. `done` and `total` (bytes) place it among others for `progress`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size if total is None else total
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(stage, done, total)
    return digest.hexdigest()


def write_new(path: Path, data: bytes) -> str:
    """Write a file that must not exist yet, flushed to the disk. Returns its sha256, hex."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def sync_folders(folders: Iterable[Path]) -> None:
    """Flush the entries of folders to the disk where the system can do that (Windows cannot, and needs not)."""
    if os.name != "posix":
        return
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
