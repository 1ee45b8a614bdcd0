"""Launches the Triton kernels over packed weights; everything is checked before it comes here. Imported only where triton can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rimuru_kernels.expert_fetch import FetchPlan
from rimuru_kernels.expert_fetch.kernel import fetch
from rimuru_kernels.fused_moe import packed_gemm, packed_rows
from rimuru_kernels.fused_moe.launch import COPIERS, WORDS, fill_tile_table, power_of_two, sort_pairs, sum_slots
from rimuru_kernels.fused_moe.packed_configs import PackedGemmConfig, PackedPlan, PackedRowsConfig, choose_plan, chunks, unit_bytes
from rimuru_kernels.fused_moe.workspace import MoeWorkspace
from rimuru_kernels.packed_weights import PackedFormat, page_parts
from rimuru_kernels.packed_weights.kernel import described
from rimuru_kernels.sizes import max_tiles


def run(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    pool: Tensor,
    entries: Tensor,
    formats: tuple[PackedFormat, PackedFormat],
    f: int,
    out: Tensor,
    workspace: MoeWorkspace,
    plan: PackedPlan | None = None,
    arriving: FetchPlan | None = None,
    arriving_bytes: int = 0,
) -> Tensor:
    """Computes one layer; see `launch.run`, and `paged_moe` for the arguments. `plan` replaces the tables' choice, for measurements."""
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return out
    tiles = entries.shape[1] // 3
    plan = plan or choose_plan(num_tokens, top_k, entries.shape[0], formats, x.element_size())
    if arriving is not None:
        fetch(arriving, pool, arriving_bytes, (0, (2 if plan.rows is not None else 3) * tiles))
    if plan.rows is not None:
        _run_rows(x, topk_ids, topk_weights, pool, entries, formats, f, out, workspace, plan.rows, arriving, arriving_bytes)
    else:
        assert plan.gemm is not None
        _run_gemm(x, topk_ids, topk_weights, pool, entries, formats, f, out, workspace, plan.gemm)
    return out


def _run_rows(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    pool: Tensor,
    entries: Tensor,
    formats: tuple[PackedFormat, PackedFormat],
    f: int,
    out: Tensor,
    workspace: MoeWorkspace,
    configs: tuple[PackedRowsConfig, PackedRowsConfig],
    arriving: FetchPlan | None,
    arriving_bytes: int,
) -> None:
    num_tokens, top_k = topk_ids.shape
    d, tiles = x.shape[1], entries.shape[1] // 3
    wide, tall = configs
    copiers = 0 if arriving is None else -(-COPIERS // (num_tokens * top_k))
    copies = (None, None, None) if arriving is None else (arriving.sources, arriving.pages, arriving.count)
    words = pool[: pool.numel() // 4 * 4].view(torch.int32)
    packed_rows.gate_up_rows[(num_tokens * top_k, copiers - (-f // wide.rows))](
        x, quads_of(x), topk_ids, pool, words, entries, workspace.hidden, *copies,
        TOPK=top_k, F=f, D=d, TILES=tiles, BN=wide.rows, COPIERS=copiers, WORDS=WORDS, PAGE_WORDS=arriving_bytes // 8,
        num_warps=wide.warps, **row_blocks(formats[0], f // tiles, d),
    )  # fmt: skip
    packed_rows.down_rows[(num_tokens, -(-d // tall.rows))](
        workspace.hidden, quads_of(workspace.hidden), topk_ids, topk_weights, pool, words, entries, out,
        TOPK=top_k, SLOTS=power_of_two(top_k), F=f, D=d, TILES=tiles, BN=tall.rows,
        num_warps=tall.warps, **row_blocks(formats[1], d // tiles, f),
    )  # fmt: skip


def quads_of(rows: Tensor) -> Tensor:
    """Rows [R, n] of two-byte numbers as int64 [R, n / 4], so that four are read at once; where that cannot be, the rows themselves."""
    return rows.view(torch.int64) if rows.element_size() == 2 and rows.shape[1] % 4 == 0 and rows.data_ptr() % 8 == 0 else rows


def row_blocks(fmt: PackedFormat, rows: int, columns: int) -> dict[str, Any]:
    """FMT of a row tile [rows, columns], and how its rows are read."""
    parts = page_parts(fmt, rows, columns).values
    sub = unit_bytes(fmt)
    whole = power_of_two(-(-parts.row_bytes // sub))
    wide = 4 if parts.row_bytes % 4 == 0 else 1
    return {"FMT": described(fmt, rows, columns), "SUB": sub, "UNITS": whole, "WIDE": wide}


def _run_gemm(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    pool: Tensor,
    entries: Tensor,
    formats: tuple[PackedFormat, PackedFormat],
    f: int,
    out: Tensor,
    workspace: MoeWorkspace,
    configs: tuple[PackedGemmConfig, PackedGemmConfig],
) -> None:
    num_tokens, top_k = topk_ids.shape
    d, num_experts = x.shape[1], entries.shape[0]
    wide, tall = configs
    assert wide.tile_tokens == tall.tile_tokens, "both products walk one table of tiles"
    tiles = max_tiles(num_tokens * top_k, num_experts, wide.tile_tokens)
    sort_pairs(topk_ids, num_experts, workspace)
    fill_tile_table(workspace, entries, num_experts, tiles, wide.tile_tokens, entries.shape[1] // 3, paged=True)
    hidden = workspace.hidden[: num_tokens * top_k]
    _product(x, hidden, pool, workspace, entries, tiles, top_k, f, d, formats[0], wide, gated=True)
    _product(hidden, workspace.contributions, pool, workspace, entries, tiles, top_k, d, f, formats[1], tall, gated=False)
    sum_slots(workspace.contributions, topk_ids, topk_weights, out)


def _product(
    a: Tensor,
    result: Tensor,
    pool: Tensor,
    workspace: MoeWorkspace,
    entries: Tensor,
    tiles: int,
    top_k: int,
    n: int,
    depth: int,
    fmt: PackedFormat,
    config: PackedGemmConfig,
    *,
    gated: bool,
) -> None:
    """One grouped product; n weight rows of `depth` columns an expert and projection."""
    row_tiles = entries.shape[1] // 3
    chunk, same, repeat = chunks(fmt, config)
    packed_gemm.grouped_gemm[(tiles * -(-n // config.weight_rows),)](
        a, pool, result, workspace.order, workspace.table, entries, tiles,
        TOPK=top_k, N=n, K=depth, TILES=row_tiles, FMT=described(fmt, n // row_tiles, depth),
        BM=config.tile_tokens, BN=config.weight_rows, CHUNK=chunk, SAME=same, REPEAT=repeat,
        GROUP=config.group, HALVES=config.halves, GATED=gated, SWAP=config.swap,
        # tf32 would lose what float32 is asked for; for 2-byte activations the setting means nothing.
        PRECISION="ieee" if a.element_size() == 4 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
