"""Mixture-of-experts feed-forward (SwiGLU experts). See `reference.py` for shapes and the formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.expert_fetch import FetchPlan, fetch
from rimuru_kernels.fused_moe import reference
from rimuru_kernels.fused_moe.reference import TokenWorkspace
from rimuru_kernels.fused_moe.workspace import MoeWorkspace
from rimuru_kernels.packed_weights import PackedFormat, page_bytes, tile_rows

__all__ = ["MoeWorkspace", "TokenWorkspace", "expert_ffn", "expert_page_bytes", "paged_moe", "token_moe"]

PAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP_STEP = 16
"""Columns that share a scale, where weights are packed, are a multiple of this."""


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One expert over some tokens: x [R, d], gate and up [f, d], down [d, f], weights [R] -> [R, d], all float32.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    f, d = gate.shape
    if up.shape != (f, d) or down.shape != (d, f) or x.shape[1:] != (d,) or weights.shape != x.shape[:1]:
        shapes = [tuple(t.shape) for t in (x, gate, up, down, weights)]
        raise ValueError(f"expert_ffn: x, gate, up, down, weights of shapes {shapes} do not belong together")
    return reference.expert_ffn(x, gate, up, down, weights)


def token_moe(x: Tensor, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Tensor, space: TokenWorkspace) -> Tensor:
    """One token over its k experts: x [1, d], k matrices gate_up [2f, d] and down [d, f], weights [k] -> [1, d], all float32.

    Args:
        space: made once for k, f and d, used by one call at a time.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    d = x.shape[1]
    f = downs[0].shape[1] if downs else 0
    # Torch itself refuses a later matrix that differs from the first.
    fits = bool(gate_ups) and bool(downs) and gate_ups[0].shape == (2 * f, d) and downs[0].shape == (d, f)
    sizes = space.parts.shape == (len(downs), d) and space.hidden.shape == (len(downs), f)
    if len(gate_ups) != len(downs) or not fits or not sizes or x.shape[0] != 1 or weights.shape != (len(downs),):
        shapes = [tuple(t.shape) for t in (x, *gate_ups[:1], *downs[:1], weights)]
        raise ValueError(f"token_moe: x, {len(gate_ups)} gate_ups, {len(downs)} downs, weights of shapes {shapes} do not belong together")
    return reference.token_moe(x, gate_ups, downs, weights, space)


