"""Deleting models: what it would free is worked out first, then it is done, and what could not be deleted is said.

The shared cache is huggingface_hub's, so its own scan says which blobs a revision shares with others and its own strategy deletes. It
passes over repositories that are broken or unfinished; for those the plan is made here and carried out in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rimuru_cli.hub import embedded
from rimuru_cli.hub.in_use import users_of
from rimuru_cli.hub.library import LibraryModel, files_below, files_of, find_models, size_on_disk
from rimuru_cli.hub.manifest import Progress
from rimuru_cli.hub.nearby import did_you_mean, near_repositories
from rimuru_cli.hub.pull_manifest import PullManifest, renamed_to
from rimuru_cli.hub.repository_cache import Busy, RepositoryCache
from rimuru_cli.hub.resolve import parse_repository
from rimuru_cli.hub.usage import forget
from rimuru_cli.hub.variants import Variant, matching
from rimuru_models.errors import NotFoundError, RimuruError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy, HFCacheInfo

_SHORTEST_COMMIT = 7


@dataclass(frozen=True)
class Removal:
    """What deleting would do.

    Attributes:
        models: what would be gone.
        folders: whole folders (or files) that would be deleted.
        freed_bytes: bytes that the disk would have again.
        kept_bytes: bytes of these models that stay, because other revisions or models share the files.
        files: files with weights that must not be in use meanwhile.
        strategy: of what lies in the cache; None for the demonstration model and for quantised copies.
        leftovers: small files and unfinished parts that have no use afterwards.
    """

    models: tuple[LibraryModel, ...]
    folders: tuple[Path, ...]
    freed_bytes: int
    kept_bytes: int
    files: tuple[Path, ...]
    strategy: DeleteCacheStrategy | None
    leftovers: tuple[Path, ...] = ()


def plan_removal(name: str) -> Removal:
    """Work out what deleting a model means. Nothing is changed.

    Args:
        name: as `rimuru list --all` prints it: `org/name` for all its revisions and variants, `org/name@revision` for one revision,
            `org/name:Q4_K_M` for one GGUF model.

    Raises:
        NotFoundError: no such model here.
        UsageError: a local folder, which rimuru did not make, or a name that cannot be one.
    """
    models = find_models()
    chosen = _choose(name, models)
    if chosen[0].kind in ("demo", "copy"):
        folder = chosen[0].path
        size = size_on_disk(files_below(folder))
        return Removal(chosen, (folder,), size, 0, tuple(folder.glob("*.safetensors")), None)
    repository = chosen[0].repository
    assert repository is not None, "what lies in the cache belongs to a repository"
    return _from_cache(RepositoryCache.of(repository).folder, chosen, models)


def carry_out(removal: Removal, progress: Progress | None = None) -> None:
    """Delete what was planned.

    Raises:
        RimuruError: a process uses a file of it, it is being downloaded, or the system refused to delete something; says what is left.
    """
    users = users_of(removal.files)
    if users:
        name = removal.models[0].name
        more = f" and {len(users) - 3} more" if len(users) > 3 else ""
        raise RimuruError(f"{name} is in use by {', '.join(users[:3])}{more}, so it is not deleted.", hint="End it, then try again.")
    if removal.models[0].kind == "copy":
        _delete_copy(removal)
    elif removal.strategy is None:
        _delete_demo(removal, progress)
    else:
        with _nobody_downloads(removal), _quiet():
            removal.strategy.execute()
            for path in removal.leftovers:
                _delete(path)
        _check_gone(removal)
    _forget(removal)


def _choose(name: str, models: Sequence[LibraryModel]) -> tuple[LibraryModel, ...]:
    """The models that a name means, all in one place; never empty."""
    if embedded.is_embedded_name(name):
        name = embedded.EMBEDDED_NAME
    exact = [model for model in models if model.kind != "folder" and model.name == name]
    if exact and (exact[0].kind in ("demo", "copy") or "@" in name):
        return tuple(exact)
    if name == embedded.EMBEDDED_NAME:
        raise NotFoundError("The demonstration model is not built, so there is nothing to delete.")
    if name.startswith(f"{embedded.EMBEDDED_NAME}@"):
        raise NotFoundError(f"There is no {name} here.", hint="`rimuru list --all` shows what there is.")
    by_path = _in_folder(name, models)
    if by_path is not None:
        return (by_path,)
    repository, revision, variant = parse_repository(name)
    for candidate in (repository, renamed_to(repository)):
        own = [model for model in models if model.repository == candidate] if candidate is not None else []
        if own:
            return _of_variant(name, variant, _of_revision(name, revision, own))
    near = [one for one in near_repositories(repository) if one != repository]
    raise NotFoundError(
        f"{repository} is not in the Hugging Face cache.", hint=did_you_mean(near) or "`rimuru list --all` shows what there is."
    )


def _in_folder(name: str, models: Sequence[LibraryModel]) -> LibraryModel | None:
    """The model in the cache whose folder was named; None when no folder was.

    Raises:
        UsageError: a folder that rimuru did not make.
    """
    try:
        folder = Path(name).expanduser().absolute()
        exists = bool(name) and folder.exists()
    except (OSError, RuntimeError, ValueError):  # no path that this system can have
        return None
    if not exists:
        return None
    for model in models:
        if model.kind != "folder" and model.path == folder:
            return model
    cached = next((model for model in models if model.repository == name and model.revision), None)
    also = "" if cached is None else f"; the model in the cache is {name}@{cached.revision}"
    what = "folder" if folder.is_dir() else "file"
    raise UsageError(f"{folder} is a local {what}, which rimuru did not make, so it does not delete it.", hint=f"delete it by hand{also}")


def _of_revision(name: str, revision: str | None, own: Sequence[LibraryModel]) -> tuple[LibraryModel, ...]:
    if revision is None:
        return tuple(own)
    chosen = [model for model in own if revision == model.revision or revision in model.refs]
    if not chosen and len(revision) >= _SHORTEST_COMMIT:
        chosen = [model for model in own if model.revision is not None and model.revision.startswith(revision)]
    if len(chosen) != 1:
        here = ", ".join(model.revision for model in own if model.revision) or "none that is complete"
        what = "is not here" if not chosen else "means several"
        raise NotFoundError(f"The revision of {name} {what}; here are: {here}.", hint="`rimuru list --all` shows them.")
    return tuple(chosen)


def _of_variant(name: str, variant: str | None, own: tuple[LibraryModel, ...]) -> tuple[LibraryModel, ...]:
    if variant is None:
        return own
    labels = [Variant(model.variant, (model.path.name,), model.size_bytes) for model in own if model.variant is not None]
    chosen = {one.label for one in matching(labels, variant)}
    found = tuple(model for model in own if model.variant in chosen)
    if not found:
        here = ", ".join(sorted({one.label for one in labels})) or "no GGUF model"
        raise NotFoundError(f"{name} is not here; of this repository there is {here}.", hint="`rimuru list --all` shows what there is.")
    return found


def _from_cache(folder: Path, chosen: Sequence[LibraryModel], models: Sequence[LibraryModel]) -> Removal:
    others = [model for model in models if model.repository == chosen[0].repository and model not in chosen]
    shared = {model.revision for model in others}
    if any(model.revision in shared for model in chosen):
        return _some_files(folder, chosen, others)
    commits = [model.revision for model in chosen if model.revision is not None]
    strategy = _planned_by_the_hub(folder, commits) or _planned_here(folder, commits, others)
    leftovers = [path for commit in commits for path in (folder / "trees" / f"{commit}.json", folder / ".no_exist" / commit)]
    parts = [path for path in files_below(folder / "blobs") if path.name.endswith(".incomplete")]
    unfinished = 0
    if not others:
        leftovers, unfinished = [], size_on_disk(parts)
        strategy = replace(strategy, repos=frozenset({folder}))
    elif all(model.status == "ready" for model in others):
        # Nothing that stays is unfinished, so these parts belonged to what goes.
        leftovers += parts
        unfinished = size_on_disk(parts)
    whole = size_on_disk(path for model in chosen for path in files_of(model.path) if model.revision is not None)
    freed = int(strategy.expected_freed_size)
    return Removal(
        models=tuple(chosen),
        folders=(folder,) if not others else tuple(_snapshot(folder, model) for model in chosen),
        freed_bytes=freed + unfinished,
        kept_bytes=max(0, whole - freed),
        files=tuple(path for model in chosen for path in _weights(model)),
        strategy=strategy,
        leftovers=tuple(leftovers),
    )


def _snapshot(folder: Path, model: LibraryModel) -> Path:
    return folder / "snapshots" / model.revision if model.revision else model.path


def _weights(model: LibraryModel) -> list[Path]:
    return list(model.path.glob("*.safetensors")) if model.path.is_dir() else list(files_of(model.path))


def _some_files(folder: Path, chosen: Sequence[LibraryModel], others: Sequence[LibraryModel]) -> Removal:
    """GGUF models whose snapshot holds others that stay: their own files, and the blobs that nothing else needs."""
    from huggingface_hub import DeleteCacheStrategy

    assert all(model.variant is not None for model in chosen), "only GGUF models lie beside others"
    pointers = [path for model in chosen for path in files_of(model.path)]
    gone = {os.path.abspath(path) for path in pointers}
    kept = {target for path in files_below(folder / "snapshots") if os.path.abspath(path) not in gone for target in _target(path)}
    blobs = {target for path in pointers for target in _target(path)} - kept
    plain = [path for path in pointers if not path.is_symlink()]
    freed = size_on_disk(path for path in (*blobs, *plain) if not path.is_symlink())
    own = frozenset(blob for blob in blobs if blob.parent == folder / "blobs")
    strategy = DeleteCacheStrategy(freed, own, frozenset(), frozenset(), frozenset(), cache_dir=folder.parent)
    whole = size_on_disk(pointers)
    return Removal(
        models=tuple(chosen),
        folders=tuple(path for path in pointers if path.exists()),
        freed_bytes=freed,
        kept_bytes=max(0, whole - freed),
        files=tuple(pointers),
        strategy=strategy,
        leftovers=tuple(pointers),
    )


def _planned_by_the_hub(folder: Path, commits: Sequence[str]) -> DeleteCacheStrategy | None:
    """huggingface_hub's own plan; None when its scan passes over this repository."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    if not commits:
        return None
    try:
        info: HFCacheInfo = scan_cache_dir(folder.parent)
    except (CacheNotFound, ValueError, OSError):
        return None
    own = [repo for repo in info.repos if repo.repo_path == folder]
    known = {revision.commit_hash for repo in own for revision in repo.revisions}
    if not own or not set(commits) <= known:
        return None
    # Other repositories may have the same commits (a model that was renamed has): they must not be what is deleted.
    return replace(info, repos=frozenset(own)).delete_revisions(*commits)


