# mypy: ignore-errors
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""The grouped product over packed weights for tiles of few pairs, where reading the weights is all that should take time.

Codes become numbers in the registers in which the matrix units want the weights, and only codes pass through shared memory. A program is
one warp. It takes 64 bytes of each of its weight rows at a time, of which every fourth lane reads 16 neighbouring bytes: a lane's bytes
have their scales to themselves. The order in which the matrix units add up is free, so a lane's bytes are columns that this lane would
hold anyway, and no number moves from lane to lane. The bytes of the next turns are on their way while this one's are multiplied.

FMT describes a row tile (see `packed_weights.kernel`), CODE is of `packed_weights.words.machine_code`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.fused_moe.kernel import TILE_FIELDS
from rimuru_kernels.fused_moe.packed_rows import page_of
from rimuru_kernels.packed_weights.kernel import factor_of, load_where
from rimuru_kernels.packed_weights.words import from_words, triples


@triton.jit
def _load_codes(page, local, start, FMT: tl.constexpr, WHOLE: tl.constexpr):
    """Words [BN, 16] of the 64 bytes from `start` on of the rows `local` [BN, 1] of `page`, and their high bits (or the words again).

    High bits are moved so that the first half's begin at bit 0 of each byte; see `format.py` for where they lie.
    """
    KIND: tl.constexpr = FMT[0]
    ROW_WORDS: tl.constexpr = FMT[8] // 4
    word = start // 4 + tl.arange(0, 16)[None, :]
    keep = None
    if not WHOLE:
        keep = local * 0 + word < ROW_WORDS
    words = load_where(page.to(tl.pointer_type(tl.int32)) + (local * ROW_WORDS + word), keep)
    high = words
    if (KIND == "int5") | (KIND == "int6"):
        OWN: tl.constexpr = 2 if KIND == "int5" else 4
        BITS: tl.constexpr = 1 if KIND == "int5" else 2
        place = local * (FMT[10] // 4) + word // 8 * OWN + word % OWN
        high = load_where((page + FMT[9]).to(tl.pointer_type(tl.int32)) + place, keep) >> (word % 8 // OWN * BITS)
    return words, high


@triton.jit
def _wide(v, BN: tl.constexpr):
    """[4 · BN], a number a lane, as [BN, 16], one a word."""
    return tl.reshape(tl.broadcast_to(tl.reshape(v, [BN, 4, 1]), [BN, 4, 4]), [BN, 16])


@triton.jit
def _ordered(v, R: tl.constexpr):
    """[R, 16], a number for each word, in the order of the matrix units: a lane has columns 2·lane, 2·lane + 1 and both plus eight."""
    return tl.reshape(tl.permute(tl.reshape(v, [R, 4, 2, 2]), (0, 2, 1, 3)), [R, 16])


@triton.jit
def _half_step(acc, v_0, v_1, v_2, v_3, x, BM: tl.constexpr, BN: tl.constexpr):
    """acc [BN, BM] plus the products of weights of four bytes of words [BN, 16] with their activations."""
    acc = tl.dot(_ordered(v_0, BN), tl.trans(_ordered(x[0], BM)), acc)
    acc = tl.dot(_ordered(v_1, BN), tl.trans(_ordered(x[1], BM)), acc)
    acc = tl.dot(_ordered(v_2, BN), tl.trans(_ordered(x[2], BM)), acc)
    return tl.dot(_ordered(v_3, BN), tl.trans(_ordered(x[3], BM)), acc)


@triton.jit
def _step(
    acc, x, y, page, local, page_4, local_4, start,
    FMT: tl.constexpr, CODE: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] plus the products of the 64 bytes from `start` on of BN rows with activations from `_activations`."""
    HALVES: tl.constexpr = FMT[18]
    codes, high = _load_codes(page, local, start, FMT, WHOLE)
    byte = start + tl.arange(0, 4 * BN) % 4 * 16
    if WHOLE:
        a, b = triples(page_4, local_4, byte, None, FMT, dtype)
    else:
        a, b = triples(page_4, local_4, byte, byte < FMT[8], FMT, dtype)
    a = (_wide(a[0], BN), _wide(a[1], BN), _wide(a[2], BN))
    b = (_wide(b[0], BN), _wide(b[1], BN), _wide(b[2], BN))
    v = from_words(codes, high, a, b, FMT, CODE, dtype)
    acc = _half_step(acc, v[0], v[1], v[2], v[3], x, BM, BN)
    if HALVES == 2:
        acc = _half_step(acc, v[4], v[5], v[6], v[7], y, BM, BN)
    return acc


@triton.jit
def _activations(a_place, start, K: tl.constexpr, BM: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr):
    """Activations that meet the codes of the 64 bytes from `start` on: for each byte of a word, of both halves, [BM, 16], one a word."""
    HALVES: tl.constexpr = FMT[18]
    column = start * HALVES + tl.arange(0, 64 * HALVES)[None, :]
    if WHOLE:
        x = tl.load(a_place + column)
    else:
        x = tl.load(a_place + column, mask=column < K, other=0.0)
    if HALVES == 2:
        first, second = tl.split(tl.permute(tl.reshape(x, [BM, 2, 2, 32]), (0, 1, 3, 2)))
        first, second = _bytes(first, BM), _bytes(second, BM)
    else:
        first = _bytes(x, BM)
        second = first
    return first, second


@triton.jit
def _bytes(x, BM: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, [BM, 16, 2, 2]))
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3


@triton.jit
def _place(pool, entries_ptr, expert, first, index, part: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, ONE: tl.constexpr):
    """Where the pages of weight rows first + index begin, and the rows' numbers there. ONE: all lie in one page, with one pointer."""
    if ONE:
        entry, local = page_of(entries_ptr, expert, first, part, N, TILES, None)
        local = local + index
    else:
        entry, local = page_of(entries_ptr, expert, tl.minimum(first + index, N - 1), part, N, TILES, None)
    return pool + entry * 256, local


@triton.jit
def direct_gemm(
    a, pool, out_ptr, sorted_ptr, table_ptr, entries_ptr,
    TOPK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr, CODE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One tile of BM pairs of one expert times BN weight rows (where GATED, of gate and of up); see `kernel.grouped_gemm`.

    ONE: a block's rows always lie in one page, and there are no rows behind the last block's.
    """
    ROW_BYTES: tl.constexpr = FMT[8]
    HALVES: tl.constexpr = FMT[18]
    WHOLE: tl.constexpr = (ROW_BYTES % 64 == 0) & (ROW_BYTES * HALVES == K)
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    dtype: tl.constexpr = a.dtype.element_ty
    info = table_ptr + tl.program_id(0) // BLOCKS * TILE_FIELDS
    block = tl.program_id(0) % BLOCKS
    begin = tl.load(info)
    end = tl.load(info + 1)
    expert = tl.load(info + 2)
    if begin >= end:
        return
    row = begin + tl.arange(0, BM)
    # Rows past the end repeat the last one: always readable, never stored.
    inside = tl.minimum(row, end - 1)
    pair = tl.load(sorted_ptr + inside)
    a_row = pair // TOPK if GATED else inside
    a_place = a + a_row.to(tl.int64)[:, None] * K
    part: tl.constexpr = 0 if GATED else 2
    first = block * BN
    # Rows of codes, and of scales once for each of four lanes.
    index, index_4 = tl.arange(0, BN)[:, None], tl.arange(0, 4 * BN) // 4
    page, local = _place(pool, entries_ptr, expert, first, index, part, N, TILES, ONE)
    page_4, local_4 = _place(pool, entries_ptr, expert, first, index_4, part, N, TILES, ONE)
    if GATED:
        up_page, up_local = _place(pool, entries_ptr, expert, first, index, 1, N, TILES, ONE)
        up_page_4, up_local_4 = _place(pool, entries_ptr, expert, first, index_4, 1, N, TILES, ONE)
    g = tl.zeros([BN, BM], tl.float32)
    u = tl.zeros([BN, BM], tl.float32)
    for start in range(0, ROW_BYTES, 64):
        x, y = _activations(a_place, start, K, BM, FMT, WHOLE)
        g = _step(g, x, y, page, local, page_4, local_4, start, FMT, CODE, WHOLE, BM, BN, dtype)
        if GATED:
            u = _step(u, x, y, up_page, up_local, up_page_4, up_local_4, start, FMT, CODE, WHOLE, BM, BN, dtype)
    n = first + tl.arange(0, BN)
    g *= factor_of(page, None, FMT)
    out_row = pair
    if GATED:
        u *= factor_of(up_page, None, FMT)
        g = g / (1.0 + tl.exp(-g)) * u
        out_row = row
    keep = (row < end)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + out_row.to(tl.int64)[:, None] * N + n[None, :], tl.trans(g.to(out_ptr.dtype.element_ty)), mask=keep)
