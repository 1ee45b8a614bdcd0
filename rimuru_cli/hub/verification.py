"""Reading a model again and comparing every checksum that is known for it, without the network.

What there is to compare with, the best first: the manifest of `rimuru pull`; the names of blobs in the shared cache, which are checksums,
and the listing that huggingface_hub keeps beside them; what `hf download --local-dir` noted in a folder; what `rimuru quantize` noted in
its copies; the demonstration model's own manifest. Of a folder with none of these only the structure can be checked: that every shard is
there and as long as its header says. Of quantised weights, the scales are looked at as well.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from rimuru_cli.hub import embedded
from rimuru_cli.hub.integrity import hash_file
from rimuru_cli.hub.manifest import Manifest, Progress
from rimuru_cli.hub.pull_manifest import PulledFile, PullManifest
from rimuru_cli.hub.remote_files import RemoteFile
from rimuru_cli.hub.resolve import parse_repository, resolve_here
from rimuru_cli.hub.snapshot import known_variants, locate_snapshot, missing_files, not_downloaded
from rimuru_cli.hub.variants import choose, matching, shown_name, variants_of
from rimuru_models.errors import CheckpointError, RimuruError, VerificationError
from rimuru_models.gguf import is_gguf, open_gguf
from rimuru_models.gguf.files import part_names
from rimuru_models.index import open_index
from rimuru_models.quantizer.note import noted_checksums

State = Literal["ok", "damaged", "missing", "unknown"]
Against = Literal["manifest", "cache", "download metadata", "copy", "headers"]

_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_STAGE = "Checking"


@dataclass(frozen=True)
class CheckedFile:
    """One file of a model after the check.

    Attributes:
        name: its path in the model's folder.
        num_bytes: size on the disk; None when it is missing.
        state: "unknown": there is nothing to compare it with.
        expected: checksum it should have, hex; None when none is known.
        found: checksum it has; None when it was not read.
    """

    name: str
    num_bytes: int | None
    state: State
    expected: str | None
    found: str | None


@dataclass(frozen=True)
class Verification:
    """The result for one model.

    Attributes:
        name: the model.
        path: its folder.
        commit: the commit of a repository; None for folders.
        against: what the files were compared with.
        files: all files, sorted by name.
    """

    name: str
    path: Path
    commit: str | None
    against: Against
    files: tuple[CheckedFile, ...]

    @property
    def bad(self) -> tuple[CheckedFile, ...]:
        """Files that are damaged or missing."""
        return tuple(file for file in self.files if file.state in ("damaged", "missing"))

    def error(self) -> VerificationError | None:
        """The error that names the bad files; None when there are none."""
        if not self.bad:
            return None
        names = ", ".join(f"{file.name} ({file.state})" for file in self.bad[:5]) + (
            f" and {len(self.bad) - 5} more" if self.bad[5:] else ""
        )
        hint = "put an undamaged copy of them into the folder"
        if self.commit is not None:
            hint = f"type `rimuru pull {self.name}`: only {'that file' if len(self.bad) == 1 else 'those files'} will be fetched again"
        elif self.name == embedded.EMBEDDED_NAME:
            hint = "type `rimuru chat` to build it again"
        elif self.against == "copy":
            hint = "delete them and type the `rimuru quantize` that made this copy: it makes what is missing again"
        return VerificationError(
            f"{len(self.bad)} of {len(self.files)} files of {self.name} are not as they should be: {names}.", hint=hint
        )


def verify_model(name: str, progress: Progress | None = None) -> Verification:
    """Read all files of a model and compare what can be compared, then look at the scales of quantised weights.

    Args:
        name: the demonstration model, a folder, a GGUF file, or `org/name[:variant][@revision]` from the cache.
        progress: told ("Checking", bytes done, bytes in all).

    Raises:
        NotFoundError: no such folder, or not downloaded.
        UsageError: the name cannot be one of a model.
        VerificationError: its files are as they should be, or nobody knows, but a scale in them is not a finite number.
    """
    result, model = _compared(name, progress)
    if not result.bad:
        _check_scales(result.name, model)
    return result


def _check_scales(name: str, model: Path) -> None:
    if model.is_dir() and not _names_a_format(model):
        return
    # Only here: they read arrays, and most models need no library for that.
    from rimuru_models.quantization.scheme import DAMAGED
    from rimuru_models.quantization.soundness import unsound_scales

    try:
        path, tensor = next(unsound_scales(model), (None, ""))
    except RimuruError:
        return  # nothing that could be run, so that its checksums are all there is to say
    if path is not None:
        raise VerificationError(f"{name}: tensor {tensor[:200]!r} in {path.name} has a scale that is not a finite number.", hint=DAMAGED)


def _names_a_format(folder: Path) -> bool:
    """Whether a model's folder may hold quantised weights: its config.json says how, or it is made of GGUF files."""
    config = folder / "config.json"
    try:
        return b"quantization_config" in config.read_bytes() if config.is_file() else True
    except OSError:
        return True


