"""What a quantised copy says of itself in `rimuru-quantized.json`: what it was made of and how, and its files' checksums. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

NOTE = "rimuru-quantized.json"
_VERSION = 1
_SUMS = "sha256"


class _Recipe(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def feedback(self) -> bool: ...


def noted(source: str, recipe: _Recipe) -> dict[str, Any]:
    """What a copy of this source by this recipe says. One that was begun otherwise is not gone on with."""
    return {"version": _VERSION, "source": source, "to": recipe.name, "group": recipe.group, "feedback": recipe.feedback}


def with_checksums(note: Mapping[str, Any], sums: Mapping[str, str]) -> dict[str, Any]:
    """The note of a finished copy. `sums`: sha256 (hex) of each file, by its name with slashes."""
    return {**note, _SUMS: dict(sums)}


def note_of(folder: Path) -> dict[str, Any] | None:
    """What a copy was made of, as `noted` has it; None where there is no note, or none that can be understood."""
    return {name: value for name, value in _read(folder).items() if name != _SUMS} or None


def noted_checksums(folder: Path) -> dict[str, str]:
    """File name (with slashes) -> sha256 (hex) of a copy that was finished; empty where there is none."""
    sums = _read(folder).get(_SUMS)
    return {str(name): value for name, value in sums.items() if isinstance(value, str)} if isinstance(sums, dict) else {}


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Why the copy in a folder is not the one that is wanted, in words."""
    if found.get("to") != wanted["to"] or found.get("group") != wanted["group"]:
        return f"it was made or begun as {str(found.get('to'))[:20]} in groups of {str(found.get('group'))[:20]}"
    if found.get("source") != wanted["source"]:
        return "its original is another model, or has changed since"
    return "another version of rimuru made or began it"


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
