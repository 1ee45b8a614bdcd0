# mypy: ignore-errors
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""Mixture-of-experts feed-forward on the GPU, reading expert weights where they lie: Triton code. Launched by `launch.py`.

Letters: T tokens, k slots per token (TOPK); a pair is one (token, slot) and has number token·k + slot; E experts, d hidden size (D), f
expert intermediate size (F), t row tiles per projection (TILES).

    h[pair]    = silu(W_gate x[token]) * (W_up x[token])       W_gate, W_up [f, d] of the expert topk_ids[pair]
    out[token] = Σ over slots of topk_weights[pair] · W_down h[pair]                   W_down [d, f]

Weights, PAGED: `w` is the pool seen as elements of the weights' dtype; `entries` int32 [E, 3·t] holds gate tiles, up tiles, down tiles. Row
n of a projection lies in tile n // (rows/t), at row n % (rows/t) of it, and starts at element entry·UNIT + row·columns, in 64-bit
arithmetic, where UNIT is 256 bytes counted in elements. Not PAGED (the yardstick): `w` is one contiguous tensor, gate-and-up [E, 2f, d] or
down [E, d, f].

Few pairs: `gate_up_rows`, then `down_rows`; every pair reads its expert's rows, pairs that share an expert meet in the L2 cache.
Many pairs: `route` (or, for very many, `count_pairs` and `place_pairs`) sorts pairs by expert, `tile_table` cuts them into tiles of BM
rows (where it is not so many, `route_tiles` does both), `grouped_gemm` runs twice (gate and up, then down, each pair's contribution
written to its own row), `sum_slots` adds the slots up in ascending order. Grids depend on T only, so all of it can be captured.

A negative id means no expert: that slot adds nothing. Each sum has one fixed order, so the result does not depend on where the pages lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rimuru_kernels.expert_fetch.kernel import copy_pieces

TILE_FIELDS = tl.constexpr(8)
"""int32 per row of the tile table: first row, end row, expert, gate entry, up entry, down entry, two unused."""


