"""What a pull would do, worked out before the first byte of weights: which files, how large, what is here, whether it makes sense."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rimuru_cli.hub.beginnings import Beginnings, DamagedHeaderError
from rimuru_cli.hub.fit import FitCheck, FitVerdict
from rimuru_cli.hub.licence import is_licence_file
from rimuru_cli.hub.pull_manifest import PullManifest
from rimuru_cli.hub.remote import Hub
from rimuru_cli.hub.remote_files import COMMIT, CONFIG, TOKENIZER, RemoteFile, Selection, select
from rimuru_cli.hub.remote_headers import narrow, read_config, read_gguf, read_headers
from rimuru_cli.hub.repository_cache import RepositoryCache
from rimuru_cli.hub.sizes import size_in_words
from rimuru_cli.hub.transfer import Origin
from rimuru_cli.hub.variants import matching, shown_name, variants_of
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError, NoSpaceError, RimuruError
from rimuru_models.gguf import is_gguf
from rimuru_models.gguf.config import config_values
from rimuru_models.index import gguf_index

_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


class CacheRefusedError(RimuruError):
    """The cache takes nothing from us: it belongs to somebody else, is read-only, or is no folder."""


@dataclass(frozen=True)
class Objection:
    """Something that speaks against a download, without making it impossible.

    Attributes:
        text: what, as a sentence.
        hint: what could be done about it, or None.
        exit_code: with which a command ends that does not go on because of it.
    """

    text: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True)
class Plan:
    """A pull that is ready to begin.

    Attributes:
        origin: repository, as the hub calls it now, and commit.
        asked_for: the name that was typed.
        revision: the branch, tag or commit that was typed.
        cache: where files go.
        files: all files of the model.
        present: names of those that seem to be complete on the disk (their checksums may still have to be looked at).
        known_good: names of those whose checksum was right and that have not been touched since.
        parts: checksum -> bytes of those of the others that earlier attempts have begun.
        free_bytes: free on the cache's disk.
        architecture: as config.json names it; None when it was not looked at because everything is here.
        verdict: whether it fits this machine; None when that was not looked at or cannot be said.
        objections: what speaks against it.
        beginnings: first bytes that were read on the way, by name.
        variant: what it is called among the GGUF models of its repository; None: safetensors.
    """

    origin: Origin
    asked_for: str
    revision: str
    cache: RepositoryCache
    files: tuple[RemoteFile, ...]
    present: frozenset[str]
    known_good: frozenset[str]
    parts: Mapping[str, int]
    free_bytes: int
    architecture: str | None = None
    verdict: FitVerdict | None = None
    objections: tuple[Objection, ...] = ()
    beginnings: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    variant: str | None = None

    @property
    def name(self) -> str:
        """What to type as MODEL, but for the revision."""
        return shown_name(self.origin.repository, self.variant, None)

    @property
    def path(self) -> Path:
        """Where the model will lie: its folder, or the GGUF file in it (the first of its parts)."""
        first = next((file.name for file in self.files if is_gguf(Path(file.name))), None) if self.variant is not None else None
        return self.cache.snapshot(self.origin.commit) if first is None else self.cache.pointer(self.origin.commit, first)

    @property
    def renamed(self) -> bool:
        """Whether the hub has another name for what was asked for."""
        return self.asked_for != self.origin.repository

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model; content that two names share counts once."""
        return sum({file.etag: file.num_bytes for file in self.files}.values())

    @property
    def present_bytes(self) -> int:
        """Bytes of the files that are there."""
        return sum({file.etag: file.num_bytes for file in self.files if file.name in self.present}.values())

    @property
    def part_bytes(self) -> int:
        """Bytes of files that earlier attempts have begun."""
        return sum(self.parts.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to come over the network."""
        return self.total_bytes - self.present_bytes - self.part_bytes

    @property
    def complete(self) -> bool:
        """Whether every file is here, known to be right, and has its name."""
        pointers = (self.cache.pointer(self.origin.commit, file.name) for file in self.files)
        return len(self.known_good) == len(self.files) and all(pointer.is_file() for pointer in pointers)


def make_plan(hub: Hub, repository: str, revision: str, check_fit: FitCheck | None, variant: str | None = None) -> Plan:
    """Find out what `repository` at `revision` is, what of it is here, and what speaks against fetching the rest.

    Args:
        hub: whom to ask.
        repository: `org/name`, already checked.
        revision: branch, tag or commit, already checked.
        check_fit: says whether the model runs on this machine; None: not asked.
        variant: which GGUF model of several.

    Raises:
        NotFoundError: missing, gated, private, or no such revision or GGUF model.
        UsageError: several GGUF models, and none was named.
        CheckpointError: pickled weights only, or a repository that is not a model or not honest.
        NoSpaceError: too little space for it; says how many bytes are missing.
        RimuruError: the hub cannot be reached.
    """
    info = hub.info(repository, revision)
    origin = Origin(info.repository, info.commit)
    cache = RepositoryCache.of(info.repository)
    manifest = PullManifest.read(info.repository, info.commit)
    if manifest is not None:
        # It was pulled before, so all questions have been answered; only what was damaged or deleted since is fetched. Where nothing is
        # left of it (another tool deleted it) they are asked again.
        pulled = _pulled(manifest, variant)
        plan = _plan(origin, repository, revision, cache, pulled.files, pulled.variant)
        if pulled.files and (CONFIG in plan.present or (pulled.variant is not None and plan.present)):
            return _checked_for_space(plan)
    selection = select(info.repository, hub.tree(info.repository, info.commit), variant)
    beginnings = Beginnings(hub, origin, cache)
    _borrow(cache, repository, origin, selection.files)
    if selection.variant is None:
        selection, weight_map = narrow(beginnings, selection)
        architecture = _architecture(read_config(beginnings, selection, info.repository))
    plan = _checked_for_space(_plan(origin, repository, revision, cache, selection.files, selection.variant))
    objections, verdict = [] if selection.variant else _without_tokenizer(info.repository, selection), None
    try:
        if selection.variant is None:
            values = read_config(beginnings, selection, info.repository)
            config = ModelConfig.from_dict(values, where=f"{info.repository}/{CONFIG}")
            headers = partial(read_headers, beginnings, selection, weight_map, origin)
        else:
            architecture = None
            files = read_gguf(beginnings, selection, origin)
            architecture = files.main.string("general.architecture", "")[:100] or None
            config = ModelConfig.from_dict(config_values(files), where=files.main.where)
            headers = partial(gguf_index, files)
        if check_fit is not None and plan.missing_bytes > 0:
            verdict = check_fit(plan.name, config, headers())
            if not verdict.runs:
                objections.append(Objection(verdict.problem or verdict.headline, verdict.hint, verdict.exit_code))
    except DamagedHeaderError as error:
        # No word about the model: the checksum of the whole file will say whether it was damaged on the way.
        if hub.notice is not None:
            hub.notice(f"whether it fits cannot be said: {error.what} It may have been damaged on the way")
    except CheckpointError as error:
        objections.append(Objection(f"rimuru cannot run this model: {error.what}", error.hint, error.exit_code))
    return replace(
        plan,
        architecture=architecture,
        verdict=verdict,
        objections=tuple(objections) if plan.missing_bytes > 0 else (),
        beginnings=beginnings.fetched,
    )


def _pulled(manifest: PullManifest, variant: str | None) -> Selection:
    """Those files of an earlier pull that belong to the model that is wanted now; none: it was another one."""
    files = manifest.remote_files()
    plain = [file for file in files if not is_gguf(Path(file.name))]
    weights = tuple(file for file in files if is_gguf(Path(file.name)))
    if variant is None and any(file.name == CONFIG for file in plain):
        return Selection((), tuple(plain), False)
    variants = variants_of({file.name: file.num_bytes for file in weights})
    found = variants if variant is None else matching(variants, variant)
    if len(found) != 1 or found[0].missing:
        return Selection((), (), False)
    others = tuple(file for file in plain if is_licence_file(file.name))
    return Selection(tuple(file for file in weights if file.name in found[0].names), others, False, found[0].label)


def finished_plan(repository: str, revision: str, variant: str | None = None) -> Plan | None:
    """The plan of a pull that is known to be finished, without asking the hub; None when there is none."""
    cache = RepositoryCache.of(repository)
    commit = revision if COMMIT.fullmatch(revision) else cache.commit_of(revision)
    manifest = PullManifest.read(repository, commit) if commit else None
    if manifest is None:
        return None
    pulled = _pulled(manifest, variant)
    plan = _plan(Origin(repository, manifest.commit), repository, revision, cache, pulled.files, pulled.variant)
    return plan if pulled.files and plan.complete else None


def _plan(origin: Origin, repository: str, revision: str, cache: RepositoryCache, files: Sequence[RemoteFile], variant: str | None) -> Plan:
    records = known_records(origin.repository)
    present, good, parts = set(), set(), {}
    for file in files:
        path = cache.found(origin.commit, file)
        if path is None:
            parts[file.etag] = cache.part_bytes(file)
            continue
        present.add(file.name)
        if (file.etag, path.stat().st_mtime_ns) in records:
            good.add(file.name)
    free = shutil.disk_usage(_existing(cache.root)).free
    return Plan(origin, repository, revision, cache, tuple(files), frozenset(present), frozenset(good), parts, free, variant=variant)


def _borrow(cache: RepositoryCache, asked_for: str, origin: Origin, files: Sequence[RemoteFile]) -> None:
    """Use what the cache has under an older name of the repository, or (without links) in the snapshots of other commits."""
    elsewhere = {
        record.etag: RepositoryCache.of(manifest.repository).pointer(manifest.commit, name)
        for manifest in PullManifest.all_of(origin.repository)
        for name, record in manifest.files.items()
    }
    before = RepositoryCache.of(asked_for) if asked_for != origin.repository else None
    for file in files:
        cache.borrow(origin.commit, file, before.found(origin.commit, file) if before else elsewhere.get(file.etag))


def known_records(repository: str) -> frozenset[tuple[str, int]]:
    """(checksum, time of modification) of every file whose checksum was right at that time."""
    return frozenset(
        (record.etag, record.mtime_ns)
        for manifest in PullManifest.all_of(repository)
        for record in manifest.files.values()
        if record.mtime_ns
    )


def _checked_for_space(plan: Plan) -> Plan:
    if plan.missing_bytes > plan.free_bytes:
        raise no_space(plan, plan.missing_bytes, plan.free_bytes)
    return plan


def no_space(plan: Plan, needed: int, free: int) -> NoSpaceError:
    """The error for a disk that is too full, before or during a download; `needed` and `free` in bytes."""
    lacking = needed - free
    if lacking > 0:
        gap = f"{size_in_words(lacking)} ({lacking} bytes) are missing"
        missing = f"needs {size_in_words(needed)} more, and {size_in_words(free)} are free: {gap}"
    else:
        missing = f"needs {size_in_words(needed)} more, and the system gives no more space (a quota, perhaps)"
    return NoSpaceError(
        f"{plan.origin.repository} {missing} on the disk of {plan.cache.root}.",
        hint="free some space (`rimuru list` shows what models take, `rimuru rm` deletes them), or let HF_HOME name a larger disk",
    )


def refused_by_the_disk(plan: Plan, error: OSError) -> RimuruError | None:
    """The error for a cache whose disk is not full and yet takes nothing; None for what says nothing about that."""
    root = plan.cache.root
    if error.errno == errno.EFBIG:
        return NoSpaceError(
            f"The disk of {root} takes no file as large as those of {plan.origin.repository}.",
            hint="FAT32 ends at 4 GiB a file, and `ulimit -f` may end sooner; let HF_HOME name another disk",
        )
    if error.errno not in _UNUSABLE:
        return None
    return CacheRefusedError(
        f"The cache in {root} cannot be used: {error.strerror} ({error.filename or root}).",
        hint="check who owns it, its permissions and what lies there, or let HF_HOME name another folder",
    )


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _architecture(values: Mapping[str, Any]) -> str | None:
    names = values.get("architectures")
    return str(names[0])[:100] if isinstance(names, list) and names else None


def _without_tokenizer(repository: str, selection: Selection) -> list[Objection]:
    if any(file.name == TOKENIZER for file in selection.others):
        return []
    return [
        Objection(
            f"{repository} has no {TOKENIZER}, and only that can be read.",
            "look for a newer revision, or for another repository of the model",
            CheckpointError.exit_code,
        )
    ]
