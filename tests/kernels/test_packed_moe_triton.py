"""The MoE kernels over packed weights against float64, every format: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from packed_moe import FORMATS, PackedLayer
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, relative_error

from rimuru_kernels.expert_fetch import FetchPlan
from rimuru_kernels.fused_moe import packed_launch, paged_moe
from rimuru_kernels.fused_moe.packed_configs import DirectConfig, PackedGemmConfig, PackedPlan, PackedRowsConfig, choose_plan
from rimuru_kernels.packed_weights import PackedFormat

ROWS = PackedPlan((PackedRowsConfig(4, 1, 2, 1), PackedRowsConfig(2, 2, 4, 2)), None)
SORTED = PackedPlan(None, (PackedGemmConfig(16, 32, 64, 2, 2, 4, 2), PackedGemmConfig(16, 32, 32, 1, 2, 4, 2)))
SWAPPED = PackedPlan(None, (PackedGemmConfig(32, 16, 32, 1, 2, 4, 2, True, True), PackedGemmConfig(32, 64, 64, 1, 2, 4, 2, True, True)))
DIRECT = PackedPlan(
    None,
    (
        PackedGemmConfig(8, 16, 32, 1, 2, 4, 2, swap=True, direct=DirectConfig(16, 2)),
        PackedGemmConfig(8, 32, 32, 1, 2, 4, 2, swap=True, direct=DirectConfig(32, 2)),
    ),
)
PLANS = {"rows": ROWS, "sorted": SORTED, "swapped": SWAPPED, "direct": DIRECT}
# Weights are rounded to the activations' type where they are sorted, scales first.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MIXED = (FORMATS["Q4_K"], FORMATS["Q6_K"])


def run(layer: PackedLayer, plan: PackedPlan | None, x: Tensor, ids: Tensor, weights: Tensor, arriving: FetchPlan | None = None) -> Tensor:
    """Through the launcher, with everything that it writes poisoned before."""
    workspace = layer.workspace(x.shape[0], ids.shape[1], x.dtype, DEVICE)
    out = torch.full_like(x, torch.nan, device=DEVICE)
    packed_launch.run(
        x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), layer.pool.to(DEVICE), layer.entries.to(DEVICE), layer.formats, layer.f, out,
        workspace, plan, arriving, layer.page_bytes, layer.tiles,
    )  # fmt: skip
    return out.cpu()


def inputs(tokens: int, k: int, experts: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(tokens, experts).argsort(1)[:, :k].contiguous()
    return torch.randn(tokens, d).to(dtype), ids, torch.rand(tokens, k)


# The interpreter takes seconds a case, so there each format is seen once a kernel; on a GPU all combinations are.
EVERY = [(plan, dtype) for plan in PLANS for dtype in DTYPES]
ONCE = [("rows", torch.float32), ("sorted", torch.float16), ("direct", torch.float16)]


@pytest.mark.parametrize(("plan", "dtype"), EVERY if ON_GPU else ONCE, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_against_float64(name: str, plan: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    layer = PackedLayer((fmt, fmt), 2, 24, 64)
    arguments = inputs(5 if ON_GPU else 1, 1, 2, 64, dtype)
    assert relative_error(run(layer, PLANS[plan], *arguments), layer.expected(*arguments)) < TOLERANCE[dtype]


@pytest.mark.parametrize("plan", ["rows", "swapped", "direct"])
@pytest.mark.parametrize(
    ("name", "tokens", "f", "d", "tiles"),
    [("int4", 1, 3, 1408, 1), ("int8 a row", 1, 18, 66, 2), ("NVFP4", 1, 18, 66, 2), ("Q6_K", 1, 7, 65, 1), ("FP8 a row", 1, 7, 65, 1)],
    ids=str,
)
def test_odd_shapes(name: str, tokens: int, f: int, d: int, tiles: int, plan: str) -> None:
    fmt = FORMATS[name]
    layer = PackedLayer((fmt, fmt), 2, f, d, tiles)
    arguments = inputs(tokens, 1, 2, d, torch.float16)
    assert relative_error(run(layer, PLANS[plan], *arguments), layer.expected(*arguments)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("plan", PLANS)
def test_projections_of_different_formats(plan: str) -> None:
    layer = PackedLayer(MIXED, 2, 16, 64, tiles=2)
    arguments = inputs(2, 2, 2, 64, torch.float32)
    assert relative_error(run(layer, PLANS[plan], *arguments), layer.expected(*arguments)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("formats", "f", "d", "tiles"),
    [(MIXED, 24, 80, (2, 3)), (MIXED, 80, 48, (3, 1)), ((FORMATS["FP8 in blocks"], FORMATS["Q8_0"]), 200, 64, (2, 2))],
    ids=["2, 2, 3", "3, 3, 1", "whole groups of rows"],
)
def test_projections_in_different_numbers_of_tiles(
    formats: tuple[PackedFormat, PackedFormat], f: int, d: int, tiles: tuple[int, int], plan: str
) -> None:
    """The last tiles have fewer rows than the others, and tables have a column more than the layer has pages."""
    layer = PackedLayer(formats, 2, f, d, tiles, more=1)
    layer.entries[:, -1] = 2**31 - 1
    arguments = inputs(2, 2, 2, d, torch.float32)
    assert relative_error(run(layer, PLANS[plan], *arguments), layer.expected(*arguments)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("entry", [-1, 2**31 - 1], ids=["before the pool", "far behind it"])
def test_absent_experts_are_never_read(plan: str, entry: int) -> None:
    layer = PackedLayer((FORMATS["int4"], FORMATS["int4"]), 6, 12, 64, present=[1, 4])
    layer.entries[layer.entries < 0] = entry
    ids = torch.tensor([1, 4])[torch.randint(2, (3, 2))]
    arguments = (torch.randn(3, 64), ids, torch.rand(3, 2))
    assert relative_error(run(layer, PLANS[plan], *arguments), layer.expected(*arguments)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("plan", PLANS)
def test_negative_ids_add_nothing(plan: str) -> None:
    layer = PackedLayer((FORMATS["MXFP4"], FORMATS["Q8_0"]), 4, 12, 64)
    ids = torch.tensor([[0, -1], [-1, -1], [3, 2], [-1, 1], [1, 1], [-1, -1]])
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    weights[ids < 0] = torch.nan
    out = run(layer, PLANS[plan], x, ids, weights)
    assert relative_error(out, layer.expected(x, ids, weights)) < TOLERANCE[torch.float32]
    assert not out[1].any()


@pytest.mark.parametrize("plan", PLANS)
def test_placement_does_not_change_bits(plan: str) -> None:
    layer = PackedLayer(MIXED, 3, 12, 64)
    arguments = inputs(2, 2, 3, 64, torch.float16)
    first = run(layer, PLANS[plan], *arguments)
    pages = layer.pool.view(-1, layer.page_bytes)
    layer.entries = ((pages.shape[0] - 1) * (layer.page_bytes // 256) - layer.entries).to(torch.int32)
    layer.pool = pages.flip(0).contiguous().view(-1)
    assert torch.equal(first, run(layer, PLANS[plan], *arguments))


@pytest.mark.parametrize("tokens", [1, 20])
def test_public_op_and_reference(tokens: int) -> None:
    """On the GPU the kernels as the tables pick them, elsewhere the torch reference; both over the same pages."""
    layer = PackedLayer(MIXED, 6, 32, 64, tiles=2, present=[0, 2, 3, 5])
    ids = torch.tensor([0, 2, 3, 5])[torch.rand(tokens, 4).argsort(1)[:, :2].contiguous()]
    x, weights = torch.randn(tokens, 64), torch.rand(tokens, 2)
    out = torch.full((tokens, 64), torch.nan, device=DEVICE)
    arguments = [t.to(DEVICE) for t in (x, ids, weights, layer.pool, layer.entries)]
    assert paged_moe(*arguments, 32, out=out, formats=layer.formats) is out
    assert relative_error(out, layer.expected(x, ids, weights)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("tokens", "tiles", "more"), [(1, 2, 0), (1, (1, 3), 2), (20, (1, 3), 2)], ids=["alike", "1, 1, 3", "sorted"])
def test_experts_that_arrive(tokens: int, tiles: int | tuple[int, int], more: int) -> None:
    """What pages hold is copied, and nothing else: in host memory numbers that are none lie between what tiles hold."""
    layer = PackedLayer(MIXED, 3, 32, 80, tiles, more=more)
    x, weights = torch.randn(tokens, 80), torch.rand(tokens, 2)
    ids = torch.tensor([[2, 0]]).repeat(tokens, 1)
    expected = layer.expected(x, ids, weights)
    size, columns, pages = layer.page_bytes, layer.entries.shape[1], 2 * layer.tiles[0] + layer.tiles[1]
    # Expert 2 lies in host memory, page after page; its pages in the pool hold something else.
    host = torch.cat([layer.pool[int(entry) * 256 :][:size] for entry in layer.entries[2, :pages]])
    host = host.pin_memory() if ON_GPU else host
    for entry in layer.entries[2, :pages].tolist():
        layer.pool[entry * 256 : entry * 256 + size] = 0xFF
    plan = FetchPlan.create(3, columns, 3, DEVICE)
    plan.sources[0], plan.count[0] = host.data_ptr(), 1
    plan.pages[0] = layer.entries[2].to(DEVICE)
    pool, entries = layer.pool.to(DEVICE), layer.entries.to(DEVICE)
    out = paged_moe(
        x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), pool, entries, 32, arriving=plan, formats=layer.formats, arriving_bytes=size,
        tiles=layer.tiles,
    )  # fmt: skip
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("copied", [ROWS, SORTED], ids=["rows", "sorted"])
def test_copies_end_with_what_tiles_hold(copied: PackedPlan) -> None:
    layer = PackedLayer(MIXED, 2, 32, 80, (1, 3), more=1)
    size, pages = layer.page_bytes, layer.entries[1, :5].tolist()
    host = torch.cat([layer.pool[entry * 256 : entry * 256 + size] for entry in pages])
    host = host.pin_memory() if ON_GPU else host
    for entry in pages:
        layer.pool[entry * 256 : entry * 256 + size] = 0x77
    plan = FetchPlan.create(2, 6, 2, DEVICE)
    plan.sources[0], plan.count[0], plan.pages[0] = host.data_ptr(), 1, layer.entries[1].to(DEVICE)
    layer.pool = layer.pool.to(DEVICE)
    arguments = inputs(1, 1, 2, 80, torch.float32)
    run(layer, copied, arguments[0], torch.tensor([[1]]), arguments[2], plan)
    wide, tall = packed_launch.tile_content(MIXED[0], 32, 80), packed_launch.tile_content(MIXED[1], 32, 32)
    for place, entry in enumerate(pages):
        page, content = layer.pool[entry * 256 : entry * 256 + size].cpu(), wide if place < 2 else tall
        assert content < size or place < 2
        assert torch.equal(page[:content], host[place * size : place * size + content]) and bool((page[content:] == 0x77).all())


def test_what_does_not_belong_together() -> None:
    layer = PackedLayer(MIXED, 3, 16, 64)
    arguments = [
        t.to(DEVICE) for t in (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2), layer.pool, layer.entries)
    ]
    with pytest.raises(ValueError, match="groups of 24"):
        paged_moe(*arguments, 16, formats=(PackedFormat("int8", 24, "f16"), FORMATS["int4"]))
    for tiles in ((1, 2), (0, 3), (1, 0)):
        with pytest.raises(ValueError, match="row tiles"):
            paged_moe(*arguments, 16, formats=layer.formats, tiles=tiles)
    with pytest.raises(ValueError, match="row tiles"):
        paged_moe(
            arguments[0], *arguments[1:4], torch.zeros(3, 9, dtype=torch.int32, device=DEVICE), 16, formats=layer.formats, tiles=(3, 3)
        )


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tokens", [1, 12, 13, 176, 4096, 100_000])
def test_every_size_has_a_plan(tokens: int, itemsize: int) -> None:
    plan = choose_plan(tokens, 8, 128, MIXED, itemsize)
    assert (plan.rows is None) != (plan.gemm is None)
    if plan.gemm is not None:
        assert plan.gemm[0].tile_tokens == plan.gemm[1].tile_tokens


def test_every_pair_of_formats_walks_one_table_of_tiles() -> None:
    for pair in itertools.product(FORMATS.values(), repeat=2):
        for tokens in (12, 16, 80, 81, 176, 177, 640, 641, 1120, 1121, 4096):
            plan = choose_plan(tokens, 8, 128, pair, 2)
            assert plan.gemm is None or plan.gemm[0].tile_tokens == plan.gemm[1].tile_tokens, (pair, tokens)
