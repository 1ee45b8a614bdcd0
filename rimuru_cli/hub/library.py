"""The models on this machine: in the shared Hugging Face cache, built by rimuru, and local folders that rimuru has run. No network.

The cache is read as it lies on the disk, so that what an interrupted download left shows up too (huggingface_hub's scan passes over it).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from rimuru_cli.hub import embedded, paths
from rimuru_cli.hub.inspection import Inspection, Status, inspect
from rimuru_cli.hub.manifest import Manifest
from rimuru_cli.hub.profiles import ProfileSummary, recorded_profiles
from rimuru_cli.hub.snapshot import is_plain, known_variants
from rimuru_cli.hub.usage import Use, last_uses
from rimuru_cli.hub.variants import Variant, shown_name
from rimuru_models.config import ModelConfig
from rimuru_models.errors import RimuruError
from rimuru_models.gguf import is_gguf
from rimuru_models.gguf.files import part_names
from rimuru_models.index import model_identity

Kind = Literal["demo", "cache", "copy", "folder"]

PREFIX = "models--"
_DEMO_PREFIX = f"{embedded.EMBEDDED_NAME}-"


@dataclass(frozen=True)
class LibraryModel:
    """One model on this machine.

    Attributes:
        name: what to type as MODEL; revisions other than `main`, and other builds of the demonstration model, follow after an @.
        kind: built by rimuru, in the shared cache, a quantised copy that rimuru made, or a local folder.
        path: the folder with config.json, or the GGUF file (the first of its parts); of a download that got no further, the repository's
            folder in the cache.
        repository: `org/name` of what is in the cache.
        revision: commit of a snapshot.
        refs: branches and tags that mean this commit.
        size_bytes: of its files on the disk, each counted once; files that revisions share count for each of them.
        unfinished_bytes: of files whose download was cut short.
        last_used: by rimuru; else when the system says that the weights were last read.
        profile: the hotset profile that was recorded for it here.
        variant: what it is called among the GGUF models of its repository.
    """

    name: str
    kind: Kind
    path: Path
    repository: str | None
    revision: str | None
    refs: tuple[str, ...]
    size_bytes: int
    unfinished_bytes: int
    last_used: datetime | None
    profile: ProfileSummary | None
    inspection: Inspection
    variant: str | None = None

    @property
    def status(self) -> Status:
        """Whether it can be run."""
        return self.inspection.status


def cache_folder() -> Path:
    """The shared Hugging Face cache of this process: HF_HUB_CACHE, or what HF_HOME holds. It need not exist."""
    # Imported here: `rimuru --help` must not pay for it.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def find_models() -> list[LibraryModel]:
    """All models that are here, runnable or not; the last used first, then by name."""
    notes = _Notes(last_uses(), recorded_profiles())
    models = [*_demos(notes), *_cached(notes), *_copies(notes)]
    models += _folders(notes, {Path(os.path.realpath(model.path)) for model in models})
    return sorted(models, key=lambda model: (-model.last_used.timestamp() if model.last_used else 0.0, model.name))


class _Notes(NamedTuple):
    """What rimuru itself wrote down about models."""

    uses: Mapping[Path, Use]
    profiles: Sequence[ProfileSummary]


def _demos(notes: _Notes) -> Iterator[LibraryModel]:
    """The demonstration model, and what other versions of rimuru and interrupted builds left of it."""
    current = embedded.model_dir()
    for folder in _children(current.parent):
        look = inspect(folder)
        if folder == current:
            name = embedded.EMBEDDED_NAME
            if Manifest.read(folder) is None:
                look = replace(look, status="incomplete", why_not="its building was cut short")
        elif folder.name.startswith(_DEMO_PREFIX):
            name = f"{embedded.EMBEDDED_NAME}@{folder.name.removeprefix(_DEMO_PREFIX)}"
            look = replace(look, status="unusable", why_not="built by another version of rimuru")
        elif folder.name.startswith((embedded.BUILDING, embedded.DISCARDED)):
            name = f"{embedded.EMBEDDED_NAME}@{folder.name.lstrip('.')}"
            look = replace(look, status="unusable", why_not="left of a build that was cut short, or is going on")
        else:
            continue
        yield _model(name, "demo", folder, look, notes)


def _cached(notes: _Notes) -> Iterator[LibraryModel]:
    for folder in _children(cache_folder()):
        if folder.name.startswith(PREFIX):
            yield from _of_repository(folder, notes)


def _of_repository(folder: Path, notes: _Notes) -> Iterator[LibraryModel]:
    """The snapshots of one repository. Parts of files belong to no snapshot yet; they are counted with the one that `main` means."""
    repository = folder.name.removeprefix(PREFIX).replace("--", "/", 1)
    try:
        os.listdir(folder)
    except OSError as error:
        look = Inspection(None, None, None, "unusable", f"its folder cannot be read ({error.strerror})")
        yield replace(_model(repository, "cache", folder, look, notes), repository=repository)
        return
    refs = _refs(folder / "refs")
    snapshots = _children(folder / "snapshots")
    unfinished = size_on_disk(path for path in _children(folder / "blobs", folders=False) if path.name.endswith(".incomplete"))
    if not snapshots:
        size = size_on_disk(files_below(folder / "blobs")) - unfinished
        if size or unfinished:
            look = Inspection(None, None, None, "incomplete", "its download was cut short")
            yield replace(
                _model(repository, "cache", folder, look, notes), repository=repository, size_bytes=size, unfinished_bytes=unfinished
            )
        return
    main = next((snapshot for snapshot in snapshots if refs.get("main") == snapshot.name), snapshots[0])
    for snapshot in snapshots:
        own_refs = tuple(sorted(name for name, commit in refs.items() if commit == snapshot.name))
        suffix = None if "main" in own_refs else own_refs[0] if own_refs else snapshot.name
        left = unfinished if snapshot == main else 0
        for variant in _models_in(snapshot, repository):
            path = snapshot if variant is None else snapshot.joinpath(*variant.names[0].split("/"))
            name = shown_name(repository, None if variant is None else variant.label, suffix)
            if "/" not in repository:  # such a name cannot be told from a folder's, so its folder is what to type
                name = str(path)
            model = _model(name, "cache", path, inspect(path, repository), notes)
            if variant is not None:
                model = replace(model, variant=variant.label, size_bytes=size_on_disk(snapshot / one for one in variant.names))
            yield replace(model, repository=repository, revision=snapshot.name, refs=own_refs, unfinished_bytes=left)
            left = 0


def _models_in(snapshot: Path, repository: str) -> Iterator[Variant | None]:
    """GGUF models of a snapshot; None for one of safetensors, or whatever else it is."""
    variants = known_variants(repository, snapshot)
    if is_plain(snapshot) or not variants:
        yield None
    yield from variants


def _copies(notes: _Notes) -> Iterator[LibraryModel]:
    """Quantised copies below rimuru's data folder, and what is left of those whose making was cut short."""
    for folder in _children(paths.quantized_dir()):
        look = inspect(folder)
        if not (folder / "config.json").is_file():
            look = replace(look, status="incomplete", why_not="its making was cut short; the same command goes on with it")
        yield _model(folder.name, "copy", folder, look, notes)