def paged_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    pool: Tensor,
    entries: Tensor,
    f: int,
    *,
    out: Tensor | None = None,
    workspace: MoeWorkspace | None = None,
    arriving: FetchPlan | None = None,
    formats: tuple[PackedFormat, PackedFormat] | None = None,
    arriving_bytes: int | None = None,
    tiles: tuple[int, int] | None = None,
) -> Tensor:
    """One MoE layer whose expert weights are read where they lie, in pages of the pool: resident pages and loading buffers alike.

    On a CUDA device nothing waits for the host and the launches depend on T alone, so the call can be captured in a graph (give `out` and
    `workspace` then). The result is the same bits for every placement of the pages.

    Args:
        x: [T, d], bfloat16, float16 or float32; weights in the pool have the same dtype where there are no formats.
        topk_ids: [T, k] int32 or int64; the experts of each token, all present in `entries`. A negative id adds nothing.
        topk_weights: [T, k] float32.
        pool: uint8 [bytes], the whole page pool.
        entries: int32 [E, P] of this layer: gate row tiles, then up, then down, P = 3·t, or as `tiles` says; an entry is a page's offset
            from the pool's start in units of 256 bytes, −1 for absent experts, which are never read. Gate and up are [f, d], down is
            [d, f], cut along their rows.
        f: expert intermediate size.
        out: [T, d] of x's dtype to write to, else a new tensor.
        workspace: scratch for at least T tokens, else one is made for this call.
        arriving: of the preceding `expert_fetch.resolve` or `route`: the experts that it lists are copied into their pages as part of this
            call, in small steps partly while it computes.
        formats: how gate and up, and how down are packed (see `packed_weights`); a row tile's page is a packed matrix of its own. None:
            weights are plain numbers.
        arriving_bytes: bytes from one page to the next in the host memory that `arriving` copies from, a multiple of 16, where they are not
            `expert_page_bytes`: pages of a layer whose formats are smaller than another's. What a page holds is copied.
        tiles: row tiles of gate and of up, and of down, of `packed_weights.tile_rows` rows each; plain weights have as many of both, of
            equal rows. Columns of `entries` beyond them have no meaning. None: t of each.

    Returns:
        [T, d], `out` where given: Σ over slots of topk_weights · W_down (silu(W_gate x) · (W_up x)).

    Raises:
        ValueError: if shapes, dtypes or devices do not belong together.
    """
    tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "pool": pool, "entries": entries}
    out = torch.empty_like(x) if out is None else out
    _check_paged(tensors | {"out": out}, f, formats, tiles)
    wide, tall = (entries.shape[1] // 3,) * 2 if tiles is None else tiles
    if formats is None:
        content = copied = f * x.shape[1] * x.element_size() // wide
    else:
        _check_formats(formats)
        copied = expert_page_bytes(formats, f, x.shape[1], wide, tall)
    copied = copied if arriving_bytes is None else arriving_bytes
    if arriving is not None and (arriving.pages.shape[1] != entries.shape[1] or copied % 16 or arriving.count.device != x.device):
        raise ValueError(f"paged_moe: a plan of {arriving.pages.shape[1]} pages an expert for pages of {copied} bytes (16 divides them)")
    if not x.is_cuda:
        if arriving is not None:
            fetch(arriving, pool, copied, (0, 2 * wide + tall))
        return reference.paged_moe(x, topk_ids, topk_weights, pool, entries, f, out, formats, tiles)
    from rimuru_kernels.fused_moe import launch

    sizes = (topk_ids.shape[1], entries.shape[0], f, x.shape[1], x.dtype, x.device)
    if workspace is None:
        workspace = MoeWorkspace(x.shape[0], *sizes)
    elif not workspace.holds(x.shape[0], *sizes):
        raise ValueError(f"paged_moe: the workspace was made for other sizes than T = {x.shape[0]} and k, E, f, d, dtype, device = {sizes}")
    if formats is not None:
        from rimuru_kernels.fused_moe import packed_launch

        return packed_launch.run(
            x, topk_ids, topk_weights, pool, entries, formats, f, out, workspace, arriving=arriving, arriving_bytes=copied, tiles=tiles
        )
    if entries.shape[1] != 3 * wide:
        # A plain layer among packed ones with more pages: the kernels of plain weights know tables without other columns only.
        if arriving is not None:
            fetch(arriving, pool, copied, (0, 3 * wide), copied=min(copied, -(-content // 16) * 16))
        entries, arriving = entries[:, : 3 * wide].contiguous(), None
    places = launch.paged_weights(pool, entries, x.dtype)
    return launch.run(x, topk_ids, topk_weights, places, f, out, workspace, arriving=arriving, arriving_bytes=copied)


def expert_page_bytes(formats: tuple[PackedFormat, PackedFormat], f: int, d: int, tiles: int = 1, down_tiles: int | None = None) -> int:
    """Bytes of a page that holds any row tile of a packed expert, rounded up to whole units of 256.

    Args:
        formats: of gate and up [f, d], and of down [d, f].
        f: expert intermediate size; d: hidden size; tiles: row tiles of a projection; down_tiles: of down, where it has others.
    """
    wide = tile_rows(f, tiles, formats[0].group_rows)
    tall = tile_rows(d, tiles if down_tiles is None else down_tiles, formats[1].group_rows)
    largest = max(page_bytes(formats[0], wide, d), page_bytes(formats[1], tall, f))
    return -(-largest // 256) * 256


def _check_formats(formats: tuple[PackedFormat, PackedFormat]) -> None:
    for fmt in formats:
        if fmt.group % GROUP_STEP:
            raise ValueError(f"paged_moe: groups of {fmt.group} columns; the kernels take whole rows and multiples of {GROUP_STEP}")


def _check_paged(
    tensors: dict[str, Tensor], f: int, formats: tuple[PackedFormat, PackedFormat] | None, tiles: tuple[int, int] | None
) -> None:
    x, ids, weights, pool, entries, out = tensors.values()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if x.ndim != 2 or ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape or out.shape != x.shape or pool.ndim != 1:
        raise ValueError(f"paged_moe: tensors of shapes {shapes} do not belong together")
    if not _has_tiles(entries, f, x.shape[1], formats, tiles):
        raise ValueError(
            f"paged_moe: entries of shape {shapes['entries']} are not gate, up and down row tiles of f = {f}, d = {x.shape[1]}"
            + ("" if tiles is None else f", {tiles[0]} and {tiles[1]} of them")
        )
    dtypes = {name: t.dtype for name, t in tensors.items()}
    integers = (torch.int32, torch.int64)
    good = x.dtype in PAGE_DTYPES and out.dtype == x.dtype and ids.dtype in integers and weights.dtype == torch.float32
    if not good or pool.dtype != torch.uint8 or entries.dtype != torch.int32:
        raise ValueError(
            f"paged_moe: dtypes {dtypes}; x and out share one of {PAGE_DTYPES}, ids are integers, the pool bytes, entries int32"
        )
    if len({t.device for t in tensors.values()}) != 1 or not all(t.is_contiguous() for t in tensors.values()):
        raise ValueError("paged_moe: all tensors must be contiguous and on one device")


def _has_tiles(entries: Tensor, f: int, d: int, formats: tuple[PackedFormat, PackedFormat] | None, tiles: tuple[int, int] | None) -> bool:
    """Whether entries are those of an expert's row tiles."""
    t, rest = divmod(entries.shape[-1], 3)
    wide, tall = (t, t) if tiles is None else tiles
    if entries.ndim != 2 or wide < 1 or tall < 1 or f < 1 or (rest if tiles is None else 2 * wide + tall > entries.shape[1]):
        return False
    if formats is None:
        return wide == tall and f % wide == 0 and d % tall == 0
    try:
        tile_rows(f, wide, formats[0].group_rows)
        tile_rows(d, tall, formats[1].group_rows)
    except ValueError:
        return False
    return True
