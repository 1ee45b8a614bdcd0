"""Looking up a repository in the shared Hugging Face cache, and saying what a snapshot there lacks. Never uses the network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rimuru_cli.hub.nearby import did_you_mean, near_repositories
from rimuru_cli.hub.pull_manifest import PullManifest, renamed_to
from rimuru_cli.hub.remote_files import COMMIT
from rimuru_cli.hub.repository_cache import RepositoryCache
from rimuru_cli.hub.variants import Variant, choose, gguf_files, in_words, matching, shown_name, variants_of
from rimuru_models.errors import NotFoundError
from rimuru_models.gguf import is_gguf

_SHARD = re.compile(r"(?P<stem>.+-)\d{5}-of-(?P<total>\d{5})\.safetensors")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_SHOWN = 5


class Snapshot(NamedTuple):
    """A downloaded model.

    Attributes:
        repository: its present name.
        folder: of the snapshot, named by its commit.
        path: the same, or the GGUF file in it (the first of its parts).
        variant: which GGUF model it is.
    """

    repository: str
    folder: Path
    path: Path
    variant: str | None


def find_snapshot(repository: str, revision: str | None, variant: str | None = None) -> Snapshot:
    """A downloaded repository's present name and where it lies. HF_HOME and HF_HUB_CACHE are honoured.

    Args:
        repository: `org/name`, already checked; one that the hub has renamed since is found under its new name.
        revision: branch, tag or commit; None: main.
        variant: which of several GGUF models; None: safetensors, else the only GGUF model that is here.

    Raises:
        NotFoundError: not downloaded, or files are missing; the hint is the command that downloads them.
        UsageError: several GGUF models are here, or are meant.
    """
    found = locate_snapshot(repository, revision)
    if found is None:
        raise not_downloaded(repository, revision, variant)
    repository, folder = found
    variants = known_variants(repository, folder)
    label = None
    if variant is not None or (variants and not is_plain(folder)):
        if variant is not None and not matching(variants, variant):
            raise not_downloaded(repository, revision, variant)
        chosen = choose(shown_name(repository, None, revision), variants, variant)
        label, missing, path = chosen.label, lacking(repository, folder, chosen), folder.joinpath(*chosen.names[0].split("/"))
    else:
        missing, path = lacking(repository, folder), folder
    if missing:
        shown = shown_name(repository, label, revision)
        names = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise NotFoundError(
            f"{shown} is not completely downloaded: {folder} lacks {names}.",
            hint=f"type `rimuru pull {shown}`; what is there is not fetched again",
        )
    return Snapshot(repository, folder, path, label)


def is_plain(folder: Path) -> bool:
    """Whether a snapshot holds (parts of) a model of config.json and safetensors, perhaps beside GGUF files."""
    return (folder / "model.safetensors.index.json").is_file() or any(folder.glob("*.safetensors"))


def known_variants(repository: str, folder: Path) -> list[Variant]:
    """GGUF models that a snapshot has, or had when they were pulled."""
    manifest = PullManifest.read(repository, folder.name)
    pulled = {} if manifest is None else {name: file.num_bytes for name, file in manifest.files.items() if is_gguf(Path(name))}
    return variants_of(pulled | gguf_files(folder))


def locate_snapshot(repository: str, revision: str | None) -> tuple[str, Path] | None:
    """Name and folder of a snapshot, complete or not; None when there is none."""
    for name in (repository, renamed_to(repository)):
        if name is None:
            continue
        cache = RepositoryCache.of(name)
        commit = revision if revision and COMMIT.fullmatch(revision) else cache.commit_of(revision or "main")
        if commit is not None and cache.snapshot(commit).is_dir():
            return name, cache.snapshot(commit)
    return None


def not_downloaded(repository: str, revision: str | None, variant: str | None = None) -> NotFoundError:
    """The error for a repository without a snapshot of this revision (or variant); its hint is the command that makes one."""
    shown = shown_name(repository, variant, revision)
    pull = f"type `rimuru pull {shown}`"
    found = None if variant is None else locate_snapshot(repository, revision)
    if found is not None:
        here = known_variants(*found)
        others = f"; here is {in_words(here)}" if here else ""
        return NotFoundError(f"{shown} is not in the Hugging Face cache{others}.", hint=pull)
    cache = RepositoryCache.of(repository)
    parts = any(cache.blobs.glob("*.incomplete"))
    commits = sorted(path.parent.name for path in (cache.folder / "snapshots").glob("*/config.json"))
    if parts and not commits:
        return NotFoundError(f"The download of {shown} has not been finished.", hint=f"{pull}; it goes on where it stopped")
    if commits:
        others = f"; or name what is here: {repository}@{commits[0]}"
        return NotFoundError(f"{shown} is not in the Hugging Face cache; another version of it is.", hint=pull + others)
    near = [one for one in near_repositories(repository) if one != repository]
    also = f"; {did_you_mean(near)}" if near else ""
    return NotFoundError(f"{shown} is neither a folder here nor in the Hugging Face cache.", hint=pull + also)


def lacking(repository: str, folder: Path, variant: Variant | None = None) -> list[str]:
    """Names of the files that a snapshot lacks: those that its pull brought, or, without a word of a pull, those that a model needs.

    Args:
        variant: of this GGUF model; None: of the model of config.json and safetensors.
    """
    manifest = PullManifest.read(repository, folder.name)
    if variant is not None:
        gone = [name for name in variant.names if not folder.joinpath(*name.split("/")).is_file()]
        return gone or ([] if manifest is None else _not_as_pulled(folder, manifest, variant.names))
    own = None if manifest is None else [name for name in manifest.files if not is_gguf(Path(name))]
    return missing_files(folder) if manifest is None or own is None else _not_as_pulled(folder, manifest, own)


def _not_as_pulled(folder: Path, manifest: PullManifest, names: Iterable[str]) -> list[str]:
    """Names of files that are gone, have another size than when they were pulled, or are known to be damaged."""
    missing = []
    for name in names:
        record = manifest.files.get(name)
        if record is None:
            continue
        path = folder.joinpath(*name.split("/"))
        try:
            right = path.is_file() and path.stat().st_size == record.num_bytes and record.mtime_ns != 0
        except OSError:
            right = False
        if not right:
            missing.append(name)
    return missing


def missing_files(folder: Path) -> list[str]:
    """Names of files a model needs and the folder lacks (or has as links to nothing), sorted: config, tokenizer, every shard.

    A folder that has pickled weights and no safetensors lacks nothing here: whoever opens it refuses it with the reason.
    """
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append("tokenizer.json")
    index = folder / "model.safetensors.index.json"
    shards = _shards_of_index(index) if index.is_file() else _shards_of_names(folder)
    missing += [name for name in sorted(shards) if not (folder / name).is_file()]
    if not shards and not any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        missing.append("model.safetensors")
    return missing


def _shards_of_index(index: Path) -> set[str]:
    """Shards the index names. A broken index, or a name in it that leaves the folder, is left to the checkpoint reader."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        shards = {name for name in names if isinstance(name, str) and Path(name).name == name}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = set()
    return shards or {index.name}


def _shards_of_names(folder: Path) -> set[str]:
    """Safetensors files of the folder, and those that their numbering (-00001-of-00003) says belong to them."""
    shards = set()
    for path in folder.glob("*.safetensors"):
        shards.add(path.name)
        match = _SHARD.fullmatch(path.name)
        if match:
            total = int(match["total"])
            shards |= {f"{match['stem']}{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)}
            shards.add("model.safetensors.index.json")
    return shards
