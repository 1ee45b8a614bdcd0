"""Causal attention over paged keys and values, and storing into the pages.

Two forms: over lists of page views of one sequence (what the CPU engine runs; letters in `reference.py`), and over page entries in one
pool of bytes, for a batch, with nothing read on the host, so that a step can be captured as a graph (`layout.py` has the layout).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.paged_attention import reference
from rimuru_kernels.paged_attention.layout import KVLayout

__all__ = ["KVLayout", "paged_attention", "paged_attention_decode", "paged_attention_prefill", "store_kv", "store_kv_entries"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check_pages(name: str, width: tuple[int, int], key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], num_tokens: int) -> None:
    if not key_pages or len(key_pages) != len(value_pages):
        raise ValueError(
            f"{name}: {len(key_pages)} key pages and {len(value_pages)} value pages; as many of both, at least one, are needed"
        )
    page_tokens = key_pages[0].shape[0]
    if key_pages[0].shape[1:] != width:
        raise ValueError(f"{name}: pages of shape {tuple(key_pages[0].shape)} cannot hold heads of shape {width}")
    if num_tokens > len(key_pages) * page_tokens:
        raise ValueError(f"{name}: {num_tokens} tokens do not fit into {len(key_pages)} pages of {page_tokens}")


def store_kv(k: Tensor, v: Tensor, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], start: int) -> None:
    """Write k, v [R, G, D] of positions start .. start + R - 1 into the pages [B, G, D] of their sequence.

    Raises:
        ValueError: if shapes differ or the pages end before the last position.
    """
    if k.shape != v.shape:
        raise ValueError(f"store_kv: keys {tuple(k.shape)} and values {tuple(v.shape)} differ")
    _check_pages("store_kv", (k.shape[1], k.shape[2]), key_pages, value_pages, start + k.shape[0])
    reference.store_kv(k, v, key_pages, value_pages, start)


def paged_attention(
    q: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    num_tokens: int,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of q [R, H, D], the last R of `num_tokens` positions, over pages [B, G, D] -> [R, H, D].

    Raises:
        ValueError: if heads are not a multiple of key/value heads, or the pages end before the last position.
    """
    groups = key_pages[0].shape[1] if key_pages else 1
    if q.shape[1] % groups or q.shape[0] > num_tokens:
        raise ValueError(f"paged_attention: queries {tuple(q.shape)} do not fit {groups} key heads and {num_tokens} tokens")
    _check_pages("paged_attention", (groups, q.shape[2]), key_pages, value_pages, num_tokens)
    return reference.paged_attention(q, key_pages, value_pages, num_tokens, scale, sliding_window)


def _check_entries(name: str, q: Tensor, pool: Tensor, block_table: Tensor, layout: KVLayout, lengths: Sequence[Tensor]) -> None:
    if q.ndim != 3 or q.dtype not in _DTYPES or q.shape[2] != layout.head_dim or q.shape[1] % layout.kv_heads or q.stride(2) != 1:
        raise ValueError(f"{name}: rows {q.dtype} {list(q.shape)} (strides {q.stride()}) do not fit {layout}")
    if pool.dtype is not torch.uint8 or pool.ndim != 1:
        raise ValueError(f"{name}: the pool must be one-dimensional uint8, not {pool.dtype} {list(pool.shape)}")
    if block_table.dtype is not torch.int32 or block_table.ndim != 2 or block_table.stride(1) != 1 or block_table.shape[1] < 1:
        raise ValueError(f"{name}: block_table must be int32 [sequences, blocks], blocks contiguous, not {block_table.dtype}")
    if any(t.dtype is not torch.int32 or t.ndim != 1 or not t.is_contiguous() for t in lengths):
        raise ValueError(f"{name}: lengths must be contiguous int32 vectors, not {[(t.dtype, list(t.shape)) for t in lengths]}")
    devices = {t.device for t in (q, pool, block_table, *lengths)}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors lie on several devices: {sorted(map(str, devices))}")


def _check_scale(name: str, scale: float, sliding_window: int | None) -> None:
    if not scale > 0.0 or (sliding_window is not None and sliding_window < 1):
        raise ValueError(f"{name}: scale and sliding_window must be positive, not {scale} and {sliding_window}")


