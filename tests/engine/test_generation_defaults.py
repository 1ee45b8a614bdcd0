from __future__ import annotations

import json
from pathlib import Path

import pytest

from rimuru_cli.engine.generation_defaults import load_generation_defaults, merge_sampling
from rimuru_cli.engine.request import SamplingParams
from rimuru_models.errors import UsageError


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_values(tmp_path: Path) -> None:
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05}
    values, notices = load_generation_defaults(write(tmp_path, {**wanted, "do_sample": True, "eos_token_id": 2, "pad_token_id": None}))
    assert values == wanted
    assert notices == ()


def test_no_sampling_is_greedy(tmp_path: Path) -> None:
    values, _ = load_generation_defaults(write(tmp_path, {"do_sample": False, "temperature": 0.6, "top_p": 1}))
    assert values == {"temperature": 0.0, "top_p": 1.0}


def test_missing_and_null(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == ({}, ())
    assert load_generation_defaults(write(tmp_path, {"temperature": None, "top_k": None})) == ({}, ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", -1),
        ("top_p", 3),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
    ],
)
def test_junk_is_ignored_with_a_notice(tmp_path: Path, name: str, value: object) -> None:
    values, notices = load_generation_defaults(write(tmp_path, {name: value, "top_k" if name != "top_k" else "top_p": 1}))
    assert name not in values
    assert len(values) == 1
    assert len(notices) == 1 and name in notices[0]


def test_broken_file_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    values, notices = load_generation_defaults(tmp_path)
    assert values == {}
    assert "generation_config.json" in notices[0]


def test_user_wins(tmp_path: Path) -> None:
    values, _ = load_generation_defaults(write(tmp_path, {"do_sample": False, "top_k": 20}))
    params = merge_sampling(values, {"temperature": 0.5, "top_p": None, "stop": ("x",), "seed": 0})
    assert params == SamplingParams(temperature=0.5, top_k=20, stop=("x",), seed=0)
    with pytest.raises(UsageError, match="temperature"):
        merge_sampling(values, {"temperature": -1.0})
