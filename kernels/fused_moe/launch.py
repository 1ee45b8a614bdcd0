"""Launches the Triton kernels of `kernel.py`; everything is checked before it comes here. Imported only where triton can run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rimuru_kernels.expert_fetch import FetchPlan
from rimuru_kernels.expert_fetch.kernel import fetch
from rimuru_kernels.fused_moe import kernel
from rimuru_kernels.fused_moe.configs import MAX_ONE_LAUNCH_PAIRS, GemmConfig, Plan, RowsConfig, choose_plan
from rimuru_kernels.fused_moe.workspace import MoeWorkspace
from rimuru_kernels.sizes import COUNT_TOKENS, TABLE_FIELDS, max_tiles

ENTRY_BYTES = 256
COPIERS = 128
"""Least programs that copy while others compute. The link is full with about 1 MiB on its way, whoever reads."""
WORDS = 2048
"""int64 words that one of them copies at a time."""
MAX_COUNTED_PAIRS = 1024
"""Up to this many pairs, every program may count those of all experts, and one launch sorts and cuts."""
ROUTE_CHUNK = 4096
"""Pairs that a program of `route` looks at at once."""
COUNT_LINES = 64
"""Chunks whose counts a program of `place_pairs` reads at once."""


class Weights(NamedTuple):
    """Where expert weights are: in pages (`entries` int32 [E, 3·tiles], both tensors the pool) or contiguous (`entries` is None)."""

    gate_up: Tensor
    down: Tensor
    entries: Tensor | None
    tiles: int
    num_experts: int


def paged_weights(pool: Tensor, entries: Tensor, dtype: torch.dtype) -> Weights:
    """Weights of one layer in pages of the pool (uint8 [bytes]); entries int32 [E, 3·tiles]."""
    typed = pool.view(dtype)
    return Weights(typed, typed, entries, entries.shape[1] // 3, entries.shape[0])


def contiguous_weights(gate_up: Tensor, down: Tensor) -> Weights:
    """Weights of one layer as gate_up [E, 2f, d] and down [E, d, f]: the yardstick for what the page table costs."""
    return Weights(gate_up, down, None, 1, gate_up.shape[0])


def run(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    f: int,
    out: Tensor,
    workspace: MoeWorkspace,
    plan: Plan | None = None,
    arriving: FetchPlan | None = None,
    arriving_bytes: int | None = None,
) -> Tensor:
    """Computes one layer. x [T, d]; topk_ids [T, k]; topk_weights float32 [T, k]; out [T, d]; all contiguous; x, out, weights of one dtype.

    `plan` replaces the table's choice, for measurements. The experts that `arriving` lists are copied into their pages first, or, what is
    needed last, meanwhile.
    """
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return out
    plan = plan or choose_plan(num_tokens, top_k, weights.num_experts, x.element_size())
    page_bytes = arriving_bytes or f * x.shape[1] * x.element_size() // weights.tiles
    if arriving is not None:
        first = (0, (2 if plan.rows is not None else 3) * weights.tiles)
        fetch(arriving, weights.gate_up.view(torch.uint8), page_bytes, first)
    if plan.rows is not None:
        _run_rows(x, topk_ids, topk_weights, weights, f, out, workspace, plan.rows, arriving, page_bytes)
    else:
        assert plan.gemm is not None
        _run_gemm(x, topk_ids, topk_weights, weights, f, out, workspace, plan.gemm)
    return out


def _shared(weights: Weights, itemsize: int) -> dict[str, Any]:
    return {"TILES": weights.tiles, "UNIT": ENTRY_BYTES // itemsize, "PAGED": weights.entries is not None}


def _run_rows(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    f: int,
    out: Tensor,
    workspace: MoeWorkspace,
    configs: tuple[RowsConfig, RowsConfig],
    arriving: FetchPlan | None,
    page_bytes: int,
) -> None:
    num_tokens, top_k = topk_ids.shape
    d = x.shape[1]
    wide, tall = configs
    # Without pages the kernel never looks at the entries, but it needs a pointer.
    entries = weights.entries if weights.entries is not None else topk_ids
    shared = _shared(weights, x.element_size())
    copiers = 0 if arriving is None else -(-COPIERS // (num_tokens * top_k))
    copies = (None, None, None) if arriving is None else (arriving.sources, arriving.pages, arriving.count)
    kernel.gate_up_rows[(num_tokens * top_k, copiers - (-f // wide.rows))](
        x, topk_ids, weights.gate_up, entries, workspace.hidden, *copies,
        TOPK=top_k, F=f, D=d, BN=wide.rows, BK=min(wide.columns, power_of_two(d)), COPIERS=copiers, WORDS=WORDS, PAGE_WORDS=page_bytes // 8,
        num_warps=wide.warps, **shared,
    )  # fmt: skip
    kernel.down_rows[(num_tokens, -(-d // tall.rows))](
        workspace.hidden, topk_ids, topk_weights, weights.down, entries, out,
        TOPK=top_k, SLOTS=power_of_two(top_k), F=f, D=d, BN=tall.rows, BK=min(tall.columns, power_of_two(f)), num_warps=tall.warps,
        **shared,
    )  # fmt: skip


def _run_gemm(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    f: int,
    out: Tensor,
    workspace: MoeWorkspace,
    configs: tuple[GemmConfig, GemmConfig],
) -> None:
    num_tokens, top_k = topk_ids.shape
    d = x.shape[1]
    wide, tall = configs
    assert wide.tile_tokens == tall.tile_tokens, "both products walk one table of tiles"
    tiles = max_tiles(num_tokens * top_k, weights.num_experts, wide.tile_tokens)
    entries = weights.entries if weights.entries is not None else topk_ids
    paged = weights.entries is not None
    sort_into_tiles(topk_ids, weights.num_experts, workspace, entries, tiles, wide.tile_tokens, weights.tiles, paged)
    hidden = workspace.hidden[: num_tokens * top_k]
    _product(x, hidden, weights, weights.gate_up, workspace, entries, tiles, top_k, f, d, wide, gated=True)
    _product(hidden, workspace.contributions, weights, weights.down, workspace, entries, tiles, top_k, d, f, tall, gated=False)
    sum_slots(workspace.contributions, topk_ids, topk_weights, out)


def sort_into_tiles(
    topk_ids: Tensor, num_experts: int, workspace: MoeWorkspace, entries: Tensor, tiles: int, tile_tokens: int, row_tiles: int, paged: bool
) -> None:
    """Fill the workspace's order, and its table with `tiles` tiles: the pairs of topk_ids [T, k] by expert, cut; see `fill_tile_table`."""
    num_pairs = topk_ids.numel()
    if num_pairs > MAX_COUNTED_PAIRS:
        sort_pairs(topk_ids, num_experts, workspace)
        fill_tile_table(workspace, entries, num_experts, tiles, tile_tokens, row_tiles, paged)
        return
    kernel.route_tiles[(num_experts,)](
        topk_ids, workspace.order, entries, workspace.table, num_pairs, tiles,
        CHUNK=max(128, power_of_two(num_pairs)), BM=tile_tokens, EXPERTS=power_of_two(num_experts), TILES=row_tiles, PAGED=paged,
        num_warps=4,
    )  # fmt: skip


