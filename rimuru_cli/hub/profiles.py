"""Hotset profiles that were recorded here: which models have one, and what it says in short. See `engine/experts/hotset.py`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rimuru_cli.hub import paths

_FORMAT, _VERSION = "rimuru-hotset", 1
_MOST_BYTES = 64 << 20
_SHARES = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class ProfileSummary:
    """What a profile holds.

    Attributes:
        identity: of the model it was recorded on; a profile fits no other.
        num_moe_layers, num_experts: of that model.
        top_k: experts a token used.
        tokens: tokens recorded.
        created: ISO time.
        coverage: share of a layer's experts -> share of its selections that the hottest so many had in the recording, mean over layers.
    """

    path: Path
    identity: str
    num_moe_layers: int
    num_experts: int
    top_k: int
    tokens: int
    created: str
    coverage: dict[float, float]


def recorded_profiles() -> list[ProfileSummary]:
    """Every profile in rimuru's data folder that can be understood."""
    found = []
    with contextlib.suppress(OSError):
        for file in sorted(paths.profiles_dir().glob("*.json")):
            summary = summarise(file)
            if summary is not None:
                found.append(summary)
    return found


def summarise(path: Path) -> ProfileSummary | None:
    """A profile in short; None when the file is not one of this version, or is damaged."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != _FORMAT or value["version"] != _VERSION:
            return None
        layers = value["layers"]
        return ProfileSummary(
            path=path,
            identity=str(value["identity"]),
            num_moe_layers=len(layers),
            num_experts=int(value["num_experts"]),
            top_k=int(value["top_k"]),
            tokens=int(value["tokens"]),
            created=str(value["created"]),
            coverage={share: _covered(layers, share) for share in _SHARES},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError, OverflowError):
        return None


def _covered(layers: list[dict[str, Any]], share: float) -> float:
    """`probabilities` of a layer are listed from the hottest expert on."""
    sums = []
    for layer in layers:
        probabilities = [float(p) for p in layer["probabilities"]]
        sums.append(sum(probabilities[: max(1, round(share * len(probabilities)))]))
    return round(sum(sums) / len(sums), 4)
