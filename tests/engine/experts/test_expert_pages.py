"""How experts lie in pages: sizes follow from formats, and plans, host tier and readers agree about them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rimuru_cli.bench.packed import QUANTS
from rimuru_cli.bench.synthetic import SHAPES
from rimuru_cli.engine.config import EngineConfig, page_geometry, plan_memory
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.experts import pages as pages_module
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.experts.planes import in_planes, plane_parts
from rimuru_cli.engine.experts.tiling import LayerTiles
from rimuru_cli.engine.memory.geometry import MAX_PAGE_BYTES
from rimuru_cli.fit.shape import ASSUMED
from rimuru_kernels.packed_weights import PackedFormat, page_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.layout import dense_bytes, dense_shapes
from rimuru_models.quantization.formats import LayerFormats, WeightFormats

QWEN = ModelConfig.from_dict(SHAPES["qwen3-30b-a3b"], where="test")
GIB = 1 << 30


def _formats(*layers: LayerFormats | None) -> WeightFormats:
    kinds = {layer: layers[layer % len(layers)] for layer in QWEN.moe_layers}
    return WeightFormats(kinds, {}, "BF16", "BF16")


def test_pages_of_a_real_shape() -> None:
    """Q4_0's 4.5 bits a weight, Q4_K's with its codes of 6 bits in bytes, MXFP4's 4.25 and FP8's 8 in blocks, of 768 x 2048 weights."""
    weights = 768 * 2048
    for name, size in (("int4", 0.5625), ("q4_k", 0.578125), ("mxfp4", 0.53125), ("nvfp4", 0.5625), ("int8", 1.0625), ("fp8", 1.0)):
        pages = ExpertPages.build(QWEN, 2, _formats(QUANTS[name]).experts, MAX_PAGE_BYTES)
        assert pages.page_bytes % 256 == 0 and 0 <= pages.page_bytes - size * weights <= 512
        assert pages.expert_bytes == 3 * pages.page_bytes and pages.packed
        assert pages.content_bytes <= 48 * pages.expert_bytes < 1.001 * pages.content_bytes


def test_plain_experts_lie_as_before() -> None:
    pages = ExpertPages.build(QWEN, 2, _formats(None).experts, MAX_PAGE_BYTES)
    assert pages == ExpertPages.build(QWEN, 2, None, MAX_PAGE_BYTES)
    assert not pages.packed and pages.page_bytes == 768 * 2048 * 2


def test_larger_formats_have_more_tiles() -> None:
    pages = ExpertPages.build(QWEN, 2, _formats(QUANTS["int4"], QUANTS["q4_k_m"]).experts, MAX_PAGE_BYTES)
    assert set(pages.layer_tiles) == {(2, 2), (2, 3)} and pages.layer_pages[:2] == (6, 7) and not pages.alike
    largest = page_bytes(QUANTS["q4_k"].gate_up, 384, 2048)
    assert largest <= pages.page_bytes == 14 * 16 * 2048  # 16 tokens of this model's cache, of 2048 bytes a layer
    assert pages.tile_bytes(0, 2) < pages.tile_bytes(1, 2) == page_bytes(QUANTS["q4_k_m"].down, 704, 768) <= largest
    assert pages.tile_heights(1, 2) == (704, 704, 640) and pages.tile_heights(1, 0) == (384, 384)
    assert pages.format(0, 2) == QUANTS["int4"].down and pages.format(1, 0) == QUANTS["q4_k_m"].gate_up
    assert pages.pages_of(96) == 48 * 13 and pages.pages_per_expert == 7
    assert pages.expert_bytes * 2 == 13 * pages.page_bytes
    gate, up, down = pages.split(1, range(9))
    assert (gate, up, down) == ([0, 1], [2, 3], [4, 5, 6])


def test_tiles_hold_whole_groups_of_rows() -> None:
    """Blocks of 128 rows share a scale, so tiles of 192 rows would tear some apart."""
    experts = _formats(QUANTS["fp8"]).experts
    pages = ExpertPages.build(QWEN, 2, experts, 800_000)
    assert pages.page_bytes <= 800_000 and pages.tiles == 2
    with pytest.raises(DoesNotFitError, match="row tiles"):
        ExpertPages.build(QWEN, 2, experts, 700_000)


@pytest.mark.parametrize("names", list(itertools.combinations(QUANTS, 2)), ids=str)
def test_plans_use_these_pages(names: tuple[str, str]) -> None:
    formats = _formats(*(QUANTS[name] for name in names))
    geometry, _ = page_geometry(QWEN, 2, EngineConfig(), formats)
    plan = plan_device_memory(QWEN, ASSUMED, EngineConfig(memory_bytes=24 * GIB), program=0, free=0, max_batch_tokens=4096, formats=formats)
    assert plan.experts.page_bytes == plan.geometry.expert_page_bytes == geometry.expert_page_bytes
    assert plan.geometry.pages_per_expert == plan.experts.pages_per_expert
    assert plan.minimum < plan_device_memory(QWEN, ASSUMED, EngineConfig(), program=0, free=80 * GIB, max_batch_tokens=4096).minimum


def test_packed_dense_matrices_leave_room_for_experts() -> None:
    fmt = QUANTS["int8"].gate_up
    matrices = {name: fmt for name, shape in dense_shapes(QWEN).items() if len(shape) == 2}
    kept = dense_bytes(QWEN, 2, matrices)
    routers = sum(
        rows * columns for name, (rows, columns) in ((n, s) for n, s in dense_shapes(QWEN).items() if n.endswith("mlp.gate.weight"))
    )
    whole = sum(rows * columns for rows, columns in (s for s in dense_shapes(QWEN).values() if len(s) == 2)) - routers
    assert abs(dense_bytes(QWEN, 2) - kept - whole * (2 - 34 / 32)) < 0.001 * kept
    formats = WeightFormats(_formats(QUANTS["int4"]).experts, matrices, "BF16", "BF16")
    plans = [
        plan_device_memory(QWEN, ASSUMED, EngineConfig(memory_bytes=8 * GIB), program=0, free=0, max_batch_tokens=512, formats=given)
        for given in (_formats(QUANTS["int4"]), formats)
    ]
    assert plans[1].dense == kept and plans[1].pool > plans[0].pool + GIB


def test_a_cpu_holds_seven_times_the_experts() -> None:
    plain, packed = (
        plan_memory(QWEN, EngineConfig(), 0, available=30 * GIB, formats=formats) for formats in (None, _formats(QUANTS["int4"]))
    )
    assert plain.experts.expert_bytes > 6 * packed.experts.expert_bytes
    assert packed.floor_pages * packed.geometry.expert_page_bytes * 5 < plain.floor_pages * plain.geometry.expert_page_bytes


def test_what_can_be_planes() -> None:
    assert all(in_planes(fmt) for fmt in (QUANTS["int4"].gate_up, QUANTS["q4_k"].gate_up, PackedFormat("int4", 0, "f32", bias=8)))
    assert not any(in_planes(QUANTS[name].gate_up) for name in ("fp8", "nvfp4", "mxfp4", "int8"))
    parts = plane_parts(PackedFormat("int4", 128, "f16"), 50, 200)
    assert (parts.rows, parts.columns, parts.group) == (64, 256, 128)
    assert parts.scales == 64 * 128 and parts.num_bytes == 64 * 128 + 2 * 64 * 4


def test_a_cpu_page_is_counted_as_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of 4 bits and a scale and a zero of two bytes each for 32; two bytes a weight where numbers are made of codes."""
    weights = 768 * 2048
    monkeypatch.setattr(pages_module, "has_product", lambda: True)
    for name, size in (("int4", 0.625), ("q4_k", 0.625), ("int8", 2), ("fp8", 2), ("mxfp4", 2), ("nvfp4", 2)):
        pages = ExpertPages.build(QWEN, 4, _formats(QUANTS[name]).experts, MAX_PAGE_BYTES, cpu=True)
        assert 0 <= pages.page_bytes - size * weights < 256, name
    monkeypatch.setattr(pages_module, "has_product", lambda: False)
    pages = ExpertPages.build(QWEN, 4, _formats(QUANTS["int4"]).experts, MAX_PAGE_BYTES, cpu=True)
    assert pages.page_bytes == 2 * weights and pages.lying(0, 0) == "numbers"
    small = replace(pages, f=48, d=576)
    assert small.lying(0, 2) == "packed", "of small matrices codes are kept"


@pytest.mark.parametrize(
    ("fmt", "f", "lying"),
    [
        (QUANTS["int4"].gate_up, 32, "packed"),
        (QUANTS["int4"].gate_up, 64, "planes"),
        (PackedFormat("int4", 16, "bf16", bias=8), 64, "planes"),
        (PackedFormat("int4", 16, "bf16", bias=8), 256, "numbers"),
        (QUANTS["q4_k"].gate_up, 64, "packed"),
        (QUANTS["q4_k"].gate_up, 192, "numbers"),
        (QUANTS["q4_k"].gate_up, 512, "planes"),
        (QUANTS["int8"].gate_up, 64, "packed"),
        (QUANTS["int8"].gate_up, 192, "numbers"),
    ],
)
def test_format_and_size_say_how_a_matrix_lies(fmt: PackedFormat, f: int, lying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "has_product", lambda: True)
    pages = ExpertPages(f, 512, 4, (LayerFormats(fmt, fmt),), (LayerTiles(1, 1),), 0, cpu=True)
    assert pages.lying(0, 0) == pages.lying(0, 2) == lying
    assert pages.rewritten == (lying != "packed")
    assert replace(pages, cpu=False).lying(0, 0) == "packed"
