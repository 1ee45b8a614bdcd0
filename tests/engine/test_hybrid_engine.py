"""Models with recurrent layers in the pool: the same text as in plain memory, whatever the pool's size and whatever moves at every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import CONTEXT, CeilingMover, adversary, converse, prompts_of
from engines import GREEDY, answer, load_engine, plan_for, resident_tokens, run_all
from hybrids import NAMES, assert_merged, write_hybrid
from tiny_checkpoints import HYBRIDS, write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.memory.geometry import PageKind


@pytest.mark.parametrize(("name", "per_huge"), [("1:1", (1, 1)), ("2:3", (2, 3)), ("1:2", (1, 2)), ("37:48", (37, 48))])
def test_the_geometries_are_those(name: str, per_huge: tuple[int, int], tmp_path: Path) -> None:
    geometry = plan_for(write_hybrid(tmp_path, name)).geometry
    assert (geometry.pages_per_huge(PageKind.EXPERT), geometry.pages_per_huge(PageKind.SSM)) == per_huge


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_every_pool_size_gives_the_resident_text(name: str, share: float, hybrid: Any) -> None:
    folder, said = hybrid(name)
    engine = load_engine(folder, share, EngineConfig(max_batch_tokens=24, context=CONTEXT))
    assert converse(engine) == said
    if share < 0.5:
        assert engine.snapshot().hit_rate < 1.0, "everything was resident, so nothing was tested"
    assert_merged(engine)


@pytest.mark.parametrize("name", NAMES)
def test_random_shrinks_and_expands_at_every_step(name: str, hybrid: Any) -> None:
    folder, said = hybrid(name)
    mode = "streamed" if NAMES.index(name) % 2 else "on_demand"
    config = EngineConfig(max_batch_tokens=24, context=CONTEXT, adjuster=adversary(NAMES.index(name)), moe_mode=mode)  # type: ignore[arg-type]
    engine = load_engine(folder, 0.4, config)
    assert converse(engine) == said
    assert len(engine.snapshot().events) > 5, "the adversary moved nothing"
    assert_merged(engine)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3_next"])
def test_a_ceiling_that_moves_all_the_time(name: str, hybrid: Any) -> None:
    """Experts, keys and states lie at the pool's end now and then, and have to move."""
    folder, said = hybrid(name)
    config = EngineConfig(max_batch_tokens=24, context=CONTEXT, adjuster=adversary(3))
    engine = load_engine(folder, 0.5, config)
    highest = engine.info.memory_bytes - engine.info.pool_bytes + plan_for(folder, config).full_pool
    mover = CeilingMover(engine, seed=5, highest=highest)
    assert converse(engine, each_step=mover) == said
    assert mover.refused and any(change.moved_bytes for change in mover.changes)
    assert_merged(engine)


@pytest.mark.parametrize("name", ["2:3", "granitemoehybrid"])
def test_preempted_sequences_continue_with_the_same_text(name: str, hybrid: Any) -> None:
    """Two sequences that cannot both stay in the smallest pool: one is put back, and resumed from the states it left."""
    folder, _ = hybrid(name)
    engine = load_engine(folder, 0.0, EngineConfig(max_batch_tokens=24, context=128))
    prompts, lengths = prompts_of(), (45, 90)
    requests = [engine.submit(p[:30], replace(GREEDY, max_tokens=n)) for p, n in zip(prompts, lengths, strict=False)]
    run_all(engine)
    for request, prompt, count in zip(requests, prompts, lengths, strict=False):
        assert request.output_ids == resident_tokens(folder, prompt[:30], count)
    assert_merged(engine)


def test_a_sequence_waits_until_there_is_room_for_its_states(hybrid: Any) -> None:
    folder, said = hybrid("1:1")
    engine = load_engine(folder, 0.0, EngineConfig(max_batch_tokens=64, context=CONTEXT))
    requests = [engine.submit(prompts_of()[1], GREEDY) for _ in range(4)]
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most = max(most, sum(sequence.states is not None for sequence in engine._scheduler.running))
    assert 1 <= most < 4
    assert all(request.output_ids == said[1][:20] for request in requests)
    assert_merged(engine)


@pytest.mark.parametrize("torn", ["forward", "sample"])
def test_a_step_that_fails_half_way_costs_states_but_no_text(torn: str, hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers had taken the tokens into their states: computing them again from there would count them twice."""
    folder, said = hybrid("qwen3_5_moe")
    engine = load_engine(folder, 0.5, EngineConfig(max_batch_tokens=24, context=CONTEXT))
    first = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=40))
    second = engine.submit(prompts_of()[1], replace(GREEDY, max_tokens=40))
    steps = 0

    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    while engine.has_work:
        steps += 1
        if steps in (2, 9, 10, 30):
            with monkeypatch.context() as patch:
                if torn == "sample":
                    patch.setattr("rimuru_cli.engine.engine.sample", fail)
                else:
                    # after two recurrent layers have run
                    patch.setattr(type(engine._parts.model.layers[2].mixer), "forward", _fail_in_layer_two(fail))  # type: ignore[attr-defined]
                with suppress(OSError):
                    engine.step()
        else:
            engine.step()
        engine.check_integrity()
    assert first.output_ids == said[0] and second.output_ids == said[1][:40]
    assert engine.snapshot().preemptions >= 4
    assert_merged(engine)


def _fail_in_layer_two(fail: Callable[..., None]) -> Callable[..., torch.Tensor]:
    from rimuru_models.delta_net import GatedDeltaNet

    whole = GatedDeltaNet.forward

    def forward(self: GatedDeltaNet, *args: Any) -> torch.Tensor:
        if self.layer == 2:
            fail()
        return whole(self, *args)

    return forward


@pytest.mark.parametrize("family", HYBRIDS)
def test_half_precision_checkpoints_are_computed_in_float32(family: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16, layout="fused")
    engine = load_engine(folder, 0.2, EngineConfig(adjuster=adversary(3), context=CONTEXT))
    assert answer(engine, prompts_of()[0]).output_ids == resident_tokens(folder, prompts_of()[0], 20)
    assert_merged(engine)


def test_what_is_told_about_the_model(hybrid: Any) -> None:
    engine = load_engine(hybrid("qwen3_5_moe")[0])
    assert "Of this checkpoint, the part that reads images (2 tensors) is not used." in engine.info.notices
    assert engine.info.architecture == "Qwen3_5MoeForConditionalGeneration"
    request = engine.submit(prompts_of()[1], GREEDY)
    engine.step()
    kinds = engine.snapshot().bytes_by_kind
    mixer = engine._parts.model.config.recurrent
    assert mixer is not None and kinds["ssm"] >= 3 * mixer.state_bytes and kinds["conv"] >= 3 * 3 * mixer.conv_row_bytes(4)
    engine.cancel(request)
    assert_merged(engine)
