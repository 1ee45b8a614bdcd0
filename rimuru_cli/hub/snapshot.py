"""Looking up a repository in the shared Hugging Face cache, and saying what a snapshot there lacks. Never uses the network."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from rimuru_cli.hub.nearby import did_you_mean, near_repositories
from rimuru_models.errors import NotFoundError

_SHARD = re.compile(r"(?P<stem>.+-)\d{5}-of-(?P<total>\d{5})\.safetensors")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_SHOWN = 5


def find_snapshot(repository: str, revision: str | None) -> Path:
    """The folder of a downloaded repository, named by its commit. HF_HOME and HF_HUB_CACHE are honoured.

    Args:
        repository: `org/name`, already checked.
        revision: branch, tag or commit; None: main.

    Raises:
        NotFoundError: not downloaded, or files are missing; the hint is the command that downloads them.
    """
    # Imported here: `rimuru --help` must not pay for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    download = f"type `{_hf_command()} download {repository}{f' --revision {revision}' if revision else ''}`"
    shown = f"{repository}@{revision}" if revision else repository
    try:
        # Only config.json is asked for: with no pattern, a download that left out files rimuru has no use for would count as incomplete.
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=["config.json"]))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        near = [one for one in near_repositories(repository) if one != repository]
        also = f"; {did_you_mean(near)}" if near else ""
        raise NotFoundError(f"{shown} is neither a folder here nor in the Hugging Face cache.", hint=download + also) from error
    missing = missing_files(folder)
    if missing:
        names = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise NotFoundError(f"{shown} is not completely downloaded: {folder} lacks {names}.", hint=download)
    return folder


def _hf_command() -> str:
    """What to type for huggingface_hub's command: install.sh leaves it beside this Python, which is rarely on PATH."""
    beside = Path(sys.executable).with_name("hf.exe" if os.name == "nt" else "hf")
    return "hf" if shutil.which("hf") or not beside.is_file() else shlex.quote(str(beside))


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