def sort_pairs(topk_ids: Tensor, num_experts: int, workspace: MoeWorkspace) -> None:
    """Fill the workspace's order and offsets: the pairs of topk_ids [T, k], sorted by expert."""
    num_pairs = topk_ids.numel()
    if num_pairs <= MAX_ONE_LAUNCH_PAIRS:
        chunk = min(ROUTE_CHUNK, max(128, power_of_two(num_pairs)))
        kernel.route[(num_experts,)](
            topk_ids, workspace.order, workspace.offsets, num_pairs, CHUNK=chunk, num_warps=max(4, min(16, chunk // 256))
        )
        return
    num_tokens, top_k = topk_ids.shape
    chunks = -(-num_tokens // COUNT_TOKENS)
    sizes = {"TOPK": top_k, "TOKENS": COUNT_TOKENS, "EXPERTS": power_of_two(num_experts)}
    kernel.count_pairs[(chunks,)](topk_ids, workspace.counts, num_tokens, num_experts, SLOTS=power_of_two(top_k), num_warps=4, **sizes)
    kernel.place_pairs[(chunks,)](
        topk_ids, workspace.counts, workspace.order, workspace.offsets, num_tokens, num_experts, LINES=COUNT_LINES, num_warps=8, **sizes
    )


def fill_tile_table(
    workspace: MoeWorkspace, entries: Tensor, num_experts: int, max_tiles: int, tile_tokens: int, row_tiles: int, paged: bool
) -> None:
    """Cut the sorted pairs into `max_tiles` tiles of at most `tile_tokens`, in the workspace's table."""
    kernel.tile_table[(num_experts,)](
        workspace.offsets, entries, workspace.table, max_tiles,
        BM=tile_tokens, EXPERTS=power_of_two(num_experts), TILES=row_tiles, PAGED=paged, num_warps=1,
    )  # fmt: skip


def sum_slots(contributions: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    """out [T, d]: each token's contributions [T·k, d], weighted and summed."""
    num_tokens, d = out.shape
    block = min(1024, power_of_two(d))
    kernel.sum_slots[(num_tokens, -(-d // block))](
        contributions, topk_ids, topk_weights, out, TOPK=topk_ids.shape[1], D=d, BLOCK=block, num_warps=4
    )


def _product(
    a: Tensor,
    result: Tensor,
    weights: Weights,
    w: Tensor,
    workspace: MoeWorkspace,
    entries: Tensor,
    tiles: int,
    top_k: int,
    n: int,
    depth: int,
    config: GemmConfig,
    *,
    gated: bool,
) -> None:
    """One grouped product; n weight rows of `depth` columns an expert and projection."""
    itemsize = a.element_size()
    unit = ENTRY_BYTES // itemsize
    out_columns = config.weight_rows // 2 if gated else config.weight_rows
    described = config.described and _can_describe(a.device, weights, n, depth, itemsize, out_columns)
    half_tokens = config.tile_tokens // 2
    a_full: Any = a
    a_half: Any = a
    w_any: Any = w
    if described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows = n // weights.tiles
        w_any = TensorDescriptor(w, [w.numel() // unit, rows, depth], [unit, depth, 1], [1, out_columns, config.depth])
        if not gated:
            a_full = TensorDescriptor(a, [a.shape[0], depth], [depth, 1], [config.tile_tokens, config.depth])
            a_half = TensorDescriptor(a, [a.shape[0], depth], [depth, 1], [half_tokens, config.depth])
    kernel.grouped_gemm[(tiles * -(-n // out_columns),)](
        a_full, a_half, w_any, result, workspace.order, workspace.table, entries, tiles,
        TOPK=top_k, N=n, K=depth, BM=config.tile_tokens, BN=config.weight_rows, BK=config.depth, GROUP=config.group, HALVES=config.halves,
        GATED=gated, DESCRIBED=described,
        # tf32 would lose what float32 is asked for; for 2-byte weights the setting means nothing.
        PRECISION="ieee" if itemsize == 4 else "tf32",
        num_warps=config.warps, num_stages=config.stages, **_shared(weights, itemsize),
    )  # fmt: skip


def _can_describe(device: torch.device, weights: Weights, n: int, depth: int, itemsize: int, out_columns: int) -> bool:
    """Whether the copy engine can fetch these weights: 9.0 only, where it was measured; rows of whole units; blocks within a row tile."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    row_tile = n // weights.tiles
    return depth * itemsize % 256 == 0 and (n * depth * itemsize) % ENTRY_BYTES == 0 and (weights.tiles == 1 or row_tile % out_columns == 0)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


assert kernel.TILE_FIELDS.value == TABLE_FIELDS
