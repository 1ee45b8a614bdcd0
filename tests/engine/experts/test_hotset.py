"""Hotset profiles: a readable file that fits one model and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rimuru_cli.engine.experts.hotset import HotsetProfile, load_profile, profile_path, save_profile
from rimuru_models.errors import NotFoundError, UsageError

IDENTITY = "ab" * 32


def _profile() -> HotsetProfile:
    probabilities = np.array([[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]])
    return HotsetProfile(IDENTITY, "org/model", 2, 123, "2026-11-30T12:00:00+00:00", probabilities)


def _load(path: Path, identity: str = IDENTITY, layers: int = 2, experts: int = 4) -> HotsetProfile:
    return load_profile(path, identity=identity, num_layers=layers, num_experts=experts)


def test_round_trip(tmp_path: Path) -> None:
    path = profile_path(tmp_path / "profiles", IDENTITY)
    save_profile(_profile(), path)
    loaded = _load(path)
    np.testing.assert_allclose(loaded.probabilities, _profile().probabilities, atol=1e-6)
    assert (loaded.identity, loaded.model, loaded.top_k, loaded.tokens) == (IDENTITY, "org/model", 2, 123)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_file_is_for_people_too(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(_profile(), path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["format"] == "rimuru-hotset" and data["version"] == 1
    assert data["layers"][0] == {"moe_layer": 0, "order": [1, 2, 0, 3], "probabilities": [0.6, 0.3, 0.1, 0.0]}
    # One layer a line, so that two profiles can be compared line by line.
    assert sum('"moe_layer"' in line for line in path.read_text(encoding="utf-8").splitlines()) == 2


def test_orderings_are_stable_among_equals() -> None:
    assert _profile().orderings() == [[1, 2, 0, 3], [0, 1, 2, 3]]


def test_another_models_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(_profile(), path)
    with pytest.raises(UsageError, match="recorded for another model") as caught:
        _load(path, identity="cd" * 32)
    assert "org/model" in caught.value.what and "profile-hotset" in (caught.value.hint or "")


def test_a_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no hotset profile"):
        _load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "not a hotset profile"),
        ({"version": 2}, "version 2"),
        ({"layers": []}, "damaged"),
        ({"layers": None}, "damaged"),
        ({"layers": [{}, {}]}, "damaged"),
        ({"layers": [{"order": [0, 1, 2, 2], "probabilities": [0.25] * 4}] * 2}, "does not order"),
        ({"layers": [{"order": [0, 1, 2, 9], "probabilities": [0.25] * 4}] * 2}, "does not order"),
        ({"layers": [{"order": [0, 1, 2, 3], "probabilities": [0.25] * 3}] * 2}, "does not order"),
        ({"layers": [{"order": [0, 1, 2, 3], "probabilities": [0.5] * 4}] * 2}, "sum to 1"),
        ({"layers": [{"order": [0, 1, 2, 3], "probabilities": [2.0, -1.0, 0.0, 0.0]}] * 2}, "sum to 1"),
        ({"layers": [{"order": [0, 1, 2, 3], "probabilities": ["x", 0, 0, 1]}] * 2}, "damaged"),
        ({"tokens": "many"}, "damaged"),
        ({"tokens": None}, "damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**_profile().to_dict(), **change}), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        _load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_files_that_are_no_profile_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        _load(path)


def test_a_profile_of_other_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(_profile(), path)
    with pytest.raises(UsageError, match="3 layers"):
        _load(path, layers=3)
    with pytest.raises(UsageError, match="5 experts"):
        _load(path, experts=5)
