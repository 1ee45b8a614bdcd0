"""What a Ctrl-C, a close or a refusal at an awkward moment leaves behind: nothing."""

from __future__ import annotations

import gc
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines import GREEDY, load_engine

from rimuru_cli.engine import ceiling
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device.staging import HostService
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.sampler import SamplerState
from rimuru_cli.engine.telemetry.publish import Publisher
from rimuru_models.errors import DoesNotFitError


@pytest.mark.parametrize("before", [True, False])
def test_ctrl_c_while_a_token_is_chosen_does_not_change_the_text(qwen3: Path, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(torn: bool) -> list[int]:
        def uniform(state: SamplerState) -> float:
            if before:
                signal.raise_signal(signal.SIGINT)
            drawn = whole(state)
            signal.raise_signal(signal.SIGINT)
            return drawn

        whole = SamplerState.uniform
        with load_engine(qwen3, 0.3, EngineConfig(device="cpu", context=128)) as engine:
            params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, presence_penalty=0.5)
            request = engine.submit([5, 6, 7], params)
            while engine.has_work:
                if torn and len(request.output_ids) == 4:
                    torn = False
                    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                        patch.setattr(SamplerState, "uniform", uniform)
                        engine.step()
                    continue
                engine.step()
            return request.output_ids

    assert answer(True) == answer(False)


def test_a_closed_engine_is_let_go_by_its_publisher(qwen3: Path, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "run", "chat")
    engine = load_engine(qwen3, 0.3, EngineConfig(device="cpu", context=128))
    engine.publish(publisher)
    for _ in engine.generate([5, 6, 7], GREEDY):
        pass
    engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None, "a publisher that somebody still holds keeps the whole pool"


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("cancelled", [False, True])
def test_closing_after_a_chunk_that_gave_no_token(qwen3: Path, steps: int, cancelled: bool) -> None:
    engine = load_engine(qwen3, 0.0, EngineConfig(device="emulated", context=128, device_batch_tokens=24))
    request = engine.submit(list(range(2, 90)), GREEDY)
    for _ in range(steps):
        assert engine.step() == []
    if cancelled:
        engine.cancel(request)
    engine.close()


def test_the_ranking_knows_what_a_streamed_step_chose(qwen3: Path) -> None:
    with load_engine(qwen3, 0.0, EngineConfig(device="emulated", context=128, device_batch_tokens=24)) as engine:
        engine.submit(list(range(2, 90)), GREEDY)
        engine.step()
        parts = engine._parts
        assert parts.experts.streamed_steps > 0, "a step of many rows streams"  # type: ignore[attr-defined]
        parts.residency.settle()
        device = parts.residency.tables.scores.cpu().numpy()  # type: ignore[attr-defined]
        assert (parts.residency._ranking.scores == device).all()


def test_a_refused_ceiling_keeps_no_expert_out(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_engine(qwen3, 0.9, EngineConfig(device="cpu", context=128)) as engine:
        for _ in engine.generate([5, 6, 7], GREEDY):
            pass
        residency, whole = engine._parts.residency, ceiling._make_room
        residency.commit(wait=True)
        before = residency.resident.copy()

        def half(parts: Parts) -> tuple[int, int]:
            whole(parts)
            assert residency.num_resident < before.sum(), "some had to go"
            raise ceiling._scattered()

        monkeypatch.setattr(ceiling, "_make_room", half)
        with pytest.raises(DoesNotFitError, match="scattered"):
            engine.set_memory(engine.least_memory)
        residency.commit(wait=True)
        assert (residency.resident == before).all()
        engine.check_integrity()


def test_the_host_leaves_the_device_what_it_can_exchange() -> None:
    """Two experts are missing that the device can read, and of the two that nobody selected it can give up one."""
    missing, loose, sticky, used = (0, 1), 2, 3, (4, 5)
    entries = torch.tensor([[-1], [-1], [20], [30], [40], [50]], dtype=torch.int32)
    service = object.__new__(HostService)
    service._tables = SimpleNamespace(entries=[entries], scores=[torch.tensor([0.0, 0.0, 0.1, 0.2, 1.0, 1.0])])  # type: ignore[assignment]
    service._host = SimpleNamespace(pinned=[np.array([True, True, True, False, True, True])], brought=0)  # type: ignore[assignment]
    service.staging = SimpleNamespace(expect=list)  # type: ignore[assignment]
    service._exchange = lambda *args: None  # type: ignore[method-assign]
    assert service.bring(0, torch.tensor([missing, used])) is not None
    assert entries.flatten().tolist() == [30, -1, 20, -1, 40, 50]
    assert entries[loose] >= 0 > entries[sticky], "the device gives up only what it can read again"
