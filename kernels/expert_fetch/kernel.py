"""Triton: which experts a step lacks, where they go, and copying them from host memory; nothing waits for the host.

`resolve` and `route` end in one program that decides; `fetch` reads page-locked host memory through its mapping into the device.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.expert_fetch.state import FetchPlan, LayerResidency, ResolvePolicy
from rimuru_kernels.rms_norm.kernel import normalize_row
from rimuru_kernels.topk_gating.kernel import choose_experts, write_experts

WORDS = 2048
"""int64 words that one program of `fetch` copies at a time: 16 KiB, four 16-byte loads in flight per thread at 256 threads."""

COMPARED = 1024
"""Up to this many (selection, expert) pairs each selection is compared with each expert; more are added up in memory (see `_tally`)."""


@triton.jit
def _tally(
    ids, weights, tokens, tally, log2_decay, e,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """How often the step uses each expert, int32 [BLOCK_E], and what that adds to its score, float32 [BLOCK_E]."""
    t, slot = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    mask = (t[:, None] < tokens) & (slot[None, :] < TOP_K)
    chosen = tl.load(ids + t[:, None] * TOP_K + slot[None, :], mask=mask, other=-1)
    weight = tl.load(weights + t[:, None] * TOP_K + slot[None, :], mask=mask, other=0.0)
    weight = tl.where(chosen >= 0, weight, 0.0)
    sums = tl.sum(weight, 1)
    share = weight / tl.where(sums > 0.0, sums, 1.0)[:, None]
    share = tl.where((share >= 0.0) & (share <= 1.0), share, 0.0)  # NaN adds nothing: a score that is none would stay so
    # The newest token counts in full, older ones decayed: as if the tokens had come one by one.
    share *= tl.exp2(log2_decay * tl.maximum(tokens - 1 - t, 0).to(tl.float32))[:, None]
    if IN_MEMORY:
        # One addition a selection instead of a comparison with every expert: shares in units of 2^-40 (64 tokens give an expert 2^46 at
        # most), and a use in bit 48. Sums of integers do not depend on their order.
        UNITS: tl.constexpr = 2**40
        USE: tl.constexpr = 2**48
        known = (chosen >= 0) & (chosen < EXPERTS)
        tl.atomic_add(tally + chosen, (share * UNITS).to(tl.int64) + USE, mask=known, sem="relaxed")
        tl.debug_barrier()
        total = tl.load(tally + e, mask=e < EXPERTS, other=0, cache_modifier=".cg")
        tl.debug_barrier()  # every thread has read before any thread clears for the next step
        tl.store(tally + e, tl.zeros([BLOCK_E], tl.int64), mask=e < EXPERTS)
        uses = (total >> 48).to(tl.int32)
        gained = (total & (USE - 1)).to(tl.float32) * (1.0 / UNITS)
    else:
        same = tl.reshape(chosen.to(tl.int32), [BLOCK_T * BLOCK_K])[:, None] == e[None, :]
        uses = tl.sum(same.to(tl.int32), 0)
        gained = tl.sum(tl.where(same, tl.reshape(share, [BLOCK_T * BLOCK_K])[:, None], 0.0), 0)
    return uses, gained


@triton.jit
def _decide(
    ids, weights, tokens, entries, scores, host, view, sources, pages, count, counters, scratch, tally, log2_decay,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PAGES: tl.constexpr, SCRATCH: tl.constexpr, NEVER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """One program: update scores, exchange victims for misses in the layer's table, write the step's view and the list of copies."""
    NONE: tl.constexpr = 2**63 - 1
    e = tl.arange(0, BLOCK_E)
    is_expert = e < EXPERTS
    first_page = tl.load(entries + e * PAGES, mask=is_expert, other=-1)
    score = tl.load(scores + e, mask=is_expert, other=0.0)
    uses, gained = _tally(ids, weights, tokens, tally, log2_decay, e, TOP_K, EXPERTS, BLOCK_T, BLOCK_K, BLOCK_E, IN_MEMORY)
    score = score * tl.exp2(log2_decay * tokens) + gained
    tl.store(scores + e, score, mask=is_expert)

    selected = (uses > 0) & is_expert
    resident = (first_page >= 0) & is_expert
    hit, miss = selected & resident, selected & (first_page < 0)
    for p in tl.static_range(PAGES):
        tl.store(view + e * PAGES + p, tl.load(entries + e * PAGES + p, mask=hit, other=-1), mask=hit)
    # Score and index in one integer: ordered by score, equals by index. Scores are not negative, so their bits order as they do.
    bits = score.to(tl.int32, bitcast=True).to(tl.int64) << 32
    misses = tl.where(miss, bits + (BLOCK_E - 1 - e).to(tl.int64), -1)  # largest first: high score, then low index
    readable = tl.load(host + e, mask=is_expert, other=0) != 0
    victims = tl.where(resident & readable & (uses == 0), bits + e.to(tl.int64), NONE)  # smallest first: low score, then low index
    num_misses = tl.sum(miss.to(tl.int32), 0)
    p = tl.arange(0, BLOCK_P)
    copies = num_misses * 0
    lent = num_misses * 0
    lendable = lent
    if SCRATCH > 0:
        n = tl.arange(0, BLOCK_S)
        lendable = tl.sum((tl.load(scratch + n * PAGES, mask=n < SCRATCH, other=-1) >= 0).to(tl.int32), 0)
    for _ in range(num_misses):
        miss_key, victim_key = tl.max(misses, 0), tl.min(victims, 0)
        misses = tl.where(misses == miss_key, -1, misses)
        expert = BLOCK_E - 1 - (miss_key & 0xFFFFFFFF).to(tl.int32)
        victim = (victim_key & 0xFFFFFFFF).to(tl.int32)
        source = tl.load(host + expert)
        borrow = (source != 0) & (lent < lendable)
        if NEVER:
            borrow &= (miss_key >> 32) < (victim_key >> 32)
        else:
            borrow &= victim_key == NONE
        evict = (source != 0) & (victim_key != NONE) & (borrow == 0)
        # Limits instead of `mask & scalar`, which the interpreter gets wrong.
        evicts, borrows = p < tl.where(evict, PAGES, 0), p < tl.where(borrow, PAGES, 0)
        row = tl.load(entries + victim * PAGES + p, mask=evicts, other=-1)
        if SCRATCH > 0:
            row = tl.maximum(row, tl.load(scratch + lent * PAGES + p, mask=borrows, other=-1))
        tl.debug_barrier()  # every thread has read the victim's row before any thread clears it
        tl.store(entries + expert * PAGES + p, row, mask=evicts)
        tl.store(entries + victim * PAGES + p, tl.full([BLOCK_P], -1, tl.int32), mask=evicts)
        tl.store(view + expert * PAGES + p, row, mask=p < PAGES)
        tl.store(pages + copies * PAGES + p, row, mask=evicts | borrows)
        tl.store(sources + copies, source, mask=evict | borrow)
        copies += (evict | borrow).to(tl.int32)
        lent += borrow.to(tl.int32)
        victims = tl.where(victims == tl.where(evict, victim_key, NONE), NONE, victims)
    tl.store(count, copies)
    total = tl.sum(tl.where(is_expert, uses, 0), 0)
    hits = tl.sum(tl.where(hit, uses, 0), 0)
    tl.store(counters + 0, tl.load(counters + 0) + total)
    tl.store(counters + 1, tl.load(counters + 1) + hits)
    tl.store(counters + 2, tl.load(counters + 2) + copies)
    tl.store(counters + 3, tl.load(counters + 3) + (num_misses - copies))


@triton.jit
def _resolve(
    ids, weights, num_tokens, entries, scores, host, view, sources, pages, count, counters, scratch, tally, log2_decay, T,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PAGES: tl.constexpr, SCRATCH: tl.constexpr, NEVER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    IN_MEMORY: tl.constexpr,
):  # fmt: skip
    # T is no constant: every number of rows would be compiled by itself.
    tokens = T
    if num_tokens is not None:
        tokens = tl.minimum(tl.load(num_tokens), T)
    _decide(
        ids, weights, tokens, entries, scores, host, view, sources, pages, count, counters, scratch, tally, log2_decay,
        TOP_K, EXPERTS, PAGES, SCRATCH, NEVER, BLOCK_T, BLOCK_K, BLOCK_E, BLOCK_P, BLOCK_S, IN_MEMORY,
    )  # fmt: skip


@triton.jit
def _route(
    x, residual, norm_weight, eps, router, hidden_out, residual_out, logits, arrived, given_ids, given_weights,
    ids, weights, num_tokens, entries, scores, host, view, sources, pages, count, counters, scratch, tally, log2_decay,
    HIDDEN: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    T: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PAGES: tl.constexpr, SCRATCH: tl.constexpr, NEVER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """One token's residual + x, its norm, ROWS rows of the router; the last program of all chooses every token's experts and decides."""
    part, token = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    mask = d < HIDDEN
    row = part * ROWS + tl.arange(0, ROWS)
    dtype: tl.constexpr = hidden_out.dtype.element_ty
    matrix = tl.load(router + row[:, None] * HIDDEN + d[None, :], mask=(row[:, None] < EXPERTS) & mask[None, :], other=0.0)
    scale = tl.load(norm_weight + d, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + token * HIDDEN + d, mask=mask, other=0.0).to(tl.float32)
    value = (value + tl.load(residual + token * HIDDEN + d, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    normed = normalize_row(value.to(tl.float32), scale, eps, HIDDEN, norm_weight.dtype.element_ty).to(dtype)
    if part == 0:
        tl.store(residual_out + token * HIDDEN + d, value, mask=mask)
        tl.store(hidden_out + token * HIDDEN + d, normed, mask=mask)
    tl.store(logits + token * EXPERTS + row, tl.sum(matrix.to(tl.float32) * normed.to(tl.float32)[None, :], 1), mask=row < EXPERTS)
    tl.debug_barrier()  # this program's logits are written before its arrival is counted
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(arrived, 0)
        tokens = T
        if num_tokens is not None:
            tokens = tl.minimum(tl.load(num_tokens), T)
        t, e = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
        mask_te = (t[:, None] < T) & (e[None, :] < EXPERTS)
        rows = tl.load(logits + t[:, None] * EXPERTS + e[None, :], mask=mask_te, other=0.0, cache_modifier=".cg")
        write_experts(rows, weights, ids, t, T, tokens, EXPERTS, TOP_K, RENORMALIZE, BLOCK_E)
        tl.debug_barrier()  # ids and weights are read back in another arrangement of threads
        if given_ids is not None:
            ids, weights = given_ids, given_weights
        _decide(
            ids, weights, tokens, entries, scores, host, view, sources, pages, count, counters, scratch, tally, log2_decay,
            TOP_K, EXPERTS, PAGES, SCRATCH, NEVER, BLOCK_T, BLOCK_K, BLOCK_E, BLOCK_P, BLOCK_S, IN_MEMORY,
        )  # fmt: skip


@triton.jit
def _predict(
    x, router, logits, arrived, entries, scores, host, sources, pages, count, counters, decay,
    HIDDEN: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PAGES: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the router; the last program of all guesses and exchanges."""
    NONE: tl.constexpr = 2**63 - 1
    part = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    row = part * ROWS + tl.arange(0, ROWS)
    matrix = tl.load(router + row[:, None] * HIDDEN + d[None, :], mask=(row[:, None] < EXPERTS) & (d < HIDDEN)[None, :], other=0.0)
    value = tl.load(x + d, mask=d < HIDDEN, other=0.0)
    tl.store(logits + row, tl.sum(matrix.to(tl.float32) * value.to(tl.float32)[None, :], 1), mask=row < EXPERTS)
    tl.debug_barrier()  # this program's logits are written before its arrival is counted
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        e = tl.arange(0, BLOCK_E)
        is_expert = e < EXPERTS
        rows = tl.load(logits + e[None, :], mask=is_expert[None, :], other=float("-inf"), cache_modifier=".cg")
        chosen, weight, _ = choose_experts(rows, EXPERTS, TOP_K, True, BLOCK_E)
        guessed = tl.reshape(chosen.to(tl.int32), [BLOCK_E]) > 0
        share = tl.where(guessed, tl.reshape(weight, [BLOCK_E]), 0.0)
        share = tl.where((share >= 0.0) & (share <= 1.0), share, 0.0)
        resident = (tl.load(entries + e * PAGES, mask=is_expert, other=-1) >= 0) & is_expert
        readable = (tl.load(host + e, mask=is_expert, other=0) != 0) & is_expert
        score = tl.load(scores + e, mask=is_expert, other=0.0) * decay
        # As in `_decide`: value and index in one integer.
        lacking = (share.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (BLOCK_E - 1 - e).to(tl.int64)
        lacking = tl.where(guessed & readable & (resident == 0), lacking, -1)
        victims = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) + e.to(tl.int64)
        victims = tl.where(resident & readable & (guessed == 0), victims, NONE)
        p = tl.arange(0, BLOCK_P)
        copies = part * 0
        going = copies == 0
        for _ in tl.static_range(LIMIT):
            comer_key, victim_key = tl.max(lacking, 0), tl.min(victims, 0)
            comer = BLOCK_E - 1 - (comer_key & 0xFFFFFFFF).to(tl.int32)
            victim = (victim_key & 0xFFFFFFFF).to(tl.int32)
            gained = tl.sum(tl.where(e == comer, score + share, 0.0), 0)
            kept = tl.sum(tl.where(e == victim, score, 0.0), 0)
            going = going & (comer_key >= 0) & (victim_key != NONE) & (gained > kept)
            moves = p < tl.where(going, PAGES, 0)
            places = tl.load(entries + victim * PAGES + p, mask=moves, other=-1)
            tl.debug_barrier()  # every thread has read the victim's row before any thread clears it
            tl.store(entries + comer * PAGES + p, places, mask=moves)
            tl.store(entries + victim * PAGES + p, tl.full([BLOCK_P], -1, tl.int32), mask=moves)
            tl.store(pages + copies * PAGES + p, places, mask=moves)
            tl.store(sources + copies, tl.load(host + comer, mask=going, other=0), mask=going)
            copies += going.to(tl.int32)
            lacking = tl.where(lacking == comer_key, -1, lacking)
            victims = tl.where(victims == victim_key, NONE, victims)
        tl.store(count, copies)
        tl.store(counters + 2, tl.load(counters + 2) + copies)


