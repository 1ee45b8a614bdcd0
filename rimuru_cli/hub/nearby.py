"""Names a person may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from rimuru_cli.hub.embedded import EMBEDDED_NAME
from rimuru_models.gguf import is_gguf

_MOST = 3
_PREFIX = "models--"


def near_paths(path: Path) -> list[str]:
    """Folders and GGUF files beside `path`, which does not exist, whose names resemble its own; at most 3, the nearest first."""
    try:
        siblings = [child.name for child in path.parent.iterdir() if child.is_dir() or is_gguf(child)]
    except OSError:
        return []
    return [str(path.parent / name) for name in _closest(path.name, siblings)]


def near_repositories(name: str) -> list[str]:
    """Repositories in the Hugging Face cache, and the demonstration model, whose names resemble `name`; at most 3."""
    from huggingface_hub import constants

    try:
        folders = [child.name for child in Path(constants.HF_HUB_CACHE).iterdir() if child.name.startswith(_PREFIX)]
    except OSError:
        folders = []
    return _closest(
        name.partition("@")[0].partition(":")[0],
        [folder.removeprefix(_PREFIX).replace("--", "/", 1) for folder in folders] + [EMBEDDED_NAME],
    )


def did_you_mean(names: list[str]) -> str | None:
    """A hint that offers `names`; None without any."""
    return f"did you mean {' or '.join(names)}?" if names else None


def _closest(name: str, candidates: Iterable[str]) -> list[str]:
    """Candidates that resemble `name` in whole or in the part after the last slash, in any case; the nearest first."""
    wanted = name.lower()
    by_key: dict[str, str] = {}
    for candidate in candidates:
        by_key.setdefault(candidate.lower(), candidate)
        by_key.setdefault(candidate.lower().rpartition("/")[2], candidate)
    keys = difflib.get_close_matches(wanted, by_key, n=2 * _MOST, cutoff=0.7)
    return list(dict.fromkeys(by_key[key] for key in keys))[:_MOST]
