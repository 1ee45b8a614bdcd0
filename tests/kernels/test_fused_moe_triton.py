"""The Triton MoE kernels against a float64 formula: on the GPU where there is one, else in Triton's interpreter (float32 and float16 there:
its bfloat16 products are wrong)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, that is, imported

pytest.importorskip("triton", reason="needs triton, which torch brings on Linux")

from rimuru_kernels.expert_fetch import FetchPlan  # noqa: E402
from rimuru_kernels.fused_moe import MoeWorkspace, launch, paged_moe  # noqa: E402
from rimuru_kernels.fused_moe.configs import GemmConfig, Plan, RowsConfig, choose_plan  # noqa: E402
from rimuru_kernels.sizes import max_tiles, moe_workspace_bytes  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ROWS = Plan((RowsConfig(16, 64, 4), RowsConfig(16, 32, 4)), None)
SORTED = Plan(None, (GemmConfig(16, 64, 32, 2, 4, 2), GemmConfig(16, 32, 32, 2, 4, 2)))
HALVES = Plan(None, (GemmConfig(32, 64, 32, 2, 4, 2, True, True), GemmConfig(32, 32, 32, 2, 4, 2, True, True)))
PLANS = {"rows": ROWS, "sorted": SORTED, "halves": HALVES}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


class Layer:
    """Experts at random places of a poisoned pool. `present` are written; others have entries of −1."""

    def __init__(
        self, experts: int, f: int, d: int, dtype: torch.dtype, tiles: int = 1, present: list[int] | None = None, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.f, self.d, self.dtype = f, d, dtype
        present = list(range(experts)) if present is None else present
        size = f * d * dtype.itemsize // tiles
        stride = -(-size // 256)
        places = torch.randperm(len(present) * 3 * tiles + 5, generator=generator)[: len(present) * 3 * tiles].view(-1, 3 * tiles)
        pool = torch.full(((len(present) * 3 * tiles + 5) * stride * 256,), 0xFF, dtype=torch.uint8)  # every float of it is a NaN
        self.entries = torch.full((experts, 3 * tiles), -1, dtype=torch.int32)
        self.gate_up = torch.full((experts, 2 * f, d), torch.nan, dtype=dtype)
        self.down = torch.full((experts, d, f), torch.nan, dtype=dtype)
        for expert, pages in zip(present, places.tolist(), strict=True):
            gate, up = (torch.randn(f, d, generator=generator) / d**0.5 for _ in range(2))
            down = torch.randn(d, f, generator=generator) / f**0.5
            self.gate_up[expert], self.down[expert] = torch.cat([gate, up]).to(dtype), down.to(dtype)
            parts = [part for matrix in (*self.gate_up[expert].chunk(2), self.down[expert]) for part in matrix.chunk(tiles)]
            for tile, (page, part) in enumerate(zip(pages, parts, strict=True)):
                self.entries[expert, tile] = page * stride
                pool[page * stride * 256 : page * stride * 256 + size] = part.contiguous().view(-1).view(torch.uint8)
        self.pool, self.entries = pool.to(DEVICE), self.entries.to(DEVICE)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                if expert >= 0:
                    g, u = (self.gate_up[expert].double() @ x[token].double()).chunk(2)
                    out[token] += weight * (self.down[expert].double() @ (torch.nn.functional.silu(g) * u))
        return out

    def run(
        self, plan: Plan | None, x: Tensor, ids: Tensor, weights: Tensor, *, contiguous: bool = False, arriving: FetchPlan | None = None
    ) -> Tensor:
        """Through the launcher, with everything that it writes poisoned before."""
        workspace = MoeWorkspace(max(99, x.shape[0]), ids.shape[1], self.entries.shape[0], self.f, self.d, self.dtype, DEVICE)
        workspace.hidden.fill_(torch.nan)
        workspace.contributions.fill_(torch.nan)
        for integers in (workspace.order, workspace.offsets, workspace.counts, workspace.table):
            integers.fill_(-(2**30))
        if contiguous:
            places = launch.contiguous_weights(self.gate_up.to(DEVICE), self.down.to(DEVICE))
        else:
            places = launch.paged_weights(self.pool, self.entries, self.dtype)
        out = torch.full_like(x, torch.nan, device=DEVICE)
        launch.run(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), places, self.f, out, workspace, plan, arriving)
        return out.cpu()


def _inputs(tokens: int, k: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, d).to(dtype), torch.rand(tokens, k)


def _close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert not out.isnan().any()
    assert (out.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm() + 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda v: str(v).removeprefix("torch."))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "f", "d", "tiles"),
    [(1, 1, 1, 16, 32, 1), (1, 8, 9, 48, 64, 1), (5, 3, 7, 33, 65, 1), (19, 2, 3, 16, 32, 1), (3, 2, 5, 64, 96, 2)],
    ids=lambda v: str(v),
)
def test_against_float64(tokens: int, k: int, experts: int, f: int, d: int, tiles: int, plan: str, dtype: torch.dtype) -> None:
    layer = Layer(experts, f, d, dtype, tiles)
    x, weights = _inputs(tokens, k, d, dtype)
    ids = torch.rand(tokens, experts).argsort(1)[:, :k].contiguous()
    out = layer.run(PLANS[plan], x, ids, weights)
    _close(out, layer.expected(x, ids, weights), dtype)
    assert torch.equal(out, layer.run(PLANS[plan], x, ids.int(), weights, contiguous=True)), "pages changed the bits"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("entry", [-1, 2**31 - 1], ids=["before the pool", "far behind it"])
def test_absent_experts_are_never_read(plan: str, entry: int) -> None:
    """Half a tebibyte behind the pool nothing is mapped: reading there would end the process (on a GPU, fail the next call)."""
    layer = Layer(6, 32, 32, torch.float32, present=[1, 4])
    layer.entries[layer.entries < 0] = entry
    x, weights = _inputs(9, 3, 32, torch.float32)
    ids = torch.tensor([1, 4])[torch.randint(2, (9, 3))]
    _close(layer.run(PLANS[plan], x, ids, weights), layer.expected(x, ids, weights), torch.float32)


@pytest.mark.parametrize("plan", PLANS)
def test_all_tokens_to_one_expert(plan: str) -> None:
    layer = Layer(5, 32, 32, torch.float32)
    x, weights = _inputs(35, 1, 32, torch.float32)
    ids = torch.full((35, 1), 3)
    _close(layer.run(PLANS[plan], x, ids, weights), layer.expected(x, ids, weights), torch.float32)


@pytest.mark.parametrize("plan", PLANS)
def test_negative_ids_add_nothing(plan: str) -> None:
    layer = Layer(4, 32, 32, torch.float32)
    x, weights = _inputs(6, 2, 32, torch.float32)
    ids = torch.tensor([[0, -1], [-1, -1], [3, 2], [-1, 1], [1, 1], [-1, -1]])
    weights[ids < 0] = torch.nan  # nor are their weights looked at
    out = layer.run(PLANS[plan], x, ids, weights)
    _close(out, layer.expected(x, ids, weights), torch.float32)
    assert not out[1].any()


@pytest.mark.parametrize("plan", PLANS)
def test_placement_does_not_change_bits(plan: str) -> None:
    x, weights = _inputs(11, 3, 64, torch.float16)
    ids = torch.rand(11, 5).argsort(1)[:, :3].contiguous()
    first = Layer(5, 48, 64, torch.float16)
    second = Layer(5, 48, 64, torch.float16)
    # The same experts, every page moved to the mirror image of its place.
    stride = -(-48 * 64 * 2 // 256)
    pages = second.pool.view(-1, stride * 256)
    second.pool = pages.flip(0).contiguous().view(-1)
    second.entries = ((pages.shape[0] - 1) * stride - second.entries).to(torch.int32)
    assert not torch.equal(first.entries, second.entries)
    assert torch.equal(first.run(PLANS[plan], x, ids, weights), second.run(PLANS[plan], x, ids, weights))


def test_no_tokens() -> None:
    layer = Layer(3, 16, 16, torch.float32)
    out = layer.run(None, torch.zeros(0, 16), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert out.shape == (0, 16)


@pytest.mark.parametrize("tokens", [3, 20], ids=["T3", "T20"])
def test_public_op(tokens: int) -> None:
    """On the GPU the kernels as the table picks them, elsewhere the torch reference; both over the same pages."""
    layer = Layer(6, 32, 64, torch.float32, tiles=2, present=[0, 2, 3, 5])
    x, weights = _inputs(tokens, 2, 64, torch.float32)
    ids = torch.tensor([0, 2, 3, 5])[torch.rand(tokens, 4).argsort(1)[:, :2].contiguous()]
    out = torch.full((tokens, 64), torch.nan, device=DEVICE)
    arguments = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), layer.pool, layer.entries, 32)
    assert paged_moe(*arguments, out=out) is out
    _close(out.cpu(), layer.expected(x, ids, weights), torch.float32)
    assert torch.equal(paged_moe(*arguments), out)


def test_what_does_not_belong_together() -> None:
    layer = Layer(3, 16, 16, torch.float32)
    x, ids, weights = (t.to(DEVICE) for t in (torch.zeros(2, 16), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="shapes"):
        paged_moe(x, ids[:1], weights, layer.pool, layer.entries, 16)
    with pytest.raises(ValueError, match="row tiles"):
        paged_moe(x, ids, weights, layer.pool, layer.entries[:, :2].contiguous(), 16)
    with pytest.raises(ValueError, match="dtypes"):
        paged_moe(x, ids, weights, layer.pool, layer.entries.long(), 16)
    with pytest.raises(ValueError, match="contiguous"):
        paged_moe(x, ids.t().contiguous().t(), weights, layer.pool, layer.entries, 16)


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (100, 3, 5), (300, 2, 9)], ids=lambda v: str(v))
def test_sorting_in_one_and_in_two_launches(tokens: int, k: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(-1, experts, (tokens, k), device=DEVICE)
    monkeypatch.setattr(launch, "ROUTE_CHUNK", 256)
    monkeypatch.setattr(launch, "COUNT_LINES", 2)
    workspace = MoeWorkspace(max(tokens, 99), k, experts, 16, 16, torch.float32, DEVICE)
    for limit in (0, tokens * k):
        monkeypatch.setattr(launch, "MAX_ONE_LAUNCH_PAIRS", limit)
        workspace.order.fill_(-7)
        workspace.offsets.fill_(-7)
        launch.sort_pairs(ids, experts, workspace)
        used = int((ids >= 0).sum())
        flat = ids.view(-1).cpu()
        assert workspace.order[:used].tolist() == [pair for e in range(experts) for pair in torch.where(flat == e)[0].tolist()]
        assert workspace.offsets.tolist() == [0, *torch.bincount(flat[flat >= 0], minlength=experts).cumsum(0).tolist()]


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "tile_tokens"), [(1, 1, 1, 8), (100, 3, 5, 16), (77, 2, 40, 8), (90, 4, 9, 32)], ids=str
)
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_sorting_and_cutting_in_one_launch(
    tokens: int, k: int, experts: int, tile_tokens: int, row_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(-1, experts, (tokens, k), device=DEVICE)
    entries = torch.arange(experts * 3 * row_tiles, dtype=torch.int32, device=DEVICE).view(experts, -1)
    workspace = MoeWorkspace(max(tokens, 99), k, experts, 16, 16, torch.float32, DEVICE)
    tiles, found = max_tiles(tokens * k, experts, tile_tokens), []
    for limit in (0, tokens * k):
        monkeypatch.setattr(launch, "MAX_COUNTED_PAIRS", limit)
        workspace.order.fill_(-7)
        workspace.table.fill_(-7)
        launch.sort_into_tiles(ids, experts, workspace, entries, tiles, tile_tokens, row_tiles, True)
        found.append((workspace.order.tolist(), workspace.table.tolist()))
    assert found[0] == found[1]
    ends = [(first, end) for first, end, *_ in found[0][1][:tiles] if first < end]
    assert sum(end - first for first, end in ends) == int((ids >= 0).sum())


@pytest.mark.parametrize("tokens", [1, 2, 3, 300])
def test_workspace_is_as_large_as_budgeted(tokens: int) -> None:
    workspace = MoeWorkspace(tokens, 3, 10, 32, 64, torch.float16, DEVICE)
    assert workspace.num_bytes == moe_workspace_bytes(tokens, 3, 10, 32, 64, 2)
    assert not workspace.holds(tokens + 1, 3, 10, 32, 64, torch.float16, DEVICE)


def test_tiles_suffice_for_every_routing() -> None:
    for counts in ([0, 0, 0], [1, 1, 1], [17, 1, 33], [16, 16, 16], [0, 65, 0]):
        assert sum(-(-count // 16) for count in counts) <= max_tiles(sum(counts), 3, 16)


def test_one_token_is_not_sorted_and_many_are() -> None:
    assert choose_plan(1, 8, 128, 2).rows is not None
    assert choose_plan(4096, 8, 128, 2).gemm is not None


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [2, 40])
def test_entries_beyond_two_gibibytes(tokens: int) -> None:
    layer = Layer(4, 64, 128, torch.bfloat16)
    shift = (5 << 30) // 256
    far = torch.full(((5 << 30) + layer.pool.numel(),), 0xFF, dtype=torch.uint8, device=DEVICE)
    far[5 << 30 :] = layer.pool
    layer.pool, layer.entries = far, layer.entries + shift
    x, weights = _inputs(tokens, 2, 128, torch.bfloat16)
    ids = torch.rand(tokens, 4).argsort(1)[:, :2].contiguous()
    _close(layer.run(None, x, ids, weights), layer.expected(x, ids, weights), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 200, 700])
def test_shipped_plans_in_a_graph(tokens: int) -> None:
    layer = Layer(8, 256, 512, torch.bfloat16)
    workspace = MoeWorkspace(tokens, 4, 8, 256, 512, torch.bfloat16, DEVICE)
    x, ids = torch.randn(tokens, 512, device=DEVICE).bfloat16(), torch.zeros(tokens, 4, dtype=torch.int64, device=DEVICE)
    weights = torch.rand(tokens, 4, device=DEVICE)
    out = torch.empty_like(x)
    paged_moe(x, ids, weights, layer.pool, layer.entries, 256, out=out, workspace=workspace)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_moe(x, ids, weights, layer.pool, layer.entries, 256, out=out, workspace=workspace)
    for _ in range(3):
        ids.copy_(torch.rand(tokens, 8).argsort(1)[:, :4])
        x.copy_(torch.randn(tokens, 512))
        out.fill_(torch.nan)
        graph.replay()
        _close(out.cpu(), layer.expected(x.cpu(), ids.cpu(), weights.cpu()), torch.bfloat16)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("missing", [0, pytest.param(3, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tiles", [1, 2])
def test_experts_that_are_still_to_be_copied(plan: str, missing: int, tiles: int) -> None:
    """Listed experts are copied in the same call, some of them while others are computed; the interpreter cannot follow addresses."""
    if missing and not ON_GPU:
        pytest.skip("the interpreter cannot follow addresses stored in a tensor")
    layer = Layer(6, 64, 32, torch.float16, tiles)
    x, weights = _inputs(5, 3, 32, torch.float16)
    ids = torch.rand(5, 6).argsort(1)[:, :3].contiguous()
    expected = layer.run(PLANS[plan], x, ids, weights)
    host, arriving = take_away(layer, missing)
    assert not missing or layer.run(PLANS[plan], x, ids, weights).isnan().any(), "nothing was taken away"
    assert torch.equal(layer.run(PLANS[plan], x, ids, weights, arriving=arriving), expected)
    assert len(host) == missing


def test_experts_that_are_still_to_be_copied_in_plain_torch() -> None:
    layer = Layer(6, 64, 32, torch.float16, 2)
    x, weights = (t.to(DEVICE) for t in _inputs(5, 3, 32, torch.float16))
    ids = (torch.rand(5, 6).argsort(1)[:, :3].contiguous()).to(DEVICE)
    expected = paged_moe(x, ids, weights, layer.pool, layer.entries, layer.f)
    host, arriving = take_away(layer, 4)
    assert torch.equal(paged_moe(x, ids, weights, layer.pool, layer.entries, layer.f, arriving=arriving), expected)
    wrong = FetchPlan.create(6, 3, 6, DEVICE)
    with pytest.raises(ValueError, match="a plan of 3 pages"):
        paged_moe(x, ids, weights, layer.pool, layer.entries, layer.f, arriving=wrong)
    assert len(host) == 4


def take_away(layer: Layer, count: int) -> tuple[Tensor, FetchPlan]:
    """The bytes of the first experts in host memory, their pages poisoned, and a plan that lists them."""
    pages, page_bytes = layer.entries.shape[1], layer.f * layer.d * layer.dtype.itemsize // (layer.entries.shape[1] // 3)
    host = torch.empty(count, pages * page_bytes, dtype=torch.uint8)
    host = host.pin_memory() if ON_GPU else host
    plan = FetchPlan.create(layer.entries.shape[0], pages, layer.entries.shape[0], DEVICE)
    plan.count.fill_(count)
    for expert in range(count):
        plan.sources[expert] = host.data_ptr() + expert * pages * page_bytes
        plan.pages[expert] = layer.entries[expert]
        for column, entry in enumerate(layer.entries[expert].tolist()):
            page = layer.pool[entry * 256 : entry * 256 + page_bytes]
            host[expert, column * page_bytes : (column + 1) * page_bytes] = page.cpu()
            page.fill_(0xFF)
    return host, plan
