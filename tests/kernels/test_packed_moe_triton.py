"""The MoE kernels over packed weights against float64, every format: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from packed_moe import FORMATS, PackedLayer
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, relative_error

from rimuru_kernels.expert_fetch import FetchPlan
from rimuru_kernels.fused_moe import packed_launch, paged_moe
from rimuru_kernels.fused_moe.packed_configs import PackedGemmConfig, PackedPlan, PackedRowsConfig, choose_plan
from rimuru_kernels.packed_weights import PackedFormat

ROWS = PackedPlan((PackedRowsConfig(6, 2), PackedRowsConfig(11, 4)), None)
SORTED = PackedPlan(None, (PackedGemmConfig(16, 32, 64, 2, 2, 4, 2), PackedGemmConfig(16, 32, 32, 1, 2, 4, 2)))
SWAPPED = PackedPlan(None, (PackedGemmConfig(32, 16, 32, 1, 2, 4, 2, True, True), PackedGemmConfig(32, 64, 64, 1, 2, 4, 2, True, True)))
PLANS = {"rows": ROWS, "sorted": SORTED, "swapped": SWAPPED}
# Weights are rounded to the activations' type where they are sorted, scales first.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MIXED = (FORMATS["Q4_K"], FORMATS["Q6_K"])


def run(layer: PackedLayer, plan: PackedPlan | None, x: Tensor, ids: Tensor, weights: Tensor, arriving: FetchPlan | None = None) -> Tensor:
    """Through the launcher, with everything that it writes poisoned before."""
    workspace = layer.workspace(x.shape[0], ids.shape[1], x.dtype, DEVICE)
    out = torch.full_like(x, torch.nan, device=DEVICE)
    packed_launch.run(
        x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), layer.pool.to(DEVICE), layer.entries.to(DEVICE), layer.formats, layer.f, out,
        workspace, plan, arriving, layer.page_bytes,
    )  # fmt: skip
    return out.cpu()


def inputs(tokens: int, k: int, experts: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(tokens, experts).argsort(1)[:, :k].contiguous()
    return torch.randn(tokens, d).to(dtype), ids, torch.rand(tokens, k)


# The interpreter takes seconds a case, so there each format is seen once a kernel; on a GPU all combinations are.
EVERY = [(plan, dtype) for plan in PLANS for dtype in DTYPES]
ONCE = [("rows", torch.float32), ("sorted", torch.float16)]


@pytest.mark.parametrize(("plan", "dtype"), EVERY if ON_GPU else ONCE, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_against_float64(name: str, plan: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    layer = PackedLayer((fmt, fmt), 2, 24, 64)
    arguments = inputs(5 if ON_GPU else 1, 1, 2, 64, dtype)
    assert relative_error(run(layer, PLANS[plan], *arguments), layer.expected(*arguments)) < TOLERANCE[dtype]


@pytest.mark.parametrize("plan", ["rows", "swapped"])
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


def test_experts_that_arrive() -> None:
    layer = PackedLayer(MIXED, 3, 32, 64, tiles=2)
    x, weights = torch.randn(1, 64), torch.rand(1, 2)
    ids = torch.tensor([[2, 0]])
    expected = layer.expected(x, ids, weights)
    size, columns = layer.page_bytes, layer.entries.shape[1]
    # Expert 2 lies in host memory, page after page; its pages in the pool hold something else.
    host = torch.cat([layer.pool[int(entry) * 256 :][:size] for entry in layer.entries[2]])
    host = host.pin_memory() if ON_GPU else host
    for entry in layer.entries[2].tolist():
        layer.pool[entry * 256 : entry * 256 + size] = 0xFF
    plan = FetchPlan.create(3, columns, 2, DEVICE)
    plan.sources[0], plan.count[0] = host.data_ptr(), 1
    plan.pages[0] = layer.entries[2].to(DEVICE)
    pool, entries = layer.pool.to(DEVICE), layer.entries.to(DEVICE)
    out = paged_moe(
        x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), pool, entries, 32, arriving=plan, formats=layer.formats, arriving_bytes=size
    )
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_what_does_not_belong_together() -> None:
    layer = PackedLayer(MIXED, 3, 16, 64)
    arguments = [
        t.to(DEVICE) for t in (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2), layer.pool, layer.entries)
    ]
    with pytest.raises(ValueError, match="groups of 24"):
        paged_moe(*arguments, 16, formats=(PackedFormat("int8", 24, "f16"), FORMATS["int4"]))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tokens", [1, 12, 13, 176, 4096, 100_000])
def test_every_size_has_a_plan(tokens: int, itemsize: int) -> None:
    plan = choose_plan(tokens, 8, 128, MIXED, itemsize)
    assert (plan.rows is None) != (plan.gemm is None)
    if plan.gemm is not None:
        assert plan.gemm[0].tile_tokens == plan.gemm[1].tile_tokens
