"""What a finished pull brought: names, sizes and checksums, kept with rimuru's own data, so that `verify` needs no network.

One file a commit, `manifests/models--org--name/<commit>.json` in the data folder. The shared cache holds nothing of this: its layout
belongs to huggingface_hub. Names that the hub has given up are kept beside them (`renamed.json`), so that a model is found under its old
name, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rimuru_cli.hub import paths
from rimuru_cli.hub.remote_files import RemoteFile

FORMAT = 1
_RENAMED = "renamed.json"
_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class PulledFile:
    """One file as it was when its checksum was last seen to be right.

    Attributes:
        num_bytes: size.
        etag: checksum as the hub keeps it: sha256, or git's sha1 of small files.
        sha256: sha256 in any case.
        mtime_ns: time of modification then; 0: its content is known to be damaged, or was never looked at.
    """

    num_bytes: int
    etag: str
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class PullManifest:
    """All files of a pulled commit.

    Attributes:
        repository: `org/name`.
        commit: 40 hex digits.
        revision: what was asked for: a branch, a tag, or the commit.
        pulled_at: when, ISO 8601 in UTC.
        files: name -> record.
    """

    repository: str
    commit: str
    revision: str
    pulled_at: str
    files: Mapping[str, PulledFile]

    @classmethod
    def read(cls, repository: str, commit: str) -> PullManifest | None:
        """The manifest of a commit; None when there is none, or none that can be understood."""
        return _read(_folder(repository) / f"{commit}.json", repository, commit)

    @classmethod
    def all_of(cls, repository: str) -> list[PullManifest]:
        """The manifests of all pulled commits of a repository."""
        found = [_read(path, repository, path.stem) for path in sorted(_folder(repository).glob("*.json")) if path.name != _RENAMED]
        return [manifest for manifest in found if manifest is not None]

    @classmethod
    def now(cls, repository: str, commit: str, revision: str, files: Mapping[str, PulledFile]) -> PullManifest:
        """A manifest of a pull that has just ended."""
        return cls(repository, commit, revision, datetime.now(UTC).isoformat(timespec="seconds"), files)

    @property
    def path(self) -> Path:
        """Where it lies."""
        return _folder(self.repository) / f"{self.commit}.json"

    def remote_files(self) -> tuple[RemoteFile, ...]:
        """The files as the hub describes them."""
        return tuple(RemoteFile(name, record.num_bytes, record.etag) for name, record in self.files.items())

    def write(self) -> None:
        """Put it in its place, in one step."""
        files = {name: asdict(record) for name, record in self.files.items()}
        _write(self.path, {"format": FORMAT, **{**asdict(self), "files": files}})

    def remove(self) -> None:
        """Forget this commit (its files have been deleted)."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def remember_renamed(old: str, new: str) -> None:
    """Remember what the hub calls a repository now."""
    _write(_folder(old) / _RENAMED, {"format": FORMAT, "to": new})


def renamed_to(repository: str) -> str | None:
    """What the hub called this repository when it was last pulled under its old name; None: nothing else."""
    value = _json(_folder(repository) / _RENAMED)
    new = value.get("to")
    return new if isinstance(new, str) and _REPOSITORY.fullmatch(new) and ".." not in new and "--" not in new else None


def _folder(repository: str) -> Path:
    return paths.data_dir() / "manifests" / ("models--" + repository.replace("/", "--"))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and value.get("format") == FORMAT else {}


def _read(path: Path, repository: str, commit: str) -> PullManifest | None:
    value = _json(path)
    try:
        files = {
            str(name): PulledFile(int(record["num_bytes"]), str(record["etag"]), str(record["sha256"]), int(record["mtime_ns"]))
            for name, record in value["files"].items()
        }
        manifest = PullManifest(repository, commit, str(value["revision"]), str(value["pulled_at"]), files)
        return manifest if (value["repository"], value["commit"]) == (repository, commit) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        new.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
