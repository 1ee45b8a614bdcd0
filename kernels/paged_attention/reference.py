"""Causal attention over the pages of one sequence, in plain torch.

Letters: R rows (new tokens), H query heads, G key/value heads (H a multiple of G), D head size, B tokens a page, n tokens visible in all.
Row r sits at position n - R + r and sees keys 0 .. n - R + r; with a sliding window W only the last W of them. Query head h reads
key/value head h // (H / G).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.paged_attention import quantized
from rimuru_kernels.paged_attention.layout import ENTRY_BYTES, KVLayout
from rimuru_kernels.sizes import MAX_SCORES


def store_kv(k: Tensor, v: Tensor, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], start: int) -> None:
    """Write k, v [R, G, D] of positions start .. start + R - 1 into the pages [B, G, D] of their sequence."""
    page_tokens = key_pages[0].shape[0]
    rows = k.shape[0]
    done = 0
    while done < rows:
        page, offset = divmod(start + done, page_tokens)
        count = min(page_tokens - offset, rows - done)
        key_pages[page][offset : offset + count] = k[done : done + count]
        value_pages[page][offset : offset + count] = v[done : done + count]
        done += count


def paged_attention(
    q: Tensor, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], num_tokens: int, scale: float, sliding_window: int | None
) -> Tensor:
    """Attention of q [R, H, D], the last R of `num_tokens` positions, over pages [B, G, D] -> [R, H, D]."""
    rows, heads = q.shape[:2]
    first = 0
    if sliding_window is not None:
        # The oldest key that the first row may see; whole pages before it are not read.
        page_tokens = key_pages[0].shape[0]
        skip = max(0, num_tokens - rows - sliding_window + 1) // page_tokens
        key_pages, value_pages, first = key_pages[skip:], value_pages[skip:], skip * page_tokens
    length = num_tokens - first
    used = -(-length // key_pages[0].shape[0])
    key_pages, value_pages = key_pages[:used], value_pages[:used]
    keys = (torch.cat(tuple(key_pages)) if len(key_pages) > 1 else key_pages[0])[:length]
    values = (torch.cat(tuple(value_pages)) if len(value_pages) > 1 else value_pages[0])[:length]
    step = max(1, MAX_SCORES // (heads * length))
    if step >= rows:
        return _attend_rows(q, keys, values, num_tokens - rows, first, scale, sliding_window)
    parts = [
        _attend_rows(q[start : start + step], keys, values, num_tokens - rows + start, first, scale, sliding_window)
        for start in range(0, rows, step)
    ]
    return torch.cat(parts)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, position: int, first: int, scale: float, sliding_window: int | None) -> Tensor:
    """Rows q [R, H, D] at positions position .. position + R - 1 over keys, values [n, G, D] of positions first .. first + n - 1."""
    rows, heads, head_dim = q.shape
    length, groups, _ = keys.shape
    share = heads // groups
    # [G, R * H/G, D] x [G, D, n]: query heads that share a key head are rows of one product.
    if rows == 1:
        query = q.view(groups, share, head_dim)
    else:
        query = q.view(rows, groups, share, head_dim).permute(1, 0, 2, 3).reshape(groups, rows * share, head_dim)
    scores = torch.bmm(query, keys.permute(1, 2, 0))
    scores *= scale
    sees_all = rows == 1 and position == first + length - 1 and sliding_window is None
    if not sees_all:
        positions = torch.arange(position, position + rows).unsqueeze(1)
        visible = torch.arange(first, first + length).unsqueeze(0)
        hidden = visible > positions
        if sliding_window is not None:
            hidden |= visible <= positions - sliding_window
        scores.view(groups, rows, share, length).masked_fill_(hidden.view(1, rows, 1, length), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    out = torch.bmm(weights, values.permute(1, 0, 2))
    if rows == 1:
        return out.view(1, heads, head_dim)
    return out.view(groups, rows, share, head_dim).permute(1, 0, 2, 3).reshape(rows, heads, head_dim)


def read_pages(pool: Tensor, entries: Sequence[int], layout: KVLayout, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Key pages and value pages [B, G, D] at the given entries: views, or copies in `dtype` of 8-bit codes."""
    return quantized.read_pages(pool, entries, layout, dtype) if layout.quantized else page_views(pool, entries, layout, dtype)


def page_views(pool: Tensor, entries: Sequence[int], layout: KVLayout, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Key pages and value pages [B, G, D] at the given entries, as views of the pool's bytes."""
    width = layout.block_tokens * layout.kv_heads * layout.head_dim * dtype.itemsize
    shape = (layout.block_tokens, layout.kv_heads, layout.head_dim)
    starts = [entry * ENTRY_BYTES for entry in entries]
    keys = [pool[start : start + width].view(dtype).view(shape) for start in starts]
    values = [pool[start + width : start + 2 * width].view(dtype).view(shape) for start in starts]
    return keys, values


def decode_by_entries(
    q: Tensor, pool: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, layout: KVLayout, scale: float, window: int | None
) -> None:
    """See `rimuru_kernels.paged_attention.paged_attention_decode`; arguments are taken as checked."""
    for seq, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[seq] = 0
            continue
        entries = block_table[seq, : -(-length // layout.block_tokens)].tolist()
        keys, values = read_pages(pool, entries, layout, q.dtype)
        out[seq] = paged_attention(q[seq : seq + 1], keys, values, length, scale, window)[0]


def prefill_by_entries(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    layout: KVLayout,
    scale: float,
    window: int | None,
) -> None:
    """See `rimuru_kernels.paged_attention.paged_attention_prefill`; arguments are taken as checked."""
    bounds = cu_seqlens.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        start, stop = bounds[seq], bounds[seq + 1]
        if start == stop:
            continue
        entries = block_table[seq, : -(-length // layout.block_tokens)].tolist()
        keys, values = read_pages(pool, entries, layout, q.dtype)
        out[start:stop] = paged_attention(q[start:stop], keys, values, length, scale, window)


def store_by_entries(
    k: Tensor, v: Tensor, pool: Tensor, block_table: Tensor, positions: Tensor, token_seqs: Tensor | None, layout: KVLayout
) -> None:
    """See `rimuru_kernels.paged_attention.store_kv_entries`; arguments are taken as checked."""
    seqs = range(k.shape[0]) if token_seqs is None else token_seqs.tolist()
    for row, (seq, position) in enumerate(zip(seqs, positions.tolist(), strict=True)):
        if position < 0:
            continue
        page, offset = divmod(position, layout.block_tokens)
        entry = int(block_table[seq, page])
        if layout.quantized:
            start = entry * ENTRY_BYTES
            data = pool[start : start + layout.page_bytes(k.dtype.itemsize)]
            quantized.write_tokens(k[row : row + 1], v[row : row + 1], data, offset, layout)
            continue
        keys, values = page_views(pool, [entry], layout, k.dtype)
        keys[0][offset] = k[row]
        values[0][offset] = v[row]