@triton.jit
def _row_start(
    entries_ptr, expert, row, part, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr, PAGED: tl.constexpr
):
    """First element of rows of one projection of `expert`; `part` 0 is gate, 1 up, 2 down; expert, row and part broadcast together."""
    if PAGED:
        if TILES == 1:
            entry = tl.load(entries_ptr + expert * 3 + part)
            start = entry.to(tl.int64) * UNIT + row.to(tl.int64) * COLS
        else:
            TILE_ROWS: tl.constexpr = ROWS // TILES
            entry = tl.load(entries_ptr + (expert * 3 + part) * TILES + row // TILE_ROWS)
            start = entry.to(tl.int64) * UNIT + (row % TILE_ROWS).to(tl.int64) * COLS
    elif part == 2:
        start = (expert.to(tl.int64) * ROWS + row) * COLS
    else:
        start = (expert.to(tl.int64) * (2 * ROWS) + part * ROWS + row) * COLS
    return start


@triton.jit
def gate_up_rows(
    x_ptr,
    ids_ptr,
    w_ptr,
    entries_ptr,
    h_ptr,
    sources,
    pages,
    count,
    TOPK: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PAGED: tl.constexpr,
    COPIERS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
):
    """h [P, f] of a few pairs. Grid (P, COPIERS + ceil(f / BN)): pairs fastest, so that pairs of one expert read its rows at the same time.

    The first COPIERS·P programs copy the down projections that are still missing (see `expert_fetch`), which `down_rows` needs, while the
    others compute; neither waits for the other.
    """
    pair = tl.program_id(0)
    if COPIERS > 0:  # noqa: SIM102 - known when compiling
        if tl.program_id(1) < COPIERS:
            program = tl.program_id(1) * tl.num_programs(0) + pair
            copy_pieces(
                sources, pages, count, w_ptr, program, tl.num_programs(0) * COPIERS,
                2 * TILES, 3 * TILES, 3 * TILES, PAGE_WORDS, PAGE_WORDS, WORDS,
            )  # fmt: skip
            return
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    if expert < 0:
        return
    row = (tl.program_id(1) - COPIERS) * BN + tl.arange(0, BN)
    inside = tl.minimum(row, F - 1)
    gate = w_ptr + _row_start(entries_ptr, expert, inside, 0, F, D, TILES, UNIT, PAGED)
    up = w_ptr + _row_start(entries_ptr, expert, inside, 1, F, D, TILES, UNIT, PAGED)
    x_ptr += (pair // TOPK).to(tl.int64) * D
    col = tl.arange(0, BK)
    gate_sum = tl.zeros([BN, BK], tl.float32)
    up_sum = tl.zeros([BN, BK], tl.float32)
    for start in tl.static_range(0, D, BK):
        if start + BK <= D:
            gate_part = tl.load(gate[:, None] + (start + col)[None, :])
            up_part = tl.load(up[:, None] + (start + col)[None, :])
            x = tl.load(x_ptr + start + col).to(tl.float32)
        else:
            keep = start + col < D
            gate_part = tl.load(gate[:, None] + (start + col)[None, :], mask=keep[None, :], other=0.0)
            up_part = tl.load(up[:, None] + (start + col)[None, :], mask=keep[None, :], other=0.0)
            x = tl.load(x_ptr + start + col, mask=keep, other=0.0).to(tl.float32)
        gate_sum += gate_part.to(tl.float32) * x[None, :]
        up_sum += up_part.to(tl.float32) * x[None, :]
    g = tl.sum(gate_sum, 1)
    h = g / (1.0 + tl.exp(-g)) * tl.sum(up_sum, 1)
    tl.store(h_ptr + pair * F + row, h.to(h_ptr.dtype.element_ty), mask=row < F)


@triton.jit
def down_rows(
    h_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    entries_ptr,
    out_ptr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PAGED: tl.constexpr,
):
    """out [T, d] of a few tokens. Grid (T, ceil(d / BN)); SLOTS is TOPK rounded up to a power of two, and all slots are read at once."""
    token = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    pair = token * TOPK + slot
    expert = tl.load(ids_ptr + pair, mask=slot < TOPK, other=-1).to(tl.int32)
    valid = expert >= 0
    weight = tl.load(weights_ptr + pair, mask=valid, other=0.0)
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = tl.minimum(row, D - 1)
    if PAGED:
        if TILES == 1:
            entry = tl.load(entries_ptr + expert * 3 + 2, mask=valid, other=0)[:, None]
            local = inside
        else:
            TILE_ROWS: tl.constexpr = D // TILES
            place = (expert * 3 + 2)[:, None] * TILES + (inside // TILE_ROWS)[None, :]
            entry = tl.load(entries_ptr + place, mask=valid[:, None], other=0)
            local = inside % TILE_ROWS
        begin = entry.to(tl.int64) * UNIT + local[None, :].to(tl.int64) * F
    else:
        begin = (expert.to(tl.int64)[:, None] * D + inside[None, :]) * F
    col = tl.arange(0, BK)
    total = tl.zeros([SLOTS, BN, BK], tl.float32)
    for start in tl.static_range(0, F, BK):
        keep = valid[:, None] & (start + col < F)[None, :]
        part = tl.load(w_ptr + begin[:, :, None] + (start + col)[None, None, :], mask=keep[:, None, :], other=0.0)
        h = tl.load(h_ptr + pair[:, None] * F + (start + col)[None, :], mask=keep, other=0.0)
        total += part.to(tl.float32) * h.to(tl.float32)[:, None, :]
    y = tl.sum(tl.sum(total, 2) * weight[:, None], 0)
    tl.store(out_ptr + token.to(tl.int64) * D + row, y.to(out_ptr.dtype.element_ty), mask=row < D)


@triton.jit
def _ranks(found):
    """How many of found [R, C] (0 or 1) come before each place, row after row. In two steps: one long scan crosses all warps often."""
    in_row = tl.sum(found, 1)
    rows_before = tl.cumsum(in_row, 0) - in_row
    return rows_before[:, None] + tl.cumsum(found, 1) - found


@triton.jit(do_not_specialize=["num_pairs"])
def route(ids_ptr, sorted_ptr, offsets_ptr, num_pairs, CHUNK: tl.constexpr):
    """Pairs sorted by expert, in ascending order within one. Program e writes the pairs of expert e to sorted[offsets[e]:offsets[e + 1]].

    Every program counts for itself how many pairs belong to lower experts, so that one launch does and nothing needs clearing.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    below = tl.zeros([CHUNK // 64, 64], tl.int32)
    mine = tl.zeros([CHUNK // 64, 64], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        below += ((ids >= 0) & (ids < expert)).to(tl.int32)
        mine += (ids == expert).to(tl.int32)
    begin = tl.sum(tl.sum(below, 1), 0)
    count = tl.sum(tl.sum(mine, 1), 0)
    tl.store(offsets_ptr + expert, begin)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets_ptr + expert + 1, begin + count)
    if count > 0:
        _place(ids_ptr, sorted_ptr, expert, begin, num_pairs, CHUNK)


@triton.jit
def _place(ids_ptr, sorted_ptr, expert, begin, num_pairs, CHUNK: tl.constexpr):
    """Write the pairs of one expert to sorted[begin:], in ascending order."""
    lane = tl.arange(0, CHUNK // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        found = (ids == expert).to(tl.int32)
        tl.store(sorted_ptr + begin + _ranks(found), start + lane, mask=found > 0)
        begin += tl.sum(tl.sum(found, 1), 0)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def route_tiles(
    ids_ptr, sorted_ptr, entries_ptr, table_ptr, num_pairs, max_tiles,
    CHUNK: tl.constexpr, BM: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """`route` and `tile_table` in one launch, for few pairs: every program counts the pairs of all experts."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=ids >= 0)
    e = tl.arange(0, EXPERTS)
    tiles = (counts + BM - 1) // BM
    begin = tl.sum(tl.where(e < expert, counts, 0), 0)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    first = tl.sum(tl.where(e < expert, tiles, 0), 0)
    _write_tiles(entries_ptr, table_ptr, expert, begin, begin + count, first, tl.sum(tiles, 0), max_tiles, BM, TILES, PAGED)
    if count > 0:
        _place(ids_ptr, sorted_ptr, expert, begin, num_pairs, CHUNK)


@triton.jit(do_not_specialize=["num_tokens"])
def count_pairs(
    ids_ptr, counts_ptr, num_tokens, num_experts, TOPK: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """counts [chunks, E]: pairs of each expert in each chunk of TOKENS tokens. For many pairs, with `place_pairs`, instead of `route`."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, TOKENS * SLOTS)
    token = chunk * TOKENS + lane // SLOTS
    keep = (token < num_tokens) & (lane % SLOTS < TOPK)
    ids = tl.load(ids_ptr + token * TOPK + lane % SLOTS, mask=keep, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=ids >= 0)
    e = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + chunk * num_experts + e, counts, mask=e < num_experts)


@triton.jit(do_not_specialize=["num_tokens"])
def place_pairs(
    ids_ptr, counts_ptr, sorted_ptr, offsets_ptr, num_tokens, num_experts,
    TOPK: tl.constexpr, TOKENS: tl.constexpr, LINES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """What `route` writes; a program places one chunk of TOKENS tokens, having read the counts of all chunks, LINES at a time."""
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    e = tl.arange(0, EXPERTS)
    line = tl.arange(0, LINES)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, chunks, LINES):
        keep = (first + line < chunks)[:, None] & (e < num_experts)[None, :]
        counts = tl.load(counts_ptr + (first + line)[:, None] * num_experts + e[None, :], mask=keep, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((first + line < chunk)[:, None], counts, 0), 0)
    offsets = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(offsets_ptr + e, offsets, mask=e < num_experts)
        tl.store(offsets_ptr + num_experts, tl.sum(total, 0))
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    here = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for slot in tl.static_range(TOPK):
        ids = tl.load(ids_ptr + token * TOPK + slot, mask=token < num_tokens, other=-1).to(tl.int32)
        here += (ids[:, None] == e[None, :]).to(tl.int32)
    place = (offsets + before)[None, :] + tl.cumsum(here, 0) - here
    for slot in tl.static_range(TOPK):
        ids = tl.load(ids_ptr + token * TOPK + slot, mask=token < num_tokens, other=-1).to(tl.int32)
        mine = ids[:, None] == e[None, :]
        tl.store(sorted_ptr + tl.sum(tl.where(mine, place, 0), 1), token * TOPK + slot, mask=ids >= 0)
        place += mine.to(tl.int32)  # a token may name one expert twice


@triton.jit(do_not_specialize=["max_tiles"])
def tile_table(
    offsets_ptr, entries_ptr, table_ptr, max_tiles, BM: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr, PAGED: tl.constexpr
):
    """Tiles of BM sorted rows, expert after expert, then empty ones. Program e of EXPERTS' real number writes the tiles of expert e.

    Where a projection is one page its entries go along, so that the matrix product finds its page without another dependent read.
    """
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    e = tl.arange(0, EXPERTS)
    low = tl.load(offsets_ptr + e, mask=e < num_experts, other=0)
    high = tl.load(offsets_ptr + e + 1, mask=e < num_experts, other=0)
    tiles = (high - low + BM - 1) // BM
    total = tl.sum(tiles, 0)
    first = tl.sum(tl.where(e < expert, tiles, 0), 0)
    low = tl.load(offsets_ptr + expert)
    high = tl.load(offsets_ptr + expert + 1)
    _write_tiles(entries_ptr, table_ptr, expert, low, high, first, total, max_tiles, BM, TILES, PAGED)


@triton.jit
def _write_tiles(
    entries_ptr, table_ptr, expert, low, high, first, total, max_tiles, BM: tl.constexpr, TILES: tl.constexpr, PAGED: tl.constexpr
):
    """One expert's rows of the table, from `first` on, for its sorted rows low … high - 1, and its share of those behind `total`."""
    num_experts = tl.num_programs(0)
    number = (high - low + BM - 1) // BM
    lane = tl.arange(0, 32)
    for start in range(0, number, 32):
        keep = start + lane < number
        place = table_ptr + (first + start + lane) * TILE_FIELDS
        begin = low + (start + lane) * BM
        tl.store(place, begin, mask=keep)
        tl.store(place + 1, tl.minimum(begin + BM, high), mask=keep)
        tl.store(place + 2, lane * 0 + expert, mask=keep)
        if PAGED and TILES == 1:
            for part in tl.static_range(3):
                tl.store(place + 3 + part, lane * 0 + tl.load(entries_ptr + expert * 3 + part), mask=keep)
    for start in range(total + expert * 32, max_tiles, num_experts * 32):
        keep = start + lane < max_tiles
        place = table_ptr + (start + lane) * TILE_FIELDS
        tl.store(place, lane * 0, mask=keep)
        tl.store(place + 1, lane * 0, mask=keep)


@triton.jit
def _multiply_tile(
    a, w, out_ptr, sorted_ptr, entries_ptr, info, begin, end, expert, block,
    TOPK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, PAGED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Sorted rows begin … begin + BM - 1, as far as they are below `end`, times one block of weight rows; see `grouped_gemm`."""
    OUT: tl.constexpr = BN // 2 if GATED else BN
    row = begin + tl.arange(0, BM)
    # Rows past the end repeat the last one: always readable, never stored.
    inside = tl.minimum(row, end - 1)
    pair = tl.load(sorted_ptr + inside)
    k = tl.arange(0, BK)
    if GATED or not DESCRIBED:
        a_row = pair // TOPK if GATED else inside
        a_place = a + a_row.to(tl.int64)[:, None] * K + k[None, :]
    first = block * OUT

    if DESCRIBED:
        TILE_ROWS: tl.constexpr = N // TILES
        local = first % TILE_ROWS
        if PAGED:
            if TILES == 1:
                entry = tl.load(info + (3 if GATED else 5))
                up_entry = tl.load(info + 4)
            else:
                entry = tl.load(entries_ptr + (expert * 3 + (0 if GATED else 2)) * TILES + first // TILE_ROWS)
                up_entry = tl.load(entries_ptr + (expert * 3 + 1) * TILES + first // TILE_ROWS)
        else:
            MATRIX: tl.constexpr = N * K // UNIT
            entry = expert * (2 * MATRIX if GATED else MATRIX)
            up_entry = entry + MATRIX
        if GATED:
            g = tl.zeros([BM, OUT], tl.float32)
            u = tl.zeros([BM, OUT], tl.float32)
            for start in range(0, K, BK):
                a_part = tl.load(a_place)
                gate_part = tl.reshape(w.load([entry, local, start]), [OUT, BK])
                up_part = tl.reshape(w.load([up_entry, local, start]), [OUT, BK])
                g = tl.dot(a_part, tl.trans(gate_part), g, input_precision=PRECISION)
                u = tl.dot(a_part, tl.trans(up_part), u, input_precision=PRECISION)
                a_place += BK
        else:
            acc = tl.zeros([BM, BN], tl.float32)
            for start in range(0, K, BK):
                part = tl.reshape(w.load([entry, local, start]), [BN, BK])
                acc = tl.dot(a.load([begin, start]), tl.trans(part), acc, input_precision=PRECISION)
    else:
        n = block * BN + tl.arange(0, BN)
        if GATED:
            feature = tl.minimum(n // 2, N - 1)
            is_up = n % 2
            if PAGED and TILES == 1:
                entry = tl.where(is_up == 1, tl.load(info + 4), tl.load(info + 3))
                begin_n = entry.to(tl.int64) * UNIT + feature.to(tl.int64) * K
            elif PAGED:
                begin_n = _row_start(entries_ptr, expert, feature, is_up, N, K, TILES, UNIT, PAGED)
            else:
                begin_n = (expert.to(tl.int64) * (2 * N) + is_up * N + feature) * K
        else:
            feature = tl.minimum(n, N - 1)
            if PAGED and TILES == 1:
                begin_n = tl.load(info + 5).to(tl.int64) * UNIT + feature.to(tl.int64) * K
            else:
                begin_n = _row_start(entries_ptr, expert, feature, 2, N, K, TILES, UNIT, PAGED)
        b_place = w + begin_n[:, None] + k[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            if K % BK == 0:
                a_part = tl.load(a_place)
                b_part = tl.load(b_place)
            else:
                a_part = tl.load(a_place, mask=(start + k < K)[None, :], other=0.0)
                b_part = tl.load(b_place, mask=(start + k < K)[None, :], other=0.0)
            acc = tl.dot(a_part, tl.trans(b_part), acc, input_precision=PRECISION)
            a_place += BK
            b_place += BK
        if GATED:
            g, u = tl.split(tl.reshape(acc, [BM, OUT, 2]))

    if GATED:
        result = g / (1.0 + tl.exp(-g)) * u
        out_row = row
    else:
        result = acc
        out_row = pair
    column = first + tl.arange(0, OUT)
    keep = (row < end)[:, None] & (column < N)[None, :]
    tl.store(out_ptr + out_row.to(tl.int64)[:, None] * N + column[None, :], result.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["max_tiles"])
def grouped_gemm(
    a, a_half, w, out_ptr, sorted_ptr, table_ptr, entries_ptr, max_tiles,
    TOPK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, PAGED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """One tile of BM pairs of one expert times BN weight rows. HALVES: tiles that are at most half full take half the work.

    GATED: a = x [T, d], N = f, K = d, weights gate and up; out = h [P, f] in sorted order. Otherwise a = h, N = d, K = f, weights down;
    out = contributions [P, d] in pair order.

    DESCRIBED (Hopper's copy engine): `w` describes the weights as overlapping [units of 256 bytes, rows, K] with strides [UNIT, K, 1], so
    that an entry is a coordinate and one description reaches every page; where not GATED, `a` and `a_half` describe h in boxes of BM and
    BM / 2 rows. Otherwise they are pointers, and gate and up rows alternate in one block: both halves of a feature end in one thread, and
    SwiGLU costs no exchange.
    """
    OUT: tl.constexpr = BN // 2 if GATED else BN
    BLOCKS: tl.constexpr = (N + OUT - 1) // OUT
    # Tiles of GROUP neighbours (often one expert's) go through the same weight rows side by side: the rows are read from memory once.
    group = tl.program_id(0) // (GROUP * BLOCKS)
    within = tl.program_id(0) % (GROUP * BLOCKS)
    group_tiles = tl.minimum(max_tiles - group * GROUP, GROUP)
    tile = group * GROUP + within % group_tiles
    block = within // group_tiles
    info = table_ptr + tile * TILE_FIELDS
    begin = tl.load(info)
    end = tl.load(info + 1)
    expert = tl.load(info + 2)
    if begin >= end:
        return
    if HALVES:  # noqa: SIM102 - known when compiling
        if end - begin <= BM // 2:
            _multiply_tile(
                a_half, w, out_ptr, sorted_ptr, entries_ptr, info, begin, end, expert, block,
                TOPK, N, K, TILES, UNIT, BM // 2, BN, BK, GATED, PRECISION, PAGED, DESCRIBED,
            )  # fmt: skip
            return
    _multiply_tile(
        a, w, out_ptr, sorted_ptr, entries_ptr, info, begin, end, expert, block,
        TOPK, N, K, TILES, UNIT, BM, BN, BK, GATED, PRECISION, PAGED, DESCRIBED,
    )  # fmt: skip


@triton.jit
def sum_slots(y_ptr, ids_ptr, weights_ptr, out_ptr, TOPK: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, d] = Σ weight · y [T·k, d] over slots in ascending order, in float32. Grid (T, ceil(d / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOPK):
        pair = token * TOPK + slot
        used = tl.load(ids_ptr + pair) >= 0
        limit = tl.where(used, D, 0)  # a slot without an expert was never written
        weight = tl.where(used, tl.load(weights_ptr + pair), 0.0)
        total += weight * tl.load(y_ptr + pair * D + col, mask=col < limit, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + col, total.to(out_ptr.dtype.element_ty), mask=col < D)