def _folders(notes: _Notes, known: set[Path]) -> Iterator[LibraryModel]:
    """Local folders that rimuru has run and that are still there."""
    places = [Path(os.path.realpath(place)) for place in (embedded.model_dir().parent, cache_folder(), paths.quantized_dir())]
    for real, use in notes.uses.items():
        if (
            real not in known
            and (real.is_dir() or (is_gguf(real) and real.is_file()))
            and not any(real.is_relative_to(place) for place in places)
        ):
            yield _model(str(use.path), "folder", use.path, inspect(use.path), notes)


def _model(name: str, kind: Kind, folder: Path, look: Inspection, notes: _Notes) -> LibraryModel:
    used = notes.uses.get(Path(os.path.realpath(folder)))
    return LibraryModel(
        name=name,
        kind=kind,
        path=folder,
        repository=None,
        revision=None,
        refs=(),
        size_bytes=size_on_disk(files_of(folder)),
        unfinished_bytes=0,
        last_used=used.used_at if used else _last_read(folder),
        profile=profile_of(folder, look.config, notes.profiles) if look.status == "ready" and look.config else None,
        inspection=look,
    )


def profile_of(folder: Path, config: ModelConfig, profiles: Iterable[ProfileSummary]) -> ProfileSummary | None:
    """The profile that was recorded for the model in this folder. Headers are read only where a profile could be its."""
    fitting = [p for p in profiles if (p.num_moe_layers, p.num_experts) == (len(config.moe_layers), config.num_experts)]
    if not fitting:
        return None
    try:
        identity = model_identity(folder)
    except RimuruError:
        return None
    return next((profile for profile in fitting if profile.identity == identity), None)


def size_on_disk(files: Iterable[Path]) -> int:
    """Bytes of files, links followed, each file counted once however often it is named; what is gone counts nothing."""
    sizes: dict[tuple[int, int] | Path, int] = {}
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            sizes[(status.st_dev, status.st_ino) if status.st_ino else path] = status.st_size
    return sum(sizes.values())


def _last_read(folder: Path) -> datetime | None:
    """When the system says that weights in this folder were last read."""
    times = []
    for path in folder.glob("*.safetensors") if folder.is_dir() else files_of(folder):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_atime)
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _refs(folder: Path) -> dict[str, str]:
    """Branch or tag -> commit."""
    found = {}
    for path in files_below(folder):
        with contextlib.suppress(OSError, ValueError):
            found[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8").strip()
    return found


def _children(folder: Path, *, folders: bool = True) -> list[Path]:
    """Folders (or files) directly in a folder, by name; none where it cannot be read."""
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() == folders)
    except OSError:
        return []


def files_of(path: Path) -> Iterator[Path]:
    """All files of a model: those below a folder, or the parts of a GGUF model."""
    if is_gguf(path) and not path.is_dir():
        yield from (path.with_name(name) for name in part_names(path.name))
    else:
        yield from files_below(path)


def files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder and the folders in it; links to folders are not followed."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)