def paged_attention_decode(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    layout: KVLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one token a sequence over its keys and values in the pool, its own included (store first).

    Results of a sequence do not depend on the rest of the batch, nor on the table's width once that holds 16384 tokens.

    Args:
        q: [S, H, D], the last position of each sequence; D contiguous, other strides free.
        pool: uint8 [bytes].
        block_table: int32 [S, max_blocks]; only the first ceil(seq_lens / block_tokens) entries of a row are read.
        seq_lens: int32 [S], tokens of each sequence including this one; 0 gives a row of zeros.
        layout: of the pages; their dtype is q's, or 8-bit codes.
        scale: factor on q·k, positive.
        sliding_window: only the last so many positions are seen.
        out: [S, H, D] contiguous, or None for a new tensor.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    name = "paged_attention_decode"
    _check_entries(name, q, pool, block_table, layout, (seq_lens,))
    _check_scale(name, scale, sliding_window)
    if seq_lens.shape[0] != q.shape[0] or block_table.shape[0] < q.shape[0]:
        raise ValueError(f"{name}: {q.shape[0]} queries, {seq_lens.shape[0]} lengths and {block_table.shape[0]} rows of the block table")
    result = _result(name, q, out)
    if q.shape[0] == 0:
        return result
    if q.is_cuda:
        from rimuru_kernels.paged_attention import kernel

        kernel.decode(q, pool, block_table, seq_lens, result, layout, scale, sliding_window)
    else:
        reference.decode_by_entries(q, pool, block_table, seq_lens, result, layout, scale, sliding_window)
    return result


def paged_attention_prefill(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    layout: KVLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over all its keys and values in the pool (store first).

    Args:
        q: [T, H, D], new tokens of all sequences, one sequence after the other; D contiguous, other strides free.
        pool: uint8 [bytes].
        block_table: int32 [S, max_blocks]; only the first ceil(seq_lens / block_tokens) entries of a row are read.
        cu_seqlens: int32 [S + 1]: sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1] - 1 of q. Rows from cu_seqlens[S] on are
            left unwritten.
        seq_lens: int32 [S], tokens of each sequence, cached and new.
        layout, scale, sliding_window, out: as for `paged_attention_decode`.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    name = "paged_attention_prefill"
    _check_entries(name, q, pool, block_table, layout, (cu_seqlens, seq_lens))
    _check_scale(name, scale, sliding_window)
    seqs = seq_lens.shape[0]
    if cu_seqlens.shape[0] != seqs + 1 or block_table.shape[0] < seqs:
        raise ValueError(f"{name}: {cu_seqlens.shape[0]} bounds, {seqs} lengths and {block_table.shape[0]} rows of the block table")
    result = _result(name, q, out)
    if q.shape[0] == 0 or seqs == 0:
        return result
    if q.is_cuda:
        from rimuru_kernels.paged_attention import kernel

        kernel.prefill(q, pool, block_table, cu_seqlens, seq_lens, result, layout, scale, sliding_window)
    else:
        reference.prefill_by_entries(q, pool, block_table, cu_seqlens, seq_lens, result, layout, scale, sliding_window)
    return result


def store_kv_entries(
    k: Tensor, v: Tensor, pool: Tensor, block_table: Tensor, positions: Tensor, layout: KVLayout, *, token_seqs: Tensor | None = None
) -> None:
    """Write keys and values of tokens into the pages of their sequences.

    Args:
        k, v: [T, Hkv, D], heads and elements contiguous.
        pool: uint8 [bytes].
        block_table: int32 [S, max_blocks].
        positions: int32 or int64 [T], each token's position in its sequence; negative: the token is not stored.
        layout: of the pages; their dtype is that of k and v, or 8-bit codes.
        token_seqs: int32 [T], row of the block table of each token; None: token t belongs to row t.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    name = "store_kv_entries"
    tokens = () if token_seqs is None else (token_seqs,)
    _check_entries(name, k, pool, block_table, layout, tokens)
    width = (layout.kv_heads, layout.head_dim)
    if k.shape != v.shape or k.dtype is not v.dtype or k.shape[1:] != width or any(t.stride()[1:] != (layout.head_dim, 1) for t in (k, v)):
        raise ValueError(f"{name}: keys {list(k.shape)} {k.stride()}, values {list(v.shape)} {v.stride()} do not fit heads of {width}")
    if positions.shape != k.shape[:1] or positions.is_floating_point() or any(t.shape != k.shape[:1] for t in tokens):
        raise ValueError(f"{name}: {k.shape[0]} tokens need as many integer positions and sequence numbers")
    if k.shape[0] == 0:
        return
    if k.is_cuda:
        from rimuru_kernels.paged_attention import kernel

        kernel.store(k, v, pool, block_table, positions, token_seqs, layout)
    else:
        reference.store_by_entries(k, v, pool, block_table, positions, token_seqs, layout)


def _result(name: str, q: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype is not q.dtype or out.device != q.device or not out.is_contiguous():
        raise ValueError(f"{name}: out {out.dtype} {list(out.shape)} must be contiguous and like q {q.dtype} {list(q.shape)}")
    return out
