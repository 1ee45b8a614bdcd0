# mypy: ignore-errors
# ruff: noqa: RUF005 - the compiler knows no other way to make a longer tuple
# (Triton's language is a dialect that is compiled, not run: its pointers and blocks have no Python types.)
"""The few-pairs kernels of `kernel.py` over packed weights: the same launches and sums.

FMT describes a row tile (see `packed_weights.kernel`). A program holds the activations in registers and goes through TURNS groups of BN
weight rows with them; HELD groups are always on their way from memory (all of them where TURNS is HELD).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rimuru_kernels.expert_fetch.kernel import copy_pieces
from rimuru_kernels.packed_weights.kernel import load_where
from rimuru_kernels.packed_weights.row_sums import activations, load_rows, sum_rows


@triton.jit
def page_of(entries_ptr, expert, row, part: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, valid):
    """The entry of the page with `row` of a projection, int64, and the row's number in it; `part` 0 is gate, 1 up, 2 down. All broadcast.

    TILES: see `packed_launch.places`; ROWS: of the projection. valid: None, or a mask of expert's shape that says which ones there are.
    """
    TILE_ROWS: tl.constexpr = TILES[3] if part == 2 else TILES[2]
    place = entries_ptr + (expert * TILES[0] + part * TILES[1])
    if TILE_ROWS >= ROWS:
        entry = load_where(place, valid) + row * 0
        local = row
    else:
        entry = load_where(place + row // TILE_ROWS, valid)
        local = row % TILE_ROWS
    return entry.to(tl.int64), local


@triton.jit
def _load_gate_up(
    pool, pool_words, pool_longs, entries_ptr, expert, known, row, unit, valid,
    F: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr, BN: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Rows of gate and of up. known: the pages' entries where each is one page."""
    row = tl.minimum(row, F - 1)[None, :]
    parts = ()
    for part in tl.static_range(2):
        if TILES[2] >= F:
            entry, local = known[part], row
        else:
            entry, local = page_of(entries_ptr, expert, row, part, F, TILES, None)
        parts = parts + (load_rows(pool, pool_words, pool_longs, entry, local, unit, valid, FMT, BN, 0, UNITS, CHUNKS, WIDE, DOTS),)
    return parts


