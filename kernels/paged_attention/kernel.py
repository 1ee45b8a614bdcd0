"""Triton kernels of paged attention: one token a sequence (split over the keys), many tokens a sequence, and storing.

A KV page of one layer holds B tokens: K [B, G, D], then V [B, G, D]. Token n of a sequence lies in row n mod B of the page whose entry is
block_table[sequence, n div B]; the page starts entry * 256 bytes after the pool's first byte. A key tile of N tokens is gathered row by
row, so any power of two B works, and one tile may span N / B pages. Query heads that share a key head are rows of one tile.

Pages of 8-bit codes (`quantized.py`) are read in the same loops: scales of keys multiply the scores, those of values the values.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.paged_attention.layout import ENTRY_BYTES, KVLayout
from rimuru_kernels.paged_attention.quantized_kernel import store_quantized

LOG2_E = 1.4426950408889634
MAX_SPLITS = 128


class DecodeTiles(NamedTuple):
    """Keys a tile, warps and pipeline stages of the decode kernel, and the fewest tiles that a program is given."""

    keys: int
    warps: int
    stages: int
    min_run: int


class PrefillTiles(NamedTuple):
    """Rows (tokens times query heads of one key head) and keys a tile, warps, stages and most registers a thread (None: any)."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def decode_tiles(head_dim: int, itemsize: int) -> DecodeTiles:
    """Tiles that keep the double-buffered keys and values below 64 KiB of shared memory."""
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    keys = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return DecodeTiles(keys=keys, warps=4, stages=3 if row_bytes <= 128 else 2, min_run=128 // keys)


def prefill_tiles(head_dim: int, itemsize: int) -> PrefillTiles:
    """Tiles that fit queries, keys and values into 99 KiB of shared memory."""
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    if itemsize == 4:
        return PrefillTiles(rows=32, keys=32 if row_bytes <= 256 else 16, warps=4, stages=1)
    if row_bytes <= 128:
        return PrefillTiles(rows=128, keys=64, warps=4, stages=3)
    # A little over 128 registers would leave three programs of four on a multiprocessor.
    return PrefillTiles(rows=64, keys=32, warps=4, stages=2, registers=128 if row_bytes <= 256 else None)


@triton.jit
def _row_offsets(table, tokens, valid, KEY_ROW: tl.constexpr, LOG2_B: tl.constexpr, ENTRY_ELEMENTS: tl.constexpr):
    """Offset from the pool base, in elements, of the key rows of `tokens`; table entries of tokens that are not valid are not read."""
    if valid is None:
        entries = tl.load(table + (tokens >> LOG2_B))
    else:
        entries = tl.load(table + (tokens >> LOG2_B), mask=valid, other=0)
    return entries.to(tl.int64) * ENTRY_ELEMENTS + (tokens & ((1 << LOG2_B) - 1)) * KEY_ROW


@triton.jit
def _dequantized(codes, scales, query):
    """Codes int8 [N, D] times scales float16 [N], in the dtype of query."""
    return (codes.to(tl.float32) * scales.to(tl.float32)[:, None]).to(query.dtype)


@triton.jit
def _runs(length, min_run, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First visible key, the tile border before it where the first run starts, and the keys in a run (a multiple of BLOCK_N)."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin = first // BLOCK_N * BLOCK_N
    return first, begin, tl.maximum(tl.cdiv(tl.cdiv(length - begin, SPLITS), BLOCK_N) * BLOCK_N, min_run)


@triton.jit
def _decode_split(
    q, pool, block_table, seq_lens, partial, partial_log, out, scale, q_seq_stride, q_head_stride, table_stride, min_run,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LOG2_B: tl.constexpr, ENTRY_ELEMENTS: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head with its query heads, one run of keys: softmax-weighted values and log2 of the softmax sum."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + seq)
    first, begin, chunk = _runs(length, min_run, WINDOW, SPLITS, BLOCK_N)
    start = begin + split * chunk
    end = tl.minimum(start + chunk, length)
    d = tl.arange(0, BLOCK_D)
    h = tl.arange(0, BLOCK_H)
    q_head = kv_head * GROUP + h
    q_mask = (h[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    row = seq.to(tl.int64) * HEADS + q_head
    if start >= length:
        if SPLITS == 1:  # an empty sequence (a padded row of a captured graph) yields zeros
            tl.store(out + row[:, None] * HEAD_DIM + d[None, :], tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty), mask=q_mask)
        return
    query = tl.load(q + seq.to(tl.int64) * q_seq_stride + q_head[:, None] * q_head_stride + d[None, :], mask=q_mask, other=0.0)
    if QUANTIZED:
        keys = pool.to(tl.pointer_type(tl.int8)) + kv_head * HEAD_DIM
    else:
        keys = pool.to(tl.pointer_type(query.dtype)) + kv_head * HEAD_DIM
    values = keys + (KV_HEADS * HEAD_DIM << LOG2_B)
    # Scales of 2 bytes lie behind both halves of codes of 1 byte; read only where there are some.
    scales = pool.to(tl.pointer_type(tl.float16)) + (KV_HEADS * HEAD_DIM << LOG2_B) + kv_head
    table = block_table + seq.to(tl.int64) * table_stride

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for n0 in tl.range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        valid = n < end
        rows = _row_offsets(table, n, valid, KV_HEADS * HEAD_DIM, LOG2_B, ENTRY_ELEMENTS)
        k = tl.load(keys + rows[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < HEAD_DIM), other=0)
        v = tl.load(values + rows[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < HEAD_DIM), other=0)
        if QUANTIZED:
            marks = _row_offsets(table, n, valid, KV_HEADS, LOG2_B, ENTRY_ELEMENTS // 2)
            k, k_scale = k.to(query.dtype), tl.load(scales + marks, mask=valid, other=0.0).to(tl.float32)
            v = _dequantized(v, tl.load(scales + (KV_HEADS << LOG2_B) + marks, mask=valid, other=0.0), query)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        if QUANTIZED:
            scores = scores * k_scale[None, :]
        scores = tl.where((valid & (n >= first))[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    acc = acc / tl.maximum(total, 1.0e-30)[:, None]
    if SPLITS == 1:
        tl.store(out + row[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=q_mask)
    else:
        tl.store(partial + (row[:, None] * SPLITS + split) * BLOCK_D + d[None, :], acc, mask=h[:, None] < GROUP)
        tl.store(partial_log + row * SPLITS + split, top + tl.log2(total), mask=h < GROUP)


@triton.jit
def _decode_combine(
    seq_lens, partial, partial_log, out, min_run,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Weigh the runs of one query head by their softmax sums. The order of summation is fixed, so results repeat bit for bit."""
    head, seq = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + seq)
    _, begin, chunk = _runs(length, min_run, WINDOW, SPLITS, BLOCK_N)
    used = tl.cdiv(length - begin, chunk)
    row = seq.to(tl.int64) * HEADS + head
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    logs = tl.load(partial_log + row * SPLITS + s, mask=s < used, other=float("-inf"))
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), -3.0e38))
    parts = tl.load(partial + (row * SPLITS + s[:, None]) * BLOCK_D + d[None, :], mask=s[:, None] < used, other=0.0)
    # An empty sequence yields zeros.
    result = tl.sum(parts * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1.0e-30)
    tl.store(out + row * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _attend_tiles(
    query, keys, values, scales, table, acc, total, top, start, end, length, position, scale,
    MASKED: tl.constexpr, KEY_ROW: tl.constexpr, HEAD_DIM: tl.constexpr, LOG2_B: tl.constexpr, ENTRY_ELEMENTS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Fold the keys start .. end - 1 into the running softmax of a tile of rows. Without MASKED every row sees every key."""
    d = tl.arange(0, BLOCK_D)
    for n0 in tl.range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        valid = n < length
        if MASKED:
            rows = _row_offsets(table, n, valid, KEY_ROW, LOG2_B, ENTRY_ELEMENTS)
            k = tl.load(keys + rows[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < HEAD_DIM), other=0)
            v = tl.load(values + rows[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < HEAD_DIM), other=0)
        else:
            rows = _row_offsets(table, n, None, KEY_ROW, LOG2_B, ENTRY_ELEMENTS)
            if BLOCK_D == HEAD_DIM:
                k = tl.load(keys + rows[:, None] + d[None, :])
                v = tl.load(values + rows[:, None] + d[None, :])
            else:
                k = tl.load(keys + rows[:, None] + d[None, :], mask=d[None, :] < HEAD_DIM, other=0)
                v = tl.load(values + rows[:, None] + d[None, :], mask=d[None, :] < HEAD_DIM, other=0)
        if QUANTIZED:
            KV_HEADS: tl.constexpr = KEY_ROW // HEAD_DIM
            if MASKED:
                marks = _row_offsets(table, n, valid, KV_HEADS, LOG2_B, ENTRY_ELEMENTS // 2)
                k_scale = tl.load(scales + marks, mask=valid, other=0.0)
                v_scale = tl.load(scales + (KV_HEADS << LOG2_B) + marks, mask=valid, other=0.0)
            else:
                marks = _row_offsets(table, n, None, KV_HEADS, LOG2_B, ENTRY_ELEMENTS // 2)
                k_scale = tl.load(scales + marks)
                v_scale = tl.load(scales + (KV_HEADS << LOG2_B) + marks)
            k, v = k.to(query.dtype), _dequantized(v, v_scale, query)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if QUANTIZED:
            scores = scores * k_scale.to(tl.float32)[None, :]
        if MASKED:
            visible = (n[None, :] <= position[:, None]) & valid[None, :]
            if WINDOW > 0:
                visible = visible & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores * scale, float("-inf"))
            # A row may not have seen any key so far: keep its maximum finite.
            new_top = tl.maximum(tl.maximum(top, tl.max(scores, 1)), -3.0e38)
            weights = tl.exp2(scores - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def _prefill(
    q, pool, block_table, cu_seqlens, seq_lens, out, scale, num_seqs, q_token_stride, q_head_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LOG2_B: tl.constexpr, ENTRY_ELEMENTS: tl.constexpr,
    WINDOW: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One key head, one tile of BLOCK_M / GROUP_ROWS tokens with the query heads of that key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    KEY_ROW: tl.constexpr = KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    # Late tiles see the most keys: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence s owns the tiles from cu_seqlens[s] / TOKENS + s on; the last such s is the one (some of its tiles may be empty).
    low, high = tile * 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    seq = low
    q_start = tl.load(cu_seqlens + seq)
    q_len = tl.load(cu_seqlens + seq + 1) - q_start
    token0 = (tile - (q_start // TOKENS + seq)) * TOKENS
    if token0 >= q_len:
        return
    length = tl.load(seq_lens + seq)
    past = length - q_len

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token, head = token0 + m // GROUP_ROWS, m % GROUP_ROWS
    row_mask = (token < q_len) & (head < GROUP)
    position = past + token
    q_row = (q_start + token).to(tl.int64)
    q_head = kv_head * GROUP + head
    q_mask = row_mask[:, None] & (d[None, :] < HEAD_DIM)
    query = tl.load(q + (q_row * q_token_stride + q_head * q_head_stride)[:, None] + d[None, :], mask=q_mask, other=0.0)
    if QUANTIZED:
        keys = pool.to(tl.pointer_type(tl.int8)) + kv_head * HEAD_DIM
    else:
        keys = pool.to(tl.pointer_type(query.dtype)) + kv_head * HEAD_DIM
    values = keys + (KEY_ROW << LOG2_B)
    # Scales of 2 bytes lie behind both halves of codes of 1 byte; read only where there are some.
    scales = pool.to(tl.pointer_type(tl.float16)) + (KEY_ROW << LOG2_B) + kv_head
    table = block_table + seq.to(tl.int64) * table_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = past + tl.minimum(token0 + TOKENS, q_len)  # the tile's last row sees keys up to end - 1
    full_end = (past + token0 + 1) // BLOCK_N * BLOCK_N  # keys below are seen by every row
    start = end * 0
    full_start = end * 0
    if WINDOW > 0:
        start = tl.maximum(past + token0 - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(past + token0 + TOKENS - WINDOW, 0), BLOCK_N) * BLOCK_N
        full_start = tl.minimum(full_start, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        full_end = tl.maximum(full_end, full_start)
        acc, total, top = _attend_tiles(
            query, keys, values, scales, table, acc, total, top, start, full_start, end, position, scale,
            True, KEY_ROW, HEAD_DIM, LOG2_B, ENTRY_ELEMENTS, WINDOW, BLOCK_D, BLOCK_N, PRECISION, QUANTIZED,
        )  # fmt: skip
    acc, total, top = _attend_tiles(
        query, keys, values, scales, table, acc, total, top, full_start, full_end, end, position, scale,
        False, KEY_ROW, HEAD_DIM, LOG2_B, ENTRY_ELEMENTS, WINDOW, BLOCK_D, BLOCK_N, PRECISION, QUANTIZED,
    )  # fmt: skip
    acc, total, top = _attend_tiles(
        query, keys, values, scales, table, acc, total, top, full_end, end, end, position, scale,
        True, KEY_ROW, HEAD_DIM, LOG2_B, ENTRY_ELEMENTS, WINDOW, BLOCK_D, BLOCK_N, PRECISION, QUANTIZED,
    )  # fmt: skip
    acc = acc / tl.maximum(total, 1.0e-30)[:, None]
    offsets = (q_row * HEADS + q_head) * HEAD_DIM
    tl.store(out + offsets[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _store(
    k, v, pool, block_table, positions, token_seqs, k_token_stride, v_token_stride, table_stride,
    KEY_ROW: tl.constexpr, LOG2_B: tl.constexpr, ENTRY_ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token's keys and values [KEY_ROW] each into its page."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    if position < 0:
        return
    seq = token
    if token_seqs is not None:
        seq = tl.load(token_seqs + token).to(tl.int64)
    row = _row_offsets(block_table + seq * table_stride, position, None, KEY_ROW, LOG2_B, ENTRY_ELEMENTS)
    i = tl.arange(0, BLOCK)
    keys = pool.to(tl.pointer_type(k.dtype.element_ty)) + row
    tl.store(keys + i, tl.load(k + token * k_token_stride + i, mask=i < KEY_ROW), mask=i < KEY_ROW)
    tl.store(keys + (KEY_ROW << LOG2_B) + i, tl.load(v + token * v_token_stride + i, mask=i < KEY_ROW), mask=i < KEY_ROW)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype is torch.float32 else "tf32"


def _entry_elements(x: Tensor, layout: KVLayout) -> int:
    """Elements of a page that lie in ENTRY_BYTES."""
    return ENTRY_BYTES if layout.quantized else ENTRY_BYTES // x.element_size()


def num_splits(max_tokens: int, min_run: int) -> int:
    """Runs that the keys are cut into: a function of the longest possible sequence alone, so that batches do not change results."""
    return int(min(MAX_SPLITS, triton.next_power_of_2(max(1, -(-max_tokens // min_run)))))


def decode(
    q: Tensor, pool: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, layout: KVLayout, scale: float, window: int | None,
    tiles: DecodeTiles | None = None,
) -> None:  # fmt: skip
    """See `rimuru_kernels.paged_attention.paged_attention_decode`; arguments are taken as checked. out [S, H, D] contiguous."""
    seqs, heads, head_dim = q.shape
    tiles = tiles or decode_tiles(head_dim, q.element_size())
    min_run = tiles.keys * tiles.min_run
    splits = num_splits(block_table.shape[1] * layout.block_tokens, min_run)
    block_d = max(16, triton.next_power_of_2(head_dim))
    group = heads // layout.kv_heads
    partial = torch.empty((seqs, heads, splits, block_d) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    partial_log = torch.empty((seqs, heads, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    _decode_split[(layout.kv_heads, splits, seqs)](
        q, pool, block_table, seq_lens, partial, partial_log, out, scale * LOG2_E, q.stride(0), q.stride(1), block_table.stride(0),
        min_run, HEADS=heads, KV_HEADS=layout.kv_heads, HEAD_DIM=head_dim, LOG2_B=layout.log2_block_tokens,
        ENTRY_ELEMENTS=_entry_elements(q, layout), WINDOW=window or 0, SPLITS=splits,
        BLOCK_H=max(16, triton.next_power_of_2(group)), BLOCK_D=block_d, BLOCK_N=tiles.keys, PRECISION=_precision(q.dtype),
        QUANTIZED=layout.quantized,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        _decode_combine[(heads, seqs)](
            seq_lens, partial, partial_log, out, min_run, HEADS=heads, HEAD_DIM=head_dim, WINDOW=window or 0, SPLITS=splits,
            BLOCK_D=block_d, BLOCK_N=tiles.keys, BLOCK_S=triton.next_power_of_2(splits), num_warps=4 if splits * block_d <= 16384 else 8,
        )  # fmt: skip


def prefill(
    q: Tensor, pool: Tensor, block_table: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, out: Tensor, layout: KVLayout, scale: float,
    window: int | None, tiles: PrefillTiles | None = None,
) -> None:  # fmt: skip
    """See `rimuru_kernels.paged_attention.paged_attention_prefill`; arguments are taken as checked. out [T, H, D] contiguous."""
    tokens, heads, head_dim = q.shape
    seqs = seq_lens.shape[0]
    tiles = tiles or prefill_tiles(head_dim, q.element_size())
    group_rows = triton.next_power_of_2(heads // layout.kv_heads)
    rows = max(tiles.rows, group_rows)
    _prefill[(layout.kv_heads, tokens // (rows // group_rows) + seqs)](
        q, pool, block_table, cu_seqlens, seq_lens, out, scale * LOG2_E, seqs, q.stride(0), q.stride(1), block_table.stride(0),
        HEADS=heads, KV_HEADS=layout.kv_heads, HEAD_DIM=head_dim, LOG2_B=layout.log2_block_tokens,
        ENTRY_ELEMENTS=_entry_elements(q, layout), WINDOW=window or 0, GROUP_ROWS=group_rows, BLOCK_M=rows,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_N=tiles.keys, PRECISION=_precision(q.dtype),
        QUANTIZED=layout.quantized,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip


def store(k: Tensor, v: Tensor, pool: Tensor, block_table: Tensor, positions: Tensor, token_seqs: Tensor | None, layout: KVLayout) -> None:
    """See `rimuru_kernels.paged_attention.store_kv_entries`; arguments are taken as checked."""
    if layout.quantized:
        block_g, block_d = triton.next_power_of_2(layout.kv_heads), triton.next_power_of_2(layout.head_dim)
        store_quantized[(k.shape[0],)](
            k, v, pool, block_table, positions, token_seqs, k.stride(0), v.stride(0), block_table.stride(0),
            KV_HEADS=layout.kv_heads, HEAD_DIM=layout.head_dim, LOG2_B=layout.log2_block_tokens, ENTRY_BYTES=ENTRY_BYTES,
            BLOCK_G=block_g, BLOCK_D=block_d, num_warps=4 if block_g * block_d >= 512 else 1,
        )  # fmt: skip
        return
    width = layout.kv_heads * layout.head_dim
    _store[(k.shape[0],)](
        k, v, pool, block_table, positions, token_seqs, k.stride(0), v.stride(0), block_table.stride(0),
        KEY_ROW=width, LOG2_B=layout.log2_block_tokens, ENTRY_ELEMENTS=ENTRY_BYTES // k.element_size(),
        BLOCK=triton.next_power_of_2(width), num_warps=4 if width >= 512 else 1,
    )  # fmt: skip
