"""Launches the Triton kernels over packed weights; everything is checked before it comes here. Imported only where triton can run."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rimuru_kernels.expert_fetch import FetchPlan
from rimuru_kernels.expert_fetch.kernel import fetch
from rimuru_kernels.fused_moe import packed_direct, packed_gemm, packed_rows
from rimuru_kernels.fused_moe.direct_blocks import direct_blocks
from rimuru_kernels.fused_moe.launch import COPIERS, WORDS, power_of_two, sort_into_tiles, sum_slots
from rimuru_kernels.fused_moe.packed_configs import PackedGemmConfig, PackedPlan, PackedRowsConfig, choose_plan, chunks
from rimuru_kernels.fused_moe.workspace import MoeWorkspace
from rimuru_kernels.packed_weights import PackedFormat, page_bytes, page_parts, tile_rows
from rimuru_kernels.packed_weights.dots import UNIT, multiplies_integers
from rimuru_kernels.packed_weights.format import LOW_BITS
from rimuru_kernels.packed_weights.kernel import described
from rimuru_kernels.sizes import max_tiles

MOST_PARTS, MOST_FLOAT_PARTS, MOST_WARPS = 6, 4, 16
"""Units that a lane of the row kernels multiplies with activations in its registers, counting halves: as integers, as float32. Warps."""


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
    tiles: tuple[int, int] | None = None,
) -> Tensor:
    """Computes one layer; see `launch.run`, and `paged_moe` for the arguments. `plan` replaces the tables' choice, for measurements.

    tiles: row tiles of gate and of up, and of down; None: all columns of `entries` are pages, as many for each projection.
    """
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return out
    lying = places(entries.shape[1], tiles, formats, f, x.shape[1])
    plan = plan or choose_plan(num_tokens, top_k, entries.shape[0], formats, x.element_size())
    if arriving is not None:
        _fetch(arriving, pool, arriving_bytes, lying, formats, f, x.shape[1], without_down=plan.rows is not None)
    if plan.rows is not None:
        _run_rows(x, topk_ids, topk_weights, pool, entries, formats, f, out, workspace, plan.rows, arriving, arriving_bytes, lying)
    else:
        assert plan.gemm is not None
        _run_gemm(x, topk_ids, topk_weights, pool, entries, formats, f, out, workspace, plan.gemm, lying)
    return out


class Places(NamedTuple):
    """Which columns of a layer's entries are what; the kernels' argument TILES.

    Attributes:
        columns: of the table.
        wide: row tiles of gate, which are the first columns, and as many of up behind them; those of down come next.
        wide_rows, tall_rows: rows of a tile of gate and up, and of down; the last tile of a projection may have fewer.
    """

    columns: int
    wide: int
    wide_rows: int
    tall_rows: int


def places(columns: int, tiles: tuple[int, int] | None, formats: tuple[PackedFormat, PackedFormat], f: int, d: int) -> Places:
    """`Places` of a layer; see `run`."""
    wide, tall = (columns // 3, columns // 3) if tiles is None else tiles
    return Places(columns, wide, tile_rows(f, wide, formats[0].group_rows), tile_rows(d, tall, formats[1].group_rows))


def _fetch(
    arriving: FetchPlan,
    pool: Tensor,
    distance: int,
    lying: Places,
    formats: tuple[PackedFormat, PackedFormat],
    f: int,
    d: int,
    *,
    without_down: bool,
) -> None:
    """Copy what pages hold, and no more; in one launch where that differs little."""
    wide, tall = tile_content(formats[0], lying.wide_rows, d), tile_content(formats[1], lying.tall_rows, f)
    middle = 2 * lying.wide
    end = middle - (-d // lying.tall_rows)
    if without_down:
        fetch(arriving, pool, distance, (0, middle), copied=min(wide, distance))
    elif abs(wide - tall) * 16 <= max(wide, tall):
        fetch(arriving, pool, distance, (0, end), copied=min(max(wide, tall), distance))
    else:
        fetch(arriving, pool, distance, (0, middle), copied=min(wide, distance))
        fetch(arriving, pool, distance, (middle, end), copied=min(tall, distance))


def tile_content(fmt: PackedFormat, rows: int, columns: int) -> int:
    """Bytes of a row tile's content, in whole units of 16, as copies take them."""
    return -(-page_bytes(fmt, rows, columns) // 16) * 16


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
    lying: Places,
) -> None:
    num_tokens, top_k = topk_ids.shape
    d = x.shape[1]
    wide, tall = configs
    copiers = 0 if arriving is None else -(-COPIERS // (num_tokens * top_k))
    copies = (None, None, None) if arriving is None else (arriving.sources, arriving.pages, arriving.count)
    quads, hidden = quads_of(x), quads_of(workspace.hidden)
    up = row_blocks(formats[0], lying.wide_rows, d, wide, 1, quads, pool)
    down = row_blocks(formats[1], lying.tall_rows, f, tall, power_of_two(top_k), hidden, pool)
    # Pages that arrive are copied while gate and up are computed, so then nothing of down may be read early.
    early = arriving is None and overlaps(x.device)
    packed_rows.gate_up_rows[(num_tokens * top_k, copiers - (-f // (up["BN"] * up["TURNS"])))](
        x, quads, topk_ids, *widths(pool), entries, workspace.hidden, *copies,
        TOPK=top_k, F=f, D=d, TILES=tuple(lying), COPIERS=copiers, WORDS=WORDS, PAGE_WORDS=arriving_bytes // 8,
        COPIED_WORDS=min(arriving_bytes, tile_content(formats[1], lying.tall_rows, f)) // 8, EARLY=early, **up,
    )  # fmt: skip
    packed_rows.down_rows[(num_tokens, -(-d // (down["BN"] * down["TURNS"])))](
        workspace.hidden, hidden, topk_ids, topk_weights, *widths(pool), entries, out,
        TOPK=top_k, SLOTS=power_of_two(top_k), F=f, D=d, TILES=tuple(lying), WAITS=early, **down, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin there before the one before it is done (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the machine there turns floats of 8 bits into others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def widths(pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A pool as bytes, int32 and int64, as far as it is whole ones; where it cannot be int64, which nobody needs then, as bytes again."""
    longs = pool[: pool.numel() // 8 * 8].view(torch.int64) if pool.storage_offset() % 8 == 0 else pool
    return pool, pool[: pool.numel() // 4 * 4].view(torch.int32), longs


def quads_of(rows: Tensor) -> Tensor:
    """Rows [R, n] of two-byte numbers as int64 [R, n / 4], so that four are read at once; where that cannot be, the rows themselves."""
    return rows.view(torch.int64) if rows.element_size() == 2 and rows.shape[1] % 4 == 0 and rows.data_ptr() % 8 == 0 else rows


def row_blocks(
    fmt: PackedFormat, rows: int, columns: int, config: PackedRowsConfig, slots: int, quads: Tensor, pool: Tensor
) -> dict[str, Any]:
    """How a row kernel reads rows of tiles [rows, columns], and how many at once.

    slots: experts of a program. quads: of its activations.
    """
    aligned = quads.dtype is torch.int64 and pool.data_ptr() % 16 == 0
    dots = aligned and multiplies_integers(fmt, rows, columns, 2)
    fast = fmt.values == "fp8" and page_parts(fmt, rows, columns).values.row_bytes % 4 == 0 and converts_fp8(pool.device)
    blocks = shapes(fmt, rows, columns, config, slots, dots=dots, fast=fast)
    # With many slots, or long rows, more warps, lest a lane has several units.
    warps = max(config.warps, min(MOST_WARPS, blocks["UNITS"] * slots // 32))
    return blocks | {"num_warps": warps} | ({"maxnreg": config.registers} if config.registers and warps == config.warps else {})


def shapes(fmt: PackedFormat, rows: int, columns: int, config: PackedRowsConfig, slots: int, *, dots: bool, fast: bool) -> dict[str, Any]:
    """The constants of a row kernel. A lane has a unit of a row; where rows are long it has several, but no more than registers hold."""
    assert config.turns % config.held == 0, "turns come in laps of those that are held"
    row_bytes = page_parts(fmt, rows, columns).values.row_bytes
    whole = -(-row_bytes // UNIT)
    units = min(config.units, power_of_two(whole))
    halves = 2 if LOW_BITS[fmt.values] == 4 else 1
    while -(-whole // units) * halves > (MOST_PARTS if dots else MOST_FLOAT_PARTS):
        units *= 2
    return {
        "FMT": described(fmt, rows, columns), "BN": max(1, 32 * config.warps // (units * slots)), "TURNS": config.turns,
        "HELD": config.held, "UNITS": units, "CHUNKS": -(-whole // units), "WIDE": 4 if row_bytes % 4 == 0 else 1, "DOTS": dots,
        "FAST": fast,
    }  # fmt: skip


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
    lying: Places,
) -> None:
    num_tokens, top_k = topk_ids.shape
    d, num_experts = x.shape[1], entries.shape[0]
    wide, tall = configs
    assert wide.tile_tokens == tall.tile_tokens, "both products walk one table of tiles"
    tiles = max_tiles(num_tokens * top_k, num_experts, wide.tile_tokens)
    # The table has pages in it only where a projection is one page and the entries have nothing else.
    row_tiles = 1 if lying == Places(3, 1, f, d) else 2
    sort_into_tiles(topk_ids, num_experts, workspace, entries, tiles, wide.tile_tokens, row_tiles, paged=True)
    hidden = workspace.hidden[: num_tokens * top_k]
    _product(x, hidden, pool, workspace, entries, tiles, top_k, f, d, formats[0], wide, lying, gated=True)
    _product(hidden, workspace.contributions, pool, workspace, entries, tiles, top_k, d, f, formats[1], tall, lying, gated=False)
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
    lying: Places,
    *,
    gated: bool,
) -> None:
    """One grouped product; n weight rows of `depth` columns an expert and projection."""
    rows = lying.wide_rows if gated else lying.tall_rows
    direct = direct_blocks(fmt, config, n, rows, depth, a.dtype)
    if direct is not None:
        packed_direct.direct_gemm[(tiles * direct.blocks,)](
            a, pool, result, workspace.order, workspace.table, entries,
            TOPK=top_k, N=n, K=depth, TILES=tuple(lying), GATED=gated, num_warps=1, num_stages=direct.stages, **direct.constants,
        )  # fmt: skip
        return
    chunk, same, repeat = chunks(fmt, config)
    packed_gemm.grouped_gemm[(tiles * -(-n // config.weight_rows),)](
        a, pool, result, workspace.order, workspace.table, entries, tiles,
        TOPK=top_k, N=n, K=depth, TILES=tuple(lying), FMT=described(fmt, rows, depth),
        BM=config.tile_tokens, BN=config.weight_rows, CHUNK=chunk, SAME=same, REPEAT=repeat,
        GROUP=config.group, HALVES=config.halves, GATED=gated, SWAP=config.swap,
        # tf32 would lose what float32 is asked for; for 2-byte activations the setting means nothing.
        PRECISION="ieee" if a.element_size() == 4 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