def _planned_here(folder: Path, commits: Sequence[str], others: Sequence[LibraryModel]) -> DeleteCacheStrategy:
    """The same for a repository that is unfinished or broken: links may lead nowhere, and references to commits that are not there."""
    from huggingface_hub import DeleteCacheStrategy

    snapshots = [folder / "snapshots" / commit for commit in commits]
    kept = {target for model in others for target in _targets(_snapshot(folder, model))}
    if not others:
        size = size_on_disk(path for path in files_below(folder) if not path.is_symlink() and not path.name.endswith(".incomplete"))
        return DeleteCacheStrategy(size, frozenset(), frozenset(), frozenset({folder}), frozenset(), cache_dir=folder.parent)
    blobs = {target for snapshot in snapshots for target in _targets(snapshot)} - kept
    refs = {path for path in files_below(folder / "refs") if _text(path) in commits}
    real = [path for snapshot in snapshots for path in files_below(snapshot) if not path.is_symlink()]
    return DeleteCacheStrategy(
        size_on_disk(path for path in (*blobs, *real) if not path.is_symlink()),
        frozenset(blob for blob in blobs if blob.parent == folder / "blobs"),
        frozenset(refs),
        frozenset(),
        frozenset(snapshots),
        cache_dir=folder.parent,
    )


