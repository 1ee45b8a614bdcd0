"""Recording a hotset profile with a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engines import load_engine
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.hotset import load_profile
from rimuru_cli.engine.experts.profiling import profile_hotset, record_routing
from rimuru_models.errors import UsageError
from rimuru_models.index import model_identity

PROMPTS = [[(i * j) % 128 for i in range(1, 12)] for j in range(1, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("profiling") / "m", "qwen3_moe")


def test_every_token_of_prompt_and_answer_is_recorded(folder: Path) -> None:
    engine = load_engine(folder)
    engine.eos_ids = frozenset()
    trace = record_routing(engine, PROMPTS[0], 5)
    assert trace.experts.shape == (len(PROMPTS[0]) + 4, 4, 3)
    assert (np.diff(trace.experts, axis=2) > 0).all(), "experts of a token are listed in ascending order"
    np.testing.assert_allclose(trace.weights.sum(axis=2), 1.0, rtol=1e-5)
    again = record_routing(engine, PROMPTS[0], 5)
    assert again.tokens == trace.tokens, "nothing may be reused from the first recording"


def test_a_profile_is_written_tested_and_seeds_the_next_engine(folder: Path, tmp_path: Path) -> None:
    engine, file = load_engine(folder), tmp_path / "profile.json"
    seen: list[tuple[str, int, int]] = []
    identity = model_identity(folder)
    report = profile_hotset(engine, PROMPTS, identity=identity, output=file, generate_tokens=4, progress=lambda *args: seen.append(args))
    assert seen[-1][1] == seen[-1][2] and {stage for stage, _, _ in seen} == {"routing", "held-out coverage"}
    rows = report.to_dict()["coverage"]
    assert [row["share"] for row in rows] == [0.1, 0.25, 0.4, 0.5]
    for row in rows:
        assert row["uniform"] == pytest.approx(row["share"], abs=0.02)
        assert max(row["profile"], row["live"], row["lru"]) <= row["oracle"] + 1e-9
    assert report.profile_tokens > 0 < report.held_out_tokens
    json.dumps(report.to_dict())
    loaded = load_profile(file, identity=identity, num_layers=4, num_experts=8)
    seeded = Engine.load(folder, EngineConfig(resident_share=0.5, profile=file))
    hottest = {(layer, order[0]) for layer, order in enumerate(loaded.orderings())}
    resident = {(int(layer), int(e)) for layer, e in zip(*seeded._parts.residency.resident.nonzero(), strict=True)}
    assert hottest <= resident
    assert seeded.info.profile == str(file)


def test_a_profile_of_another_model_does_not_load(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile_hotset(load_engine(folder), PROMPTS, identity=model_identity(folder), output=file, generate_tokens=0)
    other = write_tiny_checkpoint(tmp_path / "other", "qwen3_moe", num_layers=3)
    with pytest.raises(UsageError, match="another model"):
        Engine.load(other, EngineConfig(profile=file))


@pytest.mark.parametrize(("prompts", "split"), [([], 0.5), (PROMPTS[:1], 0.5), (PROMPTS, 0.0), (PROMPTS, 1.0), ([[], [1, 2]], 0.5)])
def test_parts_that_would_be_empty(folder: Path, tmp_path: Path, prompts: list[list[int]], split: float) -> None:
    with pytest.raises(UsageError, match="cannot be divided"):
        profile_hotset(load_engine(folder), prompts, identity="x", output=tmp_path / "p.json", split=split)
    assert not (tmp_path / "p.json").exists()