@triton.jit
def _store_hidden(
    held, x, step, unit, h_ptr, row,
    F: tl.constexpr, FMT: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, DOTS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    g = tl.sum(sum_rows(held[0], x, step, unit, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST), 0)
    u = tl.sum(sum_rows(held[1], x, step, unit, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST), 0)
    h = g / (1.0 + tl.exp(-g)) * u
    tl.store(h_ptr + row, h.to(h_ptr.dtype.element_ty), mask=row < F)


@triton.jit
def gate_up_rows(
    x_ptr, quads_ptr, ids_ptr, pool, pool_words, pool_longs, entries_ptr, h_ptr, sources, pages, count,
    TOPK: tl.constexpr, F: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr,
    BN: tl.constexpr, TURNS: tl.constexpr, HELD: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
    DOTS: tl.constexpr, FAST: tl.constexpr,
    COPIERS: tl.constexpr, WORDS: tl.constexpr, PAGE_WORDS: tl.constexpr, COPIED_WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h [P, f] of a few pairs. Grid (P, COPIERS + ceil(f / (BN TURNS))), as in `kernel.gate_up_rows`.

    EARLY: `down_rows` comes next and knows what it may touch before this is done.
    """
    if EARLY:
        gdc_launch_dependents()
    pair = tl.program_id(0)
    if COPIERS > 0:  # noqa: SIM102 - known when compiling
        if tl.program_id(1) < COPIERS:
            program = tl.program_id(1) * tl.num_programs(0) + pair
            copy_pieces(
                sources, pages, count, pool, program, tl.num_programs(0) * COPIERS,
                2 * TILES[1], 2 * TILES[1] + (D + TILES[3] - 1) // TILES[3], TILES[0], PAGE_WORDS, COPIED_WORDS, WORDS,
            )  # fmt: skip
            return
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    if expert < 0:
        return
    first = (tl.program_id(1) - COPIERS) * (BN * TURNS)
    row = first + tl.arange(0, BN)
    unit = tl.arange(0, UNITS)[:, None]
    known = ()
    if TILES[2] >= F:
        known = (page_of(entries_ptr, expert, 0, 0, F, TILES, None)[0], page_of(entries_ptr, expert, 0, 1, F, TILES, None)[0])
    held = ()
    for turn in tl.static_range(HELD):
        held = held + (
            _load_gate_up(
                pool, pool_words, pool_longs, entries_ptr, expert, known, row + turn * BN, unit, None,
                F, TILES, FMT, BN, UNITS, CHUNKS, WIDE, DOTS,
            ),
        )  # fmt: skip
    tl.debug_barrier()  # the assembler would move loads down to where their values are needed
    spread = unit + tl.arange(0, BN)[None, :] * 0
    x, step = activations(x_ptr, quads_ptr, (pair // TOPK).to(tl.int64), spread, None, FMT, UNITS, CHUNKS, WIDE, DOTS)
    h_ptr += pair * F
    if TURNS == HELD:
        for turn in tl.static_range(TURNS):
            _store_hidden(held[turn], x, step, unit, h_ptr, row + turn * BN, F, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST)
    else:
        for lap in range(TURNS // HELD):
            for place in tl.static_range(HELD):
                now = row + (lap * HELD + place) * BN
                _store_hidden(held[0], x, step, unit, h_ptr, now, F, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST)
                wanted = (now + HELD * BN < first + BN * TURNS)[None, :]
                held = held[1:] + (
                    _load_gate_up(
                        pool, pool_words, pool_longs, entries_ptr, expert, known, now + HELD * BN, unit, wanted,
                        F, TILES, FMT, BN, UNITS, CHUNKS, WIDE, DOTS,
                    ),
                )  # fmt: skip


@triton.jit
def _load_down(
    pool, pool_words, pool_longs, entries_ptr, expert, known, row, unit, valid, wanted,
    D: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, UNITS: tl.constexpr,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Rows of down of all slots' experts. known: see `_load_gate_up`; valid: which slots there are; wanted: what of them."""
    row = tl.minimum(row, D - 1)[None, :, None]
    if TILES[3] >= D:
        entry, local = known, row
    else:
        entry, local = page_of(entries_ptr, expert, row, 2, D, TILES, valid)
    return load_rows(pool, pool_words, pool_longs, entry, local, unit, wanted, FMT, BN, SLOTS, UNITS, CHUNKS, WIDE, DOTS)


@triton.jit
def _store_out(
    held, x, step, unit, out_ptr, row,
    D: tl.constexpr, FMT: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, DOTS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    y = tl.sum(tl.sum(sum_rows(held, x, step, unit, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST), 0), 1)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < D)


@triton.jit
def down_rows(
    h_ptr, quads_ptr, ids_ptr, weights_ptr, pool, pool_words, pool_longs, entries_ptr, out_ptr,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, F: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, FMT: tl.constexpr,
    BN: tl.constexpr, TURNS: tl.constexpr, HELD: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
    DOTS: tl.constexpr, FAST: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """out [T, d] of a few tokens. Grid (T, ceil(d / (BN TURNS))), as in `kernel.down_rows`.

    WAITS: the kernel before, `gate_up_rows`, may still run. It writes h; all else has been there when it began. Every program waits, so
    that this kernel ends after that one.
    """
    token = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    pair = token * TOPK + slot
    expert = tl.load(ids_ptr + pair, mask=slot < TOPK, other=-1).to(tl.int32)
    valid = expert >= 0
    weight = tl.load(weights_ptr + pair, mask=valid, other=0.0)[None, None, :]
    expert, valid = expert[None, None, :], valid[None, None, :]
    first = tl.program_id(1) * (BN * TURNS)
    row = first + tl.arange(0, BN)
    unit = tl.arange(0, UNITS)[:, None, None]
    known = expert
    if TILES[3] >= D:
        known = page_of(entries_ptr, expert, 0, 2, D, TILES, valid)[0]
    held = ()
    for turn in tl.static_range(HELD):
        held = held + (
            _load_down(
                pool, pool_words, pool_longs, entries_ptr, expert, known, row + turn * BN, unit, valid, valid,
                D, TILES, FMT, BN, SLOTS, UNITS, CHUNKS, WIDE, DOTS,
            ),
        )  # fmt: skip
    tl.debug_barrier()  # the assembler would move loads down to where their values are needed
    if WAITS:
        gdc_wait()
    spread = unit + tl.arange(0, BN)[None, :, None] * 0
    x, step = activations(h_ptr, quads_ptr, pair[None, None, :].to(tl.int64), spread, valid, FMT, UNITS, CHUNKS, WIDE, DOTS)
    step = step * weight
    out_ptr += token.to(tl.int64) * D
    if TURNS == HELD:
        for turn in tl.static_range(TURNS):
            _store_out(held[turn], x, step, unit, out_ptr, row + turn * BN, D, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST)
    else:
        for lap in range(TURNS // HELD):
            for place in tl.static_range(HELD):
                now = row + (lap * HELD + place) * BN
                _store_out(held[0], x, step, unit, out_ptr, now, D, FMT, UNITS, CHUNKS, WIDE, DOTS, FAST)
                wanted = valid & (now + HELD * BN < first + BN * TURNS)[None, :, None]
                held = held[1:] + (
                    _load_down(
                        pool, pool_words, pool_longs, entries_ptr, expert, known, now + HELD * BN, unit, valid, wanted,
                        D, TILES, FMT, BN, SLOTS, UNITS, CHUNKS, WIDE, DOTS,
                    ),
                )  # fmt: skip
