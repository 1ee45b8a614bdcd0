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
from rimuru_cli.hub.library import LibraryModel, files_below, find_models, size_on_disk
from rimuru_cli.hub.manifest import Progress
from rimuru_cli.hub.nearby import did_you_mean, near_repositories
from rimuru_cli.hub.pull_manifest import PullManifest, renamed_to
from rimuru_cli.hub.repository_cache import Busy, RepositoryCache
from rimuru_cli.hub.resolve import parse_repository
from rimuru_cli.hub.usage import forget
from rimuru_models.errors import NotFoundError, RimuruError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy, HFCacheInfo

_SHORTEST_COMMIT = 7


@dataclass(frozen=True)
class Removal:
    """What deleting would do.

    Attributes:
        models: what would be gone.
        folders: whole folders that would be deleted.
        freed_bytes: bytes that the disk would have again.
        kept_bytes: bytes of these models that stay, because other revisions or models share the files.
        files: files with weights that must not be in use meanwhile.
        strategy: of what lies in the cache; None for the demonstration model.
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
        name: as `rimuru list --all` prints it: `org/name` for all its revisions, `org/name@revision` for one.

    Raises:
        NotFoundError: no such model here.
        UsageError: a local folder, which rimuru did not make, or a name that cannot be one.
    """
    models = find_models()
    chosen = _choose(name, models)
    if chosen[0].kind == "demo":
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
    if removal.strategy is None:
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
    if exact and (exact[0].kind == "demo" or "@" in name):
        return tuple(exact)
    if name == embedded.EMBEDDED_NAME:
        raise NotFoundError("The demonstration model is not built, so there is nothing to delete.")
    if name.startswith(f"{embedded.EMBEDDED_NAME}@"):
        raise NotFoundError(f"There is no {name} here.", hint="`rimuru list --all` shows what there is.")
    by_path = _in_folder(name, models)
    if by_path is not None:
        return (by_path,)
    repository, revision = parse_repository(name)
    for candidate in (repository, renamed_to(repository)):
        own = [model for model in models if model.repository == candidate] if candidate is not None else []
        if own:
            return _of_revision(name, revision, own)
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
    raise UsageError(f"{folder} is a local folder, which rimuru did not make, so it does not delete it.", hint=f"delete it by hand{also}")


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


def _from_cache(folder: Path, chosen: Sequence[LibraryModel], models: Sequence[LibraryModel]) -> Removal:
    commits = [model.revision for model in chosen if model.revision is not None]
    others = [model for model in models if model.repository == chosen[0].repository and model not in chosen]
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
    whole = size_on_disk(path for model in chosen for path in files_below(model.path) if model.revision is not None)
    freed = int(strategy.expected_freed_size)
    return Removal(
        models=tuple(chosen),
        folders=(folder,) if not others else tuple(model.path for model in chosen),
        freed_bytes=freed + unfinished,
        kept_bytes=max(0, whole - freed),
        files=tuple(path for model in chosen for path in model.path.glob("*.safetensors")),
        strategy=strategy,
        leftovers=tuple(leftovers),
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
    kept = {target for model in others for target in _targets(model.path)}
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


def _forget(removal: Removal) -> None:
    """Drop rimuru's own notes about what is gone: last uses, and manifests of pulls, also those of revisions that were gone already."""
    for model in removal.models:
        forget(model.path)
    repository = removal.models[0].repository
    if repository is None:
        return
    commits = {model.revision for model in removal.models}
    whole = removal.strategy is not None and bool(removal.strategy.repos)
    for manifest in PullManifest.all_of(repository):
        if whole or manifest.commit in commits:
            with contextlib.suppress(OSError):
                manifest.remove()
