"""From what a person types as MODEL to a folder: the demonstration model, a local folder, or a repository in the Hugging Face cache.

Order: the demonstration model's name, then a folder or GGUF file that exists, then `org/name[:variant][@revision]`. A folder whose name is
taken by something else is reached as `./name`. Nothing is downloaded here, and nothing incomplete is given out.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rimuru_cli.hub import embedded, paths
from rimuru_cli.hub.manifest import Progress
from rimuru_cli.hub.nearby import did_you_mean, near_paths, near_repositories
from rimuru_cli.hub.snapshot import find_snapshot
from rimuru_cli.hub.variants import shown_name
from rimuru_models.errors import NotFoundError, UsageError
from rimuru_models.gguf import find_gguf, gguf_of, is_gguf

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?::(?P<variant>\w(?:[\w ./+()\[\],=~-]{{0,198}}[\w)\]+])?))?"
    r"(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}))?"
)
_ADDRESS = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>{_PART}/{_PART})(?:/(?:tree|blob|commit)/(?P<revision>[^/?#]+))?/?.*"
)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_EXPECTED = "MODEL is org/name, org/name@revision, org/name:Q4_K_M, a folder, a GGUF file, or " + embedded.EMBEDDED_NAME


class RepositoryName(NamedTuple):
    """`org/name[:variant][@revision]` taken apart; variant: which GGUF model of several."""

    repository: str
    revision: str | None
    variant: str | None

    @property
    def shown(self) -> str:
        """What was typed."""
        return shown_name(self.repository, self.variant, self.revision)


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is ready to be opened.

    Attributes:
        name: what to show: the demonstration model's name, `org/name` (with `:Q4_K_M` of a GGUF model), or the folder's or file's name.
        path: absolute path of the folder with config.json and the weights, or of a GGUF file (the first of its parts).
        revision: commit of a repository's snapshot; None for folders.
        embedded: whether it is the demonstration model.
    """

    name: str
    path: Path
    revision: str | None
    embedded: bool


def resolve_model(name: str | None = None, *, progress: Progress | None = None) -> ResolvedModel:
    """Find the folder of a model; None is the demonstration model, which is built if need be (`progress` is told).

    Raises:
        UsageError: the name cannot be one of a model.
        NotFoundError: no such folder or snapshot, or it is incomplete; says what is missing and what to type.
        VerificationError, NoSpaceError, RimuruError: as `embedded.build` does.
    """
    here = resolve_here(name, progress=progress)
    if here is not None or name is None:
        assert here is not None, "no name is the demonstration model"
        return here
    return resolve_snapshot(parse_repository(name))


def resolve_snapshot(name: RepositoryName) -> ResolvedModel:
    """Find a repository's model in the cache.

    Raises:
        NotFoundError, UsageError: as `find_snapshot`.
    """
    found = find_snapshot(name.repository, name.revision, name.variant)
    return ResolvedModel(shown_name(found.repository, found.variant, None), found.path, found.folder.name, False)


def resolve_here(name: str | None, *, progress: Progress | None = None) -> ResolvedModel | None:
    """Find the demonstration model or a folder; None when `name` is to be read as that of a repository.

    Raises:
        UsageError, NotFoundError, VerificationError, NoSpaceError, RimuruError: as `resolve_model`.
    """
    if name is None or embedded.is_embedded_name(name):
        return ResolvedModel(embedded.EMBEDDED_NAME, embedded.ensure(progress), None, True)
    if not name.strip():
        raise UsageError("The model's name is empty.", hint=_EXPECTED)
    if any(unicodedata.category(letter) == "Cc" for letter in name):
        raise UsageError(f"The model's name {name!r} has control characters in it.", hint=_EXPECTED)
    path = _as_path(name)
    copy = _copy_of_that_name(name)
    if copy is not None and (path is None or not path.exists()):
        return ResolvedModel(name, copy, None, False)
    if path is not None and path.is_dir():
        return _local(path, name)
    if path is not None and path.exists():
        if not is_gguf(path):
            raise UsageError(
                f"{name} is a file; a model is a GGUF file, or a folder with config.json and *.safetensors.",
                hint=f"the folder it is in: {path.parent}",
            )
        return ResolvedModel(path.name, find_gguf(path), None, False)
    if _looks_like_path(name) or _looks_like_gguf(name, path):
        near = near_paths(path) if path is not None else []
        what = "file" if is_gguf(Path(name)) else "folder"
        raise NotFoundError(f"There is no {what} {name}.", hint=did_you_mean(near) or "check the path")
    return None


def _copy_of_that_name(name: str) -> Path | None:
    """Our own quantised copy that is called so, in letters of any language."""
    if name in (".", "..") or any(letter in "/\\:" for letter in name):
        return None
    copy = paths.quantized_dir() / name
    try:
        return copy if (copy / "config.json").is_file() else None
    except (OSError, ValueError):  # too long, not encodable
        return None


def _as_path(name: str) -> Path | None:
    """The absolute path `name` stands for; None when this system cannot have such a path."""
    try:
        path = Path(name).expanduser().absolute()
        path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user after ~, not encodable
        return None
    return path


def _looks_like_path(name: str) -> bool:
    """Whether a person who typed this meant a path, not a repository."""
    return name in (".", "..", "~") or name.startswith(("./", "../", "~", "/", ".\\", "..\\", "\\")) or bool(_DRIVE.match(name))


def _looks_like_gguf(name: str, path: Path | None) -> bool:
    """Whether a name that ends in .gguf is that of a file: it cannot be a repository's, or its folder is here."""
    return is_gguf(Path(name)) and (_REPOSITORY.fullmatch(name) is None or (path is not None and path.parent.is_dir()))


def _local(path: Path, typed: str) -> ResolvedModel:
    gguf = gguf_of(path)
    if gguf is not None:
        return ResolvedModel(path.resolve().name or str(path), gguf, None, False)
    if not (path / "config.json").is_file():
        hint = "name the folder that has config.json, tokenizer.json and *.safetensors, or a GGUF file"
        inner = sorted(child.parent for child in path.glob("*/config.json"))
        inner += sorted(child.parent for child in path.glob("snapshots/*/config.json"))
        hint = did_you_mean([str(one) for one in inner[:3]]) or hint
        match = _REPOSITORY.fullmatch(typed)
        if match is not None and match["revision"] is None:
            hint += f"; if the repository of that name is meant: {typed}@main"
        raise NotFoundError(f"{path} is not a model folder: it has no config.json.", hint=hint)
    return ResolvedModel(path.resolve().name or str(path), path, None, False)


def parse_repository(name: str) -> RepositoryName:
    """Take `org/name[:variant][@revision]` apart. Nothing is looked up.

    Raises:
        UsageError, NotFoundError: it cannot be the name of a repository; offers what may have been meant.
    """
    match = _REPOSITORY.fullmatch(name)
    if match is None or ".." in name or "--" in match["repository"] or match["repository"].endswith(".git"):
        address = _ADDRESS.fullmatch(name)
        if address is not None:
            revision = f"@{address['revision']}" if address["revision"] else ""
            raise UsageError(f"{name!r} is an address.", hint=f"did you mean {address['repository']}{revision}?")
        near = near_repositories(name) if name.isprintable() else []
        if "/" not in name and re.fullmatch(_PART, name):
            raise NotFoundError(f"There is no folder {name}, and no model of that name.", hint=did_you_mean(near) or _EXPECTED)
        raise UsageError(f"{name!r} cannot be a model's name.", hint=did_you_mean(near) or _EXPECTED)
    return RepositoryName(match["repository"], match["revision"], match["variant"])
