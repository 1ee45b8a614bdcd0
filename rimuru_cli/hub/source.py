"""A model as `show` and `fit` see it, wherever it is: built by rimuru, in the cache, in a folder, or still on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rimuru_cli.hub.licence import is_licence_file, licence_of_folder, licence_of_text
from rimuru_cli.hub.manifest import Manifest, Progress
from rimuru_cli.hub.resolve import RepositoryName, ResolvedModel, parse_repository, resolve_here, resolve_snapshot
from rimuru_cli.hub.variants import shown_name
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError, NotFoundError, RimuruError
from rimuru_models.gguf import GGUFFiles
from rimuru_models.gguf.config import config_values
from rimuru_models.index import CheckpointIndex, open_index, read_json_file
from rimuru_models.tensor_map import TensorMap, resolve

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LICENCE_BYTES = 1 << 16


@dataclass(frozen=True)
class FileFact:
    """One file of a model: its name with slashes, its size, and its sha256 (hex) where that is known without reading it."""

    name: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class ModelSource:
    """A model that can be described.

    Attributes:
        name: what it is called: the demonstration model's name, `org/name[:variant]`, or the folder's or file's name.
        place: built by rimuru, in the shared cache, a folder (or file), or on the hub and not here.
        path: its folder or GGUF file; None on the hub.
        revision: commit, of what is in the cache or on the hub.
        index: headers of all its weights.
        files: what belongs to it, by name.
        licence: as its files say; None when they do not.
    """

    name: str
    place: Literal["demo", "cache", "folder", "hub"]
    path: Path | None
    revision: str | None
    config: ModelConfig
    config_values: Mapping[str, Any]
    index: CheckpointIndex
    files: tuple[FileFact, ...]
    licence: str | None

    @cached_property
    def tensors(self) -> TensorMap:
        """Where its files keep what the model needs, and what it is stored as.

        Raises:
            CheckpointError: headers and configuration contradict each other.
        """
        return resolve(self.index, self.config)


def open_source(name: str | None, *, progress: Progress | None = None) -> ModelSource:
    """Find a model and read its configuration and headers, from the hub when it is not on this machine.

    Raises:
        UsageError: the name cannot be one of a model.
        NotFoundError: neither here nor on the hub, or the hub does not give it out.
        CheckpointError: rimuru cannot run such a model, or its files are broken.
        RimuruError: the hub cannot be reached; whatever building the demonstration model raises.
    """
    resolved = resolve_here(name, progress=progress)
    if resolved is not None:
        return _on_disk(resolved)
    wanted = parse_repository(name or "")
    try:
        found = resolve_snapshot(wanted)
    except NotFoundError as missing:
        return _on_hub(wanted, missing)
    return _on_disk(found)


def _on_disk(model: ResolvedModel) -> ModelSource:
    index = open_index(model.path)
    if index.gguf is not None:
        values: object = config_values(index.gguf)
        where = str(index.gguf.path)
    else:
        values, where = read_json_file(model.path / "config.json"), str(model.path / "config.json")
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is not a JSON object.")
    return ModelSource(
        name=model.name,
        place="demo" if model.embedded else "folder" if model.revision is None else "cache",
        path=model.path,
        revision=model.revision,
        config=ModelConfig.from_dict(values, where=where),
        config_values=values,
        index=index,
        files=_files(model) if index.gguf is None else _gguf_files(model, index.gguf),
        licence=licence_of_folder(model.path) if index.gguf is None else _gguf_licence(model, index.gguf),
    )


def _gguf_files(model: ResolvedModel, gguf: GGUFFiles) -> tuple[FileFact, ...]:
    checksums = _known_checksums(model)
    folder = model.path.parent if model.revision is None else _snapshot_of(model)
    found = []
    for path, header in gguf.headers.items():
        name = path.relative_to(folder).as_posix()
        found.append(FileFact(name, header.file_bytes, checksums.get(name) or _checksum_in_link(path)))
    return tuple(found)


def _snapshot_of(model: ResolvedModel) -> Path:
    """The folder of the commit, in which a GGUF file may lie deeper."""
    return next((parent for parent in model.path.parents if parent.name == model.revision), model.path.parent)


def _gguf_licence(model: ResolvedModel, gguf: GGUFFiles) -> str | None:
    named = gguf.main.scalar("general.license")
    if isinstance(named, str) and named.isprintable() and named:
        return named[:80]
    return licence_of_folder(model.path.parent if model.revision is None else _snapshot_of(model))


def _files(model: ResolvedModel) -> tuple[FileFact, ...]:
    checksums = _known_checksums(model)
    found = []
    for parent, folders, names in os.walk(model.path):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for file in sorted(names):
            path = Path(parent, file)
            if file.startswith(".") or not path.is_file():
                continue
            name = path.relative_to(model.path).as_posix()
            found.append(FileFact(name, path.stat().st_size, checksums.get(name) or _checksum_in_link(path)))
    return tuple(sorted(found, key=lambda file: file.name))


def _known_checksums(model: ResolvedModel) -> Mapping[str, str]:
    """What the manifest of a build or of a pull says; else what huggingface_hub kept of the hub's list of files."""
    if model.embedded:
        manifest = Manifest.read(model.path)
        return {} if manifest is None else {name: record.sha256 for name, record in manifest.files.items()}
    if model.revision is None:
        return {}
    from rimuru_cli.hub.pull_manifest import PullManifest

    pulled = PullManifest.read(model.name.partition(":")[0], model.revision)
    if pulled is not None:
        return {name: record.sha256 for name, record in pulled.files.items()}
    snapshot = model.path if model.path.is_dir() else _snapshot_of(model)
    tree = snapshot.parent.parent / "trees" / f"{model.revision}.json"
    try:
        files = json.loads(tree.read_text(encoding="utf-8"))["files"]
        named = {name: entry["lfs_sha256"] for name, entry in files.items() if entry.get("lfs_sha256")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: digest for name, digest in named.items() if isinstance(digest, str) and _SHA256.fullmatch(digest)}