def _compared(name: str, progress: Progress | None) -> tuple[Verification, Path]:
    """The result for the files, and the model that they are: a folder or a GGUF file."""
    if embedded.is_embedded_name(name):
        folder = embedded.model_dir()
        manifest = Manifest.read(folder) if folder.is_dir() else None
        if manifest is None:
            folder = embedded.verify(progress)  # not built, or not whole: it says so
            manifest = Manifest.read(folder)
        assert manifest is not None
        files = {file: RemoteFile(file, record.num_bytes, record.sha256) for file, record in manifest.files.items()}
        return Verification(embedded.EMBEDDED_NAME, folder, None, "manifest", _compare(folder, files, progress)), folder
    here = resolve_here(name)
    if here is not None:
        return _verify_folder(here.name, here.path, progress), here.path
    wanted = parse_repository(name)
    found = locate_snapshot(wanted.repository, wanted.revision)
    if found is None:
        raise not_downloaded(*wanted)
    repository, folder = found
    shown = shown_name(repository, wanted.variant, wanted.revision)
    own: frozenset[str] | None = None
    model = folder
    if wanted.variant is not None:
        variants = matching(known_variants(repository, folder), wanted.variant)
        if not variants:
            raise not_downloaded(*wanted)
        chosen = choose(shown_name(repository, None, wanted.revision), variants, wanted.variant)
        own, model = frozenset(chosen.names), folder.joinpath(*chosen.names[0].split("/"))
    pulled = PullManifest.read(repository, folder.name)
    against: Against = "cache" if pulled is None else "manifest"
    known: Mapping[str, RemoteFile | None]
    known = _from_cache(folder) if pulled is None else {file.name: file for file in pulled.remote_files()}
    checked = _compare(folder, {file: record for file, record in known.items() if own is None or file in own}, progress)
    if pulled is not None:
        _note(pulled, folder, checked)
    return Verification(shown, folder, folder.name, against, checked), model


def _verify_folder(name: str, folder: Path, progress: Progress | None) -> Verification:
    if is_gguf(folder) and not folder.is_dir():
        return _verify_file(name, folder, progress)
    noted = _from_local_dir(folder)
    if noted:
        return Verification(name, folder, None, "download metadata", _compare(folder, noted, progress))
    sums = {file: digest for file, digest in noted_checksums(folder).items() if _CHECKSUM.fullmatch(digest) and _is_inside(file)}
    if sums:
        own: dict[str, RemoteFile | None] = {file: RemoteFile(file, -1, digest) for file, digest in sums.items()}
        return Verification(name, folder, None, "copy", _compare(folder, own, progress))
    made = Manifest.read(folder)
    if made is not None:
        files = {file: RemoteFile(file, record.num_bytes, record.sha256) for file, record in made.files.items()}
        return Verification(name, folder, None, "manifest", _compare(folder, files, progress))
    try:
        shards = {path.name for path in open_index(folder).headers}
    except CheckpointError as error:
        raise VerificationError(f"{name} is not as it should be: {error.what}", hint=error.hint) from error
    absent = missing_files(folder)
    names = sorted(shards | set(absent) | {path.name for path in folder.iterdir() if path.is_file()})
    checked = [CheckedFile(file, _size(folder / file), "missing" if file in absent else "unknown", None, None) for file in names]
    return Verification(name, folder, None, "headers", tuple(checked))


