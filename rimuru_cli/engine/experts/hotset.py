"""Hotset profiles: which experts of each layer a workload prefers, recorded offline, kept as readable JSON beside the model's identity."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru_models.errors import NotFoundError, UsageError

FORMAT = "rimuru-hotset"
VERSION = 1
_MAX_PROFILE_BYTES = 64 << 20


@dataclass(frozen=True)
class HotsetProfile:
    """Routing statistics of one model.

    Attributes:
        identity: hash of the model's configuration and tensor headers; a profile fits no other model.
        model: the model's name when the profile was recorded, for people.
        top_k: experts per token.
        tokens: tokens that were recorded.
        created: ISO time.
        probabilities: float64 [num_moe_layers, num_experts]; row l holds each expert's share of layer l's selections (sums to 1).
    """

    identity: str
    model: str
    top_k: int
    tokens: int
    created: str
    probabilities: NDArray[np.float64]

    def orderings(self) -> list[list[int]]:
        """Per layer, experts from hottest to coldest; equal shares in ascending expert order."""
        return [[int(e) for e in np.argsort(-row, kind="stable")] for row in self.probabilities]

    def to_dict(self) -> dict[str, Any]:
        """The profile file's content. `probabilities` are listed in the order of `order`."""
        layers = []
        for index, order in enumerate(self.orderings()):
            layers.append(
                {"moe_layer": index, "order": order, "probabilities": [round(float(self.probabilities[index, e]), 7) for e in order]}
            )
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "identity": self.identity,
            "created": self.created,
            "tokens": self.tokens,
            "top_k": self.top_k,
            "num_moe_layers": len(self.probabilities),
            "num_experts": self.probabilities.shape[1],
            "layers": layers,
        }


def profile_path(directory: Path, identity: str) -> Path:
    """Where the profile of a model with this identity lies below `directory`."""
    return directory / f"{identity[:32]}.json"


def save_profile(profile: HotsetProfile, path: Path) -> None:
    """Write the profile so that a reader sees either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = json.dumps({**profile.to_dict(), "layers": None}, indent=1)[:-2]
    rows = ",\n  ".join(json.dumps(layer) for layer in profile.to_dict()["layers"])
    text = lines.replace('"layers": null', f'"layers": [\n  {rows}\n ]') + "\n}\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_profile(path: Path, *, identity: str, num_layers: int, num_experts: int) -> HotsetProfile:
    """Read and check a profile for the model with this identity.

    Raises:
        NotFoundError: no such file.
        UsageError: not a profile, damaged, of another version, or recorded for another model.
    """
    redo = "Record a new one with: rimuru profile-hotset MODEL"
    try:
        if path.stat().st_size > _MAX_PROFILE_BYTES:
            raise UsageError(f"{path} is too large to be a hotset profile.", hint=redo)
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no hotset profile at {path}.", hint=redo) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as a hotset profile: {error}", hint=redo) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{path} is not a hotset profile.", hint=redo)
    if data.get("version") != VERSION:
        raise UsageError(f"{path} has profile version {data.get('version')!r}; this rimuru reads version {VERSION}.", hint=redo)
    if data.get("identity") != identity:
        name = data.get("model")
        raise UsageError(f"{path} was recorded for another model ({name!r}) and does not fit this one.", hint=redo)
    try:
        probabilities = _read_layers(data["layers"], num_layers, num_experts)
        return HotsetProfile(identity, str(data["model"]), int(data["top_k"]), int(data["tokens"]), str(data["created"]), probabilities)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UsageError(f"{path} is damaged: {error}", hint=redo) from error


def _read_layers(layers: Any, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    if not isinstance(layers, list) or len(layers) != num_layers:
        raise ValueError(f"it does not list {num_layers} layers")
    table = np.zeros((num_layers, num_experts))
    for index, layer in enumerate(layers):
        order, shares = layer["order"], np.asarray(layer["probabilities"], dtype=np.float64)
        if sorted(order) != list(range(num_experts)) or shares.shape != (num_experts,):
            raise ValueError(f"layer {index} does not order {num_experts} experts")
        if not np.isfinite(shares).all() or (shares < 0).any() or not 0.99 < shares.sum() < 1.01:
            raise ValueError(f"the probabilities of layer {index} do not sum to 1")
        table[index, order] = shares / shares.sum()
    return table