def _checksum_in_link(path: Path) -> str | None:
    """The cache calls large files by their sha256, and links to them."""
    try:
        target = Path(os.readlink(path)).name
    except OSError:
        return None
    return target if _SHA256.fullmatch(target) else None


def _on_hub(wanted: RepositoryName, missing: NotFoundError) -> ModelSource:
    """`missing` says why it is not on this machine; the word is added where the hub cannot be asked."""
    from rimuru_cli.hub.patience import UnreachableError
    from rimuru_cli.hub.remote_headers import remote_checkpoint

    try:
        remote = remote_checkpoint(wanted.repository, wanted.revision, wanted.variant)
    except UnreachableError as error:
        raise NotFoundError(f"{missing.what} {error.what}", hint=error.hint) from error
    return ModelSource(
        name=shown_name(remote.repository, remote.variant, None),
        place="hub",
        path=None,
        revision=remote.commit,
        config=remote.config,
        config_values=remote.config_values,
        index=remote.index,
        files=tuple(
            FileFact(name, num_bytes, etag if _SHA256.fullmatch(etag := remote.file_etags[name]) else None)
            for name, num_bytes in sorted(remote.file_bytes.items())
        ),
        licence=_licence_on_hub(remote.repository, remote.commit, remote.file_bytes),
    )


def _licence_on_hub(repository: str, commit: str, file_bytes: Mapping[str, int]) -> str | None:
    """By the text of the licence file. A hub that has no word to spare for it is no reason to fail."""
    from rimuru_cli.hub.patience import Temporary
    from rimuru_cli.hub.remote import Hub

    for name in sorted(file_bytes):
        if not is_licence_file(name):
            continue
        text = b""
        try:
            with Hub().open(repository, commit, name, 0, min(_LICENCE_BYTES, max(1, file_bytes[name]))) as response:
                for chunk in response.iter_bytes():
                    text += chunk
                    if len(text) >= _LICENCE_BYTES:
                        break
        except (RimuruError, Temporary, OSError):
            return None
        return licence_of_text(text.decode("utf-8", "replace"))
    return None
