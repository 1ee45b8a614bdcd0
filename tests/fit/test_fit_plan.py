"""`rimuru fit` divides memory as the engine does when it really loads the same model with the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from engines import GREEDY, run_all
from quantised import KINDS, write_quantised_checkpoint
from released_shapes import MIXTRAL, OLMOE, QWEN1_5_MOE, QWEN3_30B
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.engine import loading
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.fit import placement as placing
from rimuru_cli.fit.machine import Gpu, Machine
from rimuru_cli.fit.pages import page_facts
from rimuru_cli.fit.placement import Placement, Refusal, place, place_on_cpu, place_on_gpu
from rimuru_cli.fit.shape import shape_of
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.index import open_index
from rimuru_models.layout import dense_bytes, expert_bytes

MIB, GIB = 1 << 20, 1 << 30
PROGRAM = 100 * MIB

FreeMemory = Callable[[int], None]


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[FreeMemory]:
    """Makes the engine see so many bytes of free main memory, and a process of PROGRAM bytes."""
    monkeypatch.setattr(placing, "CPU_PROGRAM_BYTES", PROGRAM)
    monkeypatch.setattr(placing, "CUDA_PROGRAM_BYTES", 0)
    monkeypatch.setattr(loading, "program_bytes", lambda: PROGRAM)

    def give(num_bytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * num_bytes, available=num_bytes))

    yield give


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "qwen3_next", "granitemoehybrid", "int4", "fp8-bf16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in KINDS:
        wide: dict[str, Any] = {"moe_intermediate_size": 128, "hidden_size": 128, "num_experts": 16}
        return write_quantised_checkpoint(tmp_path_factory.mktemp("plan"), "qwen3_moe", KINDS[request.param], **wide)[0]
    more = {"num_local_experts" if request.param in ("mixtral", "granitemoehybrid") else "num_experts": 16}
    return write_tiny_checkpoint(tmp_path_factory.mktemp("plan") / request.param, request.param, dtype=torch.bfloat16, **more)


def loaded_plan(folder: Path, config: EngineConfig) -> object:
    parts = loading.load_parts(folder, config, None)
    plan = parts.plan
    Engine(parts, config).close()
    return plan


def on_cpu(folder: Path, free: int) -> Placement:
    return place_on_cpu(shape_of(ModelConfig.from_dir(folder), open_index(folder)), free)


def on_card(folder: Path, total: int, cap: int | None) -> Placement:
    shape = shape_of(ModelConfig.from_dir(folder), open_index(folder))
    return place_on_gpu(shape, Gpu("card", total, 0, 1.0, 1.0, 1.0, cap), GIB)


@pytest.mark.parametrize("free", [40 * MIB, 8 * GIB])
def test_the_plan_on_a_cpu_is_the_engines(folder: Path, free_memory: FreeMemory, free: int) -> None:
    free_memory(free)
    assert on_cpu(folder, free).plan == loaded_plan(folder, EngineConfig(device="cpu"))


def test_both_refuse_the_same_memory_in_the_same_words(folder: Path, free_memory: FreeMemory) -> None:
    free_memory(MIB)
    with pytest.raises(DoesNotFitError) as ours:
        on_cpu(folder, MIB)
    with pytest.raises(DoesNotFitError) as theirs:
        loaded_plan(folder, EngineConfig(device="cpu"))
    assert (ours.value.what, ours.value.hint) == (theirs.value.what, theirs.value.hint)


@pytest.mark.parametrize("cap", [600 * MIB, None])
def test_the_plan_on_a_card_is_the_engines(folder: Path, free_memory: FreeMemory, cap: int | None) -> None:
    free_memory(2 * GIB)
    assert on_card(folder, 2 * GIB, cap).plan == loaded_plan(folder, EngineConfig(memory_bytes=cap, device="emulated"))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_residents_are_as_many_as_the_engine_has(tmp_path: Path, free_memory: FreeMemory, device: str) -> None:
    # Experts of 288 KiB on a CPU: neither all of them fit nor only the floor.
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", num_layers=3, num_experts=64, moe_intermediate_size=384)
    minimum = (on_cpu(folder, 8 * GIB) if device == "cpu" else on_card(folder, 8 * GIB, None)).plan.minimum
    if device == "cpu":
        free = int((minimum + 20 * MIB - PROGRAM) / 0.7)
        free_memory(free)
        placement, config = on_cpu(folder, free), EngineConfig(device="cpu")
    else:
        free_memory(8 * GIB)
        ceiling = minimum + 2 * MIB  # with room for the loading buffers of a whole layer there is room for most experts
        placement, config = on_card(folder, 8 * GIB, ceiling), EngineConfig(device="emulated", memory_bytes=ceiling)
    residents = placement.residents(0)
    assert residents is not None and 3 * placement.plan.floor < residents < placement.shape.num_experts
    with Engine.load(folder, config) as engine:
        assert engine.snapshot().resident_experts == residents
        request = engine.submit(list(range(1, 101)), GREEDY)
        run_all(engine)
        assert len(request.output_ids) == GREEDY.max_tokens
        assert engine.info.context_limit == placement.plan.context
    assert placement.residents(placement.plan.context + 1) is None
    least = placement.residents(placement.plan.context)
    assert least is not None and 3 * placement.plan.floor <= least <= residents


@pytest.mark.parametrize(
    ("values", "page", "kv_token", "tiles"),
    [
        (QWEN3_30B, 3_145_728, 98_304, 1),
        (QWEN1_5_MOE, 5_767_168, 196_608, 1),
        (OLMOE, 4_194_304, 131_072, 1),
        (MIXTRAL, 117_440_512 // 7, 131_072, 7),
    ],
    ids=["qwen3-30b-a3b", "qwen1.5-moe", "olmoe", "mixtral"],
)
def test_pages_of_released_models(values: dict[str, object], page: int, kv_token: int, tiles: int) -> None:
    facts = page_facts(ModelConfig.from_dict(values), shape_of(ModelConfig.from_dict(values), None).formats)
    assert facts["gpu"]["P_e"] * facts["gpu"]["tiles_per_projection"] == page * tiles
    assert facts["gpu"]["P_h"] == facts["gpu"]["P_e"] <= 16 * MIB
    assert facts["gpu"]["kv_bytes_per_token"] == kv_token
    assert facts["cpu"]["kv_bytes_per_token"] == 2 * kv_token
    assert facts["gpu"]["P_s"] is None and facts["gpu"]["state_bytes_per_sequence"] == 0
    assert facts["gpu"]["expert_bytes"] == 3 * page * tiles == expert_bytes(ModelConfig.from_dict(values), 2)


def test_main_memory_decides_how_many_experts_are_page_locked() -> None:
    shape = shape_of(ModelConfig.from_dict(QWEN3_30B), None)
    card = Gpu("card", 24 * GIB, 0, 1000.0, 100.0, 25.0)
    roomy, tight = (place_on_gpu(shape, card, free * GIB) for free in (128, 32))
    assert roomy.pinned_experts == shape.num_experts and roomy.uncached_share == 0
    assert 0 < tight.pinned_experts < shape.num_experts and 0 < tight.uncached_share < 1
    assert tight.pinned_experts * tight.expert_bytes <= 0.85 * 32 * GIB
    assert place_on_cpu(shape, 128 * GIB).pinned_experts == 0


def test_keys_and_values_at_8_bits_leave_more_for_experts() -> None:
    shape = shape_of(ModelConfig.from_dict(QWEN3_30B), None)
    card = Gpu("card", 24 * GIB, 0, 1000.0, 100.0, 25.0)
    plain, small = place_on_gpu(shape, card, 128 * GIB), place_on_gpu(shape, card, 128 * GIB, "q8")
    assert plain.kv_token_bytes == 48 * 2 * 4 * 128 * 2 and small.kv_token_bytes == 48 * 2 * 4 * (128 + 2)
    more, fewer = small.residents(32768), plain.residents(32768)
    assert more is not None and fewer is not None and more > fewer
    assert place_on_cpu(shape, 128 * GIB, "q8").kv_token_bytes == small.kv_token_bytes


def test_what_others_hold_of_a_card_is_not_ours() -> None:
    shape = shape_of(ModelConfig.from_dict(QWEN3_30B), None)
    empty, busy = (place_on_gpu(shape, Gpu("card", 24 * GIB, used, 1.0, 1.0, 1.0), 64 * GIB) for used in (0, 4 * GIB))
    assert busy.plan.program - empty.plan.program == 4 * GIB
    assert (empty.residents(0) or 0) - (busy.residents(0) or 0) > 300


def machine(gpu: Gpu | None, ram: int) -> Machine:
    return Machine(gpu, None if gpu else "no NVIDIA driver answers here", ram, ram, 15.0, 8)


def test_a_card_that_is_too_small_leaves_it_to_the_cpu_unless_a_ceiling_was_asked_for() -> None:
    shape = shape_of(ModelConfig.from_dict(QWEN3_30B), None)
    found, why = place(shape, machine(Gpu("card", 8 * GIB, 0, 1.0, 1.0, 1.0), 128 * GIB))
    assert isinstance(found, Placement) and found.device == "cpu"
    assert why is not None and "device memory" in why
    found, why = place(shape, machine(Gpu("card", 24 * GIB, 0, 1.0, 1.0, 1.0, 8 * GIB), 128 * GIB))
    assert isinstance(found, Refusal) and why is None
    assert "the ceiling is 8,192 MiB" in found.problem
    assert found.hint is not None and "--vram" in found.hint and "--memory" not in found.hint


def test_nowhere() -> None:
    shape = shape_of(ModelConfig.from_dict(QWEN3_30B), None)
    found, why = place(shape, machine(None, 8 * GIB))
    assert isinstance(found, Refusal) and "needs at least" in found.problem
    assert why == "no NVIDIA driver answers here"


def test_bytes_of_a_token_by_hand() -> None:
    config = ModelConfig.from_dict(QWEN3_30B)
    shape = shape_of(config, None)
    assert shape.read_per_token(2) == dense_bytes(config, 2) - 2 * 151936 * 2048
    attention = 2048 * (2 * 32 + 2 * 4) * 128 + 2 * 128
    layer = attention + 2 * 2048 + 128 * 2048 + 8 * 3 * 768 * 2048
    assert shape.active_parameters == 48 * layer + 2048
    assert shape.stored_bytes == 30_532_122_624 * 2
