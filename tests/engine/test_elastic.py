"""The contract: elastic changes never change the text, whatever the pool's size and whatever moves at every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import CONTEXT, adversary, converse, prompts_of
from engines import GREEDY, assert_all_free, load_engine, resident_tokens, run_all
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.experts.adjuster import AdjusterStats, Decision

SHARES = (1.0, 0.6, 0.3, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", SHARES)
def test_every_pool_size_gives_the_resident_text(
    family: str, share: float, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    engine = load_engine(checkpoints[family], share, EngineConfig(max_batch_tokens=24, context=CONTEXT))
    assert converse(engine) == expected[family]
    if share < 0.6:
        assert engine.snapshot().hit_rate < 1.0, "everything was resident, so nothing was tested"
    assert_all_free(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", ["streamed", "on_demand"])
def test_random_shrinks_and_expands_at_every_step(
    family: str, seed: int, mode: str, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    config = EngineConfig(max_batch_tokens=24, context=CONTEXT, adjuster=adversary(seed), moe_mode=mode)  # type: ignore[arg-type]
    engine = load_engine(checkpoints[family], 0.4, config)
    assert converse(engine) == expected[family]
    assert len(engine.snapshot().events) > 5, "the adversary moved nothing"
    if mode == "streamed":
        assert engine.snapshot().expert_bytes_read > 0
    assert_all_free(engine)


def test_preempted_sequences_continue_with_the_same_text(qwen3: Path, expected: dict[str, list[list[int]]]) -> None:
    """Two sequences that cannot both stay in the smallest pool: one is put back and computed again."""
    config = EngineConfig(max_batch_tokens=24, context=128)
    engine = load_engine(qwen3, 0.0, config)
    prompts, lengths = prompts_of(), (45, 90)
    requests = [engine.submit(p[:30], replace(GREEDY, max_tokens=n)) for p, n in zip(prompts, lengths, strict=False)]
    run_all(engine)
    assert engine.snapshot().preemptions > 0, "the pool was large enough for both, so nothing was tested"
    for request, prompt, count in zip(requests, prompts, lengths, strict=False):
        assert request.output_ids == resident_tokens(qwen3, prompt[:30], count)
    assert_all_free(engine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "half", "qwen3_moe", dtype=dtype, layout="fused")
    expected = resident_tokens(folder, prompts_of()[0], 20)
    for share in (1.0, 0.2):
        engine = load_engine(folder, share, EngineConfig(adjuster=adversary(3), context=CONTEXT))
        request = engine.submit(prompts_of()[0], GREEDY)
        run_all(engine)
        assert request.output_ids == expected
        assert_all_free(engine)


def test_tiled_projections_give_the_same_text(qwen3: Path, expected: dict[str, list[list[int]]]) -> None:
    """Projections above the page limit are cut into row tiles, as Mixtral's are."""
    for share in (1.0, 0.3, 0.0):
        engine = load_engine(qwen3, share, EngineConfig(max_page_bytes=6400, adjuster=adversary(5), context=CONTEXT))
        assert engine.info.page_bytes <= 6400
        assert converse(engine) == expected["qwen3_moe"]
        assert_all_free(engine)


@pytest.mark.parametrize("wrong", [Decision(1, 10**9, "steady"), Decision(-5, -5, "steady"), Decision(10**9, -1, "steady")])
def test_a_policy_that_breaks_its_contract_cannot_hang_the_engine_or_change_the_text(
    wrong: Decision, qwen3: Path, expected: dict[str, list[list[int]]]
) -> None:
    """Admitting in the same breath what is retired for a sequence would go on for ever."""
    consulted = 0

    def decide(stats: AdjusterStats) -> Decision:
        nonlocal consulted
        consulted += 1
        assert consulted < 2000, "the engine asks for ever"
        return wrong

    engine = load_engine(qwen3, 0.3, EngineConfig(max_batch_tokens=24, context=CONTEXT, adjuster=decide))
    assert converse(engine) == expected["qwen3_moe"]
    assert_all_free(engine)


def test_negative_decisions_move_nothing(qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.5, EngineConfig(context=CONTEXT, adjuster=lambda stats: Decision(-1, -1, "steady")))
    engine.submit([1, 2, 3], GREEDY)
    run_all(engine)
    assert engine.snapshot().events == ()