def _is_inside(name: str) -> bool:
    """Whether a name that a file says is one of the folder itself or one below it."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and PureWindowsPath(name).drive == "" and "\\" not in name


def _verify_file(name: str, path: Path, progress: Progress | None) -> Verification:
    """A GGUF model: what `hf download --local-dir` noted of its files, else their headers."""
    folder = path.parent
    names = part_names(path.name)
    noted = {file: known for file, known in _from_local_dir(folder).items() if file in names and known is not None}
    if noted:
        files: dict[str, RemoteFile | None] = {file: noted.get(file) for file in names}
        return Verification(name, folder, None, "download metadata", _compare(folder, files, progress))
    absent = [file for file in names if _size(folder / file) is None]
    if not absent:
        try:
            open_gguf(path)
        except CheckpointError as error:
            raise VerificationError(f"{name} is not as it should be: {error.what}", hint=error.hint) from error
    checked = [CheckedFile(file, _size(folder / file), "missing" if file in absent else "unknown", None, None) for file in names]
    return Verification(name, folder, None, "headers", tuple(checked))


def _compare(folder: Path, files: Mapping[str, RemoteFile | None], progress: Progress | None) -> tuple[CheckedFile, ...]:
    """Read all files; one that is None has nothing to be compared with."""
    total, before = sum(_size(folder / name) or 0 for name in files), 0
    checked = []
    for name, file in sorted(files.items()):
        path = folder.joinpath(*name.split("/"))
        size = _size(path)
        if file is None or size is None:
            checked.append(CheckedFile(name, size, "missing" if size is None else "unknown", file.etag if file else None, None))
            continue
        if file.num_bytes not in (size, -1):  # -1: only the checksum is known
            checked.append(CheckedFile(name, size, "damaged", file.etag, None))
            before += size
            continue
        done = before

        def report(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(_STAGE, done, total)

        content = hash_file(path, size, file.etag, report=report)
        before += size
        checked.append(CheckedFile(name, size, "ok" if content.matches() else "damaged", file.etag, content.found))
    return tuple(checked)


def _from_cache(folder: Path) -> dict[str, RemoteFile | None]:
    """What the cache says of a snapshot: links to blobs whose names are checksums, or huggingface_hub's own listing of the commit."""
    listing = _listing(folder.parent.parent / "trees" / f"{folder.name}.json")
    files: dict[str, RemoteFile | None] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        files[name] = listing.get(name)
        if path.is_symlink():
            # Only the first link counts: a blob may itself be a link to a store that many repositories share.
            with contextlib.suppress(OSError):
                etag = Path(path.readlink()).name
                if _CHECKSUM.fullmatch(etag):
                    files[name] = RemoteFile(name, -1, etag)
    lost = [] if is_gguf_only(files) else missing_files(folder)
    lost += [part for variant in variants_of(dict.fromkeys(files, 0)) for part in variant.missing]
    return files | {name: listing.get(name) for name in lost}


def is_gguf_only(names: Iterable[str]) -> bool:
    """Whether a snapshot holds GGUF models and no other."""
    own = list(names)
    return any(is_gguf(Path(name)) for name in own) and not any(name.endswith(".safetensors") for name in own)


def _listing(path: Path) -> dict[str, RemoteFile]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: _listed(name, entry) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _listed(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    sha256 = entry.get("lfs_sha256")
    return RemoteFile(str(name), int(entry["lfs_size"] if sha256 else entry["size"]), str(sha256 or entry["blob_id"]))


def _from_local_dir(folder: Path) -> dict[str, RemoteFile | None]:
    """What `hf download --local-dir` noted: one small file for each (commit, checksum, time), and perhaps the commit's listing."""
    notes = folder / ".cache" / "huggingface" / "download"
    files: dict[str, RemoteFile | None] = {}
    for path in sorted(notes.rglob("*.metadata")):
        name = path.relative_to(notes).as_posix().removesuffix(".metadata")
        with contextlib.suppress(OSError, ValueError):
            lines = path.read_text(encoding="utf-8").splitlines()
            if len(lines) >= 2 and _CHECKSUM.fullmatch(lines[1].strip()):
                files[name] = RemoteFile(name, -1, lines[1].strip())
    lost = [] if is_gguf_only(files) else missing_files(folder)
    return files | dict.fromkeys(lost) if files else {}


def _note(pulled: PullManifest, folder: Path, checked: tuple[CheckedFile, ...]) -> None:
    """Write down what was found, so that the next pull knows which files are bad without reading them all."""
    files: dict[str, PulledFile] = dict(pulled.files)
    for file in checked:
        record = files[file.name]
        time = 0
        if file.state == "ok":
            with contextlib.suppress(OSError):
                time = folder.joinpath(*file.name.split("/")).stat().st_mtime_ns
        files[file.name] = replace(record, mtime_ns=time)
    if files != pulled.files:
        with contextlib.suppress(OSError):  # a data folder that cannot be written: the next pull reads more
            replace(pulled, files=files).write()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