@triton.jit
def copy_pieces(
    sources, pages, count, pool, program, programs,
    FIRST: tl.constexpr, LAST: tl.constexpr, PAGES: tl.constexpr, PAGE_WORDS: tl.constexpr, COPIED_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One program's share of copying pages FIRST to LAST - 1 of each listed expert; all share evenly, also the pieces of one expert.

    Pages lie PAGE_WORDS apart in host memory; the first COPIED_WORDS of each are copied.
    """
    PIECES: tl.constexpr = (COPIED_WORDS + WORDS - 1) // WORDS
    COLUMNS: tl.constexpr = LAST - FIRST
    copies = tl.load(count)
    i = tl.arange(0, WORDS)
    target_base = pool.to(tl.pointer_type(tl.int64))
    for piece in range(program, copies * (COLUMNS * PIECES), programs):
        page = piece // PIECES
        copy, column = page // COLUMNS, FIRST + page % COLUMNS
        word = (piece % PIECES) * WORDS + i
        source = tl.load(sources + copy).to(tl.pointer_type(tl.int64))
        entry = tl.load(pages + copy * PAGES + column).to(tl.int64)
        source = tl.multiple_of(source + column * PAGE_WORDS, 16)
        target = tl.multiple_of(target_base + entry * 32, 16)
        words = tl.load(source + word, mask=word < COPIED_WORDS, eviction_policy="evict_first")
        tl.store(target + word, words, mask=word < COPIED_WORDS)


@triton.jit
def _fetch(
    sources, pages, count, pool,
    FIRST: tl.constexpr, LAST: tl.constexpr, PAGES: tl.constexpr, PAGE_WORDS: tl.constexpr, COPIED_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    copy_pieces(sources, pages, count, pool, tl.program_id(0), tl.num_programs(0), FIRST, LAST, PAGES, PAGE_WORDS, COPIED_WORDS, WORDS)


def _blocks(top_k: int, tokens: int, experts: int, plan: FetchPlan) -> dict[str, int]:
    block_k, block_e = triton.next_power_of_2(top_k), triton.next_power_of_2(experts)
    block_t = triton.next_power_of_2(tokens)
    blocks = {"BLOCK_T": block_t, "BLOCK_K": block_k, "BLOCK_E": block_e, "BLOCK_P": triton.next_power_of_2(plan.pages.shape[1])}
    blocks["BLOCK_S"] = triton.next_power_of_2(max(1, plan.scratch.shape[0]))
    return blocks | {"IN_MEMORY": block_t * block_k * block_e > COMPARED}


def resolve(
    topk_ids: Tensor, topk_weights: Tensor, state: LayerResidency, plan: FetchPlan, policy: ResolvePolicy, num_tokens: Tensor | None
) -> None:
    """See `rimuru_kernels.expert_fetch.resolve`; arguments are taken as checked."""
    tokens, top_k = topk_ids.shape
    experts, pages = state.entries.shape
    blocks = _blocks(top_k, tokens, experts, plan)
    _resolve[(1,)](
        topk_ids, topk_weights, num_tokens, state.entries, state.scores, state.host, plan.entries, plan.sources, plan.pages, plan.count,
        state.counters, plan.scratch, plan.tally, math.log2(policy.decay), T=tokens, TOP_K=top_k, EXPERTS=experts, PAGES=pages,
        SCRATCH=plan.scratch.shape[0], NEVER=policy.never_evict_better, **blocks,
        num_warps=max(1, min(4, blocks["BLOCK_T"] * blocks["BLOCK_K"] // 128)),
    )  # fmt: skip


def route(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router: Tensor, renormalize: bool, hidden_out: Tensor,
    residual_out: Tensor, topk_ids: Tensor, topk_weights: Tensor, state: LayerResidency, plan: FetchPlan, policy: ResolvePolicy,
    num_tokens: Tensor | None, given: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """See `rimuru_kernels.expert_fetch.route`; arguments are taken as checked."""
    tokens, top_k = topk_ids.shape
    experts, pages = state.entries.shape
    hidden = x.shape[1]
    block_d = triton.next_power_of_2(hidden)
    rows = max(1, min(8192 // block_d, triton.next_power_of_2(experts)))
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    given_ids, given_weights = (None, None) if given is None else given
    _route[(triton.cdiv(experts, rows), tokens)](
        x, residual, norm_weight, eps, router, hidden_out, residual_out, logits, plan.arrived, given_ids, given_weights,
        topk_ids, topk_weights, num_tokens, state.entries, state.scores, state.host, plan.entries, plan.sources, plan.pages, plan.count,
        state.counters, plan.scratch, plan.tally, math.log2(policy.decay),
        HIDDEN=hidden, RENORMALIZE=renormalize, BLOCK_D=block_d, ROWS=rows, BLOCK_R=triton.next_power_of_2(tokens),
        T=tokens, TOP_K=top_k, EXPERTS=experts, PAGES=pages,
        SCRATCH=plan.scratch.shape[0], NEVER=policy.never_evict_better, **_blocks(top_k, tokens, experts, plan), num_warps=4,
    )  # fmt: skip


def predict(x: Tensor, router: Tensor, top_k: int, state: LayerResidency, plan: FetchPlan, policy: ResolvePolicy, limit: int) -> None:
    """See `rimuru_kernels.expert_fetch.predict`; arguments are taken as checked."""
    experts, pages = state.entries.shape
    block_d, block_e = triton.next_power_of_2(x.shape[1]), triton.next_power_of_2(experts)
    rows = max(1, min(8192 // block_d, block_e))
    logits = torch.empty(experts, dtype=torch.float32, device=x.device)
    _predict[(triton.cdiv(experts, rows),)](
        x, router, logits, plan.arrived, state.entries, state.scores, state.host, plan.sources, plan.pages, plan.count, state.counters,
        policy.decay, HIDDEN=x.shape[1], BLOCK_D=block_d, ROWS=rows, TOP_K=top_k, EXPERTS=experts, PAGES=pages, LIMIT=limit,
        BLOCK_E=block_e, BLOCK_P=triton.next_power_of_2(pages), num_warps=4,
    )  # fmt: skip


def fetch(plan: FetchPlan, pool: Tensor, page_bytes: int, columns: tuple[int, int], programs: int = 128, copied: int | None = None) -> None:
    """See `rimuru_kernels.expert_fetch.fetch`; arguments are taken as checked."""
    _fetch[(programs,)](
        plan.sources, plan.pages, plan.count, pool, FIRST=columns[0], LAST=columns[1], PAGES=plan.pages.shape[1],
        PAGE_WORDS=page_bytes // 8, COPIED_WORDS=(copied or page_bytes) // 8, WORDS=WORDS, num_warps=8,
    )  # fmt: skip
