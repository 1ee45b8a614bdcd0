"""Main memory that is too small for all experts: the device's way still gives the right text, and says what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elastic import CONTEXT, CeilingMover, adversary, converse, prompts_of
from engines import GREEDY, answer, assert_all_free, load_engine, resident_tokens, run_all
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device import pinned_host
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.locking import NoLocker
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.adjuster import hold
from rimuru_models.errors import UsageError

DEVICES = ["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])]


@pytest.fixture(params=DEVICES)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig(device=request.param, context=CONTEXT, device_batch_tokens=24)


def experts_of(engine: Engine) -> DeviceExperts:
    experts = engine._parts.experts
    assert isinstance(experts, DeviceExperts)
    return experts


def _experts_bytes(folder: Path, config: EngineConfig) -> int:
    with load_engine(folder, 0.0, config) as engine:
        assert engine.info.mapped_bytes == 0 and engine.snapshot().host_brought == 0
        return engine.info.pinned_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pinned", [0.0, 0.4, 0.9])
def test_any_share_gives_the_resident_text(
    family: str, pinned: float, config: EngineConfig, checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    folder = checkpoints[family]
    whole = _experts_bytes(folder, config)
    engine = load_engine(folder, 0.3, replace(config, pinned_bytes=int(pinned * whole), adjuster=adversary(1)))
    assert engine.info.pinned_bytes <= pinned * whole
    assert engine.info.mapped_bytes >= (1 - pinned) * 0.99 * whole
    assert any("stay on disk" in notice for notice in engine.info.notices)
    assert converse(engine) == expected[family]
    snapshot = engine.snapshot()
    assert (snapshot.pinned_bytes, snapshot.mapped_bytes) == (engine.info.pinned_bytes, engine.info.mapped_bytes)
    assert snapshot.host_brought > 0, "the host brought nothing, so nothing was tested"
    assert_all_free(engine)


@pytest.mark.parametrize("seed", [0, 1])
def test_together_with_a_ceiling_that_moves(seed: int, config: EngineConfig, qwen3: Path, expected: dict[str, list[list[int]]]) -> None:
    whole = _experts_bytes(qwen3, config)
    engine = load_engine(qwen3, 0.6, replace(config, pinned_bytes=whole // 2, adjuster=adversary(seed)))
    mover = CeilingMover(engine, seed, highest=engine.info.memory_bytes + engine.info.pool_bytes // 2, share=0.3)
    assert converse(engine, each_step=mover) == expected["qwen3_moe"]
    assert mover.changes
    engine.close()
    engine.check_integrity()


def test_steps_that_lack_nothing_need_no_host(qwen3: Path, config: EngineConfig) -> None:
    """With every expert resident, it does not matter where they came from."""
    engine = load_engine(qwen3, 1.0, replace(config, pinned_bytes=0))
    request = answer(engine, prompts_of()[0])
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 20)
    assert engine.snapshot().host_brought == 0
    assert_all_free(engine)


def test_brought_experts_are_counted_as_misses(qwen3: Path, config: EngineConfig) -> None:
    engine = load_engine(qwen3, 0.0, replace(config, pinned_bytes=0))
    request = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=12))
    while not request.output_ids:
        engine.step()
    before = engine.snapshot()
    run_all(engine)
    after = engine.snapshot()
    uses, hits = after.expert_uses - before.expert_uses, after.expert_hits - before.expert_hits
    assert uses == 11 * engine.info.num_moe_layers * engine.info.top_k
    assert uses - hits == after.host_brought - before.host_brought > 0
    assert request.expert_hits == after.expert_hits


def test_what_the_driver_refuses_stays_on_disk(qwen3: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    if config.device == "cuda":
        pytest.skip("a driver cannot be made to refuse")
    locker = NoLocker(limit=_experts_bytes(qwen3, config) // 2)
    monkeypatch.setattr(pinned_host, "locker_for", lambda device: locker)
    monkeypatch.setattr(pinned_host, "_SMALLEST_PIECE", 4096)
    engine = load_engine(qwen3, 0.3, config)
    assert 0 < engine.info.pinned_bytes <= locker._limit  # type: ignore[operator]
    assert any("the driver page-locks no more" in notice for notice in engine.info.notices)
    request = answer(engine, prompts_of()[0])
    assert request.output_ids == resident_tokens(qwen3, prompts_of()[0], 20)
    engine.close()
    assert not locker.locked, "page-locked memory was left behind"


def test_little_main_memory_is_no_reason_to_refuse(qwen3: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rimuru_cli.engine.device.loading.pinned_budget", lambda available: 0)
    with load_engine(qwen3, 0.0, config) as engine:
        assert engine.info.pinned_bytes == 0
        assert any("main memory has no room" in notice for notice in engine.info.notices)


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="pinned_bytes"):
        EngineConfig(pinned_bytes=-1)


def test_a_file_that_shrinks_in_mid_answer_is_said(tmp_path: Path, config: EngineConfig) -> None:
    from rimuru_models.errors import CheckpointError

    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")
    engine = load_engine(folder, 0.0, replace(config, pinned_bytes=0))
    request = engine.submit(prompts_of()[1], replace(GREEDY, max_tokens=40))
    while not request.output_ids:
        engine.step()
    weights = next(folder.glob("*.safetensors"))
    size = weights.stat().st_size
    kept = weights.read_bytes()
    with weights.open("r+b") as file:
        file.truncate(1024)
    with pytest.raises(CheckpointError, match="shrank"):
        run_all(engine)
    weights.write_bytes(kept)
    assert weights.stat().st_size == size
    run_all(engine)  # a step that failed can be tried again
    assert request.output_ids == resident_tokens(folder, prompts_of()[1], 40)
    assert isinstance(engine, Engine)
    assert_all_free(engine)


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("what", ["a read", "a copy"])
def test_a_served_step_that_is_torn_can_be_tried_again(
    what: str, nth: int, tmp_path: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that were read ahead for it are forgotten, and nothing that is resident has another's bytes."""
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", num_experts=16, num_experts_per_tok=6)
    engine = load_engine(folder, 0.0, replace(config, pinned_bytes=0, adjuster=hold))
    request = engine.submit(prompts_of()[1], replace(GREEDY, max_tokens=40))
    while len(request.output_ids) < 2:
        engine.step()
    staging, pool = experts_of(engine)._staging, engine._parts.pool
    assert staging is not None
    pages = SimpleNamespace(data=pool.data, bytes_of=pool.bytes_of)
    monkeypatch.setattr(staging, "_pool", pages)
    owner, name = (engine._parts.host, "read") if what == "a read" else (pages, "bytes_of")
    whole, calls = getattr(owner, name), []

    def torn(*args: object) -> object:
        calls.append(args)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return whole(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, torn)
        while engine.has_work:
            engine.step()
    engine.check_integrity()
    run_all(engine)
    assert request.output_ids == resident_tokens(folder, prompts_of()[1], 40)
    assert_all_free(engine)
