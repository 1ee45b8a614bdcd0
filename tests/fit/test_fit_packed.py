"""Estimates for packed experts beside what was measured (docs/results: quantised)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rimuru_cli.bench.packed import QUANTS
from rimuru_cli.bench.synthetic import SyntheticReader
from rimuru_cli.commands._library import _page_table
from rimuru_cli.fit.machine import Gpu, Machine
from rimuru_cli.fit.pages import page_facts
from rimuru_cli.fit.placement import Placement, place_on_cpu, place_on_gpu
from rimuru_cli.fit.shape import ModelShape, shape_of
from rimuru_cli.fit.speed import decode_range, prompt_range
from rimuru_models.errors import DoesNotFitError
from rimuru_models.layout import num_parameters

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 143_771 << 20, 0, 4300 * 0.93, 800.0, 54.4)
HOST = Machine(H200, None, 192 * GIB, 160 * GIB, 74.0, 16)


def shape(quant: str, dense: str | None, top_k: int) -> ModelShape:
    reader = SyntheticReader("qwen3-30b-a3b", top_k=top_k, quant=quant, dense=dense)
    return ModelShape(reader.config, reader.formats, num_parameters(reader.config), True)


def placed(quant: str, dense: str | None, cap: float | None, top_k: int) -> tuple[Placement, Machine]:
    gpu = replace(H200, cap_bytes=None if cap is None else int(cap * GIB))
    return place_on_gpu(shape(quant, dense, top_k), gpu, HOST.ram_free_bytes), replace(HOST, gpu=gpu)


@pytest.mark.parametrize(
    ("quant", "dense", "cap", "share", "measured"),
    [
        ("int4", "int8", 6.5, 0.226, 180.9),
        ("int4", "int8", 8, 0.308, 231.9),
        ("int4", "int8", 10, 0.440, 298.1),
        ("int4", "int8", None, 1.0, 391.8),
        ("int4", None, 6.5, 0.131, 125.1),
        ("int8", "int8", 16, 0.442, 239.0),
        ("fp8", "fp8", 16, 0.472, 258.9),
    ],
)
def test_generation(quant: str, dense: str | None, cap: float | None, share: float, measured: float) -> None:
    """Engines that ran earlier in the process had left memory with the driver, so all but the first row had fewer residents."""
    placement, machine = placed(quant, dense, cap, 6)
    residents = placement.residents(0)
    assert residents is not None and residents / placement.shape.num_experts == pytest.approx(share, abs=0.022)
    rates = decode_range(placement, machine, context=100)
    assert rates is not None and rates.high == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("quant", "dense", "cap", "measured"),
    [
        ("int4", "int8", 6.5, 15818),
        ("int4", "int8", 8, 17943),
        ("int4", "int8", 10, 21911),
        ("int8", "int8", 16, 12068),
        ("fp8", "fp8", 16, 13047),
    ],
)
def test_prompts(quant: str, dense: str, cap: float, measured: float) -> None:
    rates = prompt_range(*placed(quant, dense, cap, 8), tokens=4096)
    assert rates is not None and rates.high == pytest.approx(measured, rel=0.25)


def test_what_a_32_gb_machine_can_hold() -> None:
    """Most experts at 4 bits stay resident in main memory; with float32 pages not even the fewest of bfloat16 ones fit."""
    model = shape("int4", None, 8)
    packed = place_on_cpu(model, 28 * GIB)
    residents = packed.residents(100)
    assert residents is not None and residents > 0.75 * model.num_experts
    assert packed.expert_bytes == packed.plan.experts.expert_bytes < 3 * 768 * 2048
    with pytest.raises(DoesNotFitError):
        place_on_cpu(shape_of(model.config, None), 28 * GIB)


def test_bytes_of_an_expert_are_the_pages_of_the_plan() -> None:
    for quant in QUANTS:
        placement, _ = placed(quant, None, 16, 8)
        assert (
            placement.expert_bytes
            == placement.shape.stored_expert_bytes
            == (placement.plan.geometry.pages_per_expert * placement.plan.geometry.expert_page_bytes)
        )


def test_row_tiles_of_mixed_formats_are_shown() -> None:
    mixed, alike = (shape(quant, None, 8) for quant in ("q4_k_m", "q4_k"))
    facts = page_facts(mixed.config, mixed.formats)
    assert facts["gpu"]["layer_tiles"] == [{"gate": 2, "up": 2, "down": 3}] * 48
    assert facts["gpu"]["expert_bytes"] == 7 * facts["gpu"]["P_e"] and facts["gpu"]["tiles_per_projection"] == 3
    words = _page_table({"pages": facts, "precision": "Q4_K and Q6_K"})
    assert "tiles of gate, up, down" in words and "2, 2, 3" in words
    plain = page_facts(alike.config, alike.formats)
    assert plain["gpu"]["layer_tiles"] is None
    assert "tiles of a projection" in _page_table({"pages": plain, "precision": "Q4_K"})