def _targets(snapshot: Path) -> Iterator[Path]:
    """What the links of a snapshot lead to, one step of the way."""
    for path in files_below(snapshot):
        yield from _target(path)


def _target(path: Path) -> Iterator[Path]:
    """What a link leads to, one step of the way; nothing for a file."""
    with contextlib.suppress(OSError):
        yield Path(os.path.abspath(path.parent / os.readlink(path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


@contextlib.contextmanager
def _nobody_downloads(removal: Removal) -> Iterator[None]:
    """Hold the locks of all files that somebody has ever downloaded of this repository.

    Raises:
        RimuruError: somebody holds one.
    """
    repository = removal.models[0].repository
    assert repository is not None, "what lies in the cache belongs to a repository"
    cache = RepositoryCache.of(repository)
    with contextlib.ExitStack() as stack:
        for lock in sorted((cache.root / ".locks" / cache.folder_name).glob("*.lock")):
            try:
                stack.enter_context(cache.lock(lock.name.removesuffix(".lock")))
            except Busy:
                raise RimuruError(
                    f"{removal.models[0].name} is being downloaded by another process, so it is not deleted.",
                    hint="Wait for it or stop it, then try again.",
                ) from None
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep huggingface_hub from writing tracebacks of what it cannot delete; `_check_gone` says it in words."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_gone(removal: Removal) -> None:
    left = [path for path in removal.folders if path.exists()]
    left += [path for path in (removal.strategy.blobs if removal.strategy else ()) if path.exists()]
    if left:
        raise _refused(removal, left[0])


def _refused(removal: Removal, path: Path) -> RimuruError:
    why = "Windows does not delete files that a program has mapped" if os.name == "nt" else "check who owns it and its permissions"
    return RimuruError(f"Not all of {removal.models[0].name} could be deleted; {path} is still there.", hint=f"{why}; then try again.")


def _delete_demo(removal: Removal, progress: Progress | None) -> None:
    folder = removal.folders[0]
    try:
        embedded.remove(folder, progress)
    except OSError as error:
        raise _refused(removal, Path(error.filename) if isinstance(error.filename, str) else folder) from error


def _delete_copy(removal: Removal) -> None:
    """config.json first: half a removal must not look like a model."""
    folder = removal.folders[0]
    try:
        (folder / "config.json").unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        raise _refused(removal, Path(error.filename) if isinstance(error.filename, str) else folder) from error


def _forget(removal: Removal) -> None:
    """Drop rimuru's own notes about what is gone: last uses, and manifests of pulls, also those of revisions that were gone already."""
    for model in removal.models:
        forget(model.path)
    repository = removal.models[0].repository
    if repository is None:
        return
    commits = {model.revision for model in removal.models}
    whole = removal.strategy is not None and bool(removal.strategy.repos)
    snapshots = RepositoryCache.of(repository).folder / "snapshots"
    own = [
        (model.revision, path) for model in removal.models if model.variant is not None and model.revision for path in files_of(model.path)
    ]
    gone = {(revision, path.relative_to(snapshots / revision).as_posix()) for revision, path in own}
    partly = removal.strategy is not None and not whole and not removal.strategy.snapshots
    for manifest in PullManifest.all_of(repository):
        with contextlib.suppress(OSError):
            if partly and manifest.commit in commits:
                left = {name: file for name, file in manifest.files.items() if (manifest.commit, name) not in gone}
                replace(manifest, files=left).write()
            elif whole or manifest.commit in commits:
                manifest.remove()
