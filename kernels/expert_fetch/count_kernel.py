"""Triton kernel that counts what a large step selected. Imported only where triton can run."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.expert_fetch.state import LayerResidency

SELECTIONS = 4096
"""Selections that a program looks at at once."""


@triton.jit
def _count(
    ids, weights, entries, scores, counters, tokens, log2_decay,
    TOP_K: tl.constexpr, PAGES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # A program looks for one expert: sums are taken in one order, whatever runs beside it, and nobody writes where another reads.
    expert = tl.program_id(0)
    slot = tl.arange(0, BLOCK_K)
    uses = tl.zeros([BLOCK_T], tl.int32)
    gained = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, tokens, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        mask = (t[:, None] < tokens) & (slot[None, :] < TOP_K)
        place = t[:, None].to(tl.int64) * TOP_K + slot[None, :]
        chosen = tl.load(ids + place, mask=mask, other=-1)
        weight = tl.where(chosen >= 0, tl.load(weights + place, mask=mask, other=0.0), 0.0)
        sums = tl.sum(weight, 1)
        share = weight / tl.where(sums > 0.0, sums, 1.0)[:, None]
        share = tl.where((share >= 0.0) & (share <= 1.0) & (chosen == expert), share, 0.0)
        uses += tl.sum((chosen == expert).to(tl.int32), 1)
        gained += tl.sum(share, 1) * tl.exp2(log2_decay * tl.maximum(tokens - 1 - t, 0).to(tl.float32))
    old = tl.load(scores + expert)
    tl.store(scores + expert, old * tl.exp2(log2_decay * tokens) + tl.sum(gained, 0))
    used = tl.sum(uses, 0).to(tl.int64)
    tl.atomic_add(counters, used, sem="relaxed")
    present = tl.load(entries + expert * PAGES) >= 0
    tl.atomic_add(counters + 1, used, mask=present, sem="relaxed")


def count(topk_ids: Tensor, topk_weights: Tensor, state: LayerResidency, decay: float) -> None:
    """See `rimuru_kernels.expert_fetch.count`; arguments are taken as checked."""
    tokens, top_k = topk_ids.shape
    experts, pages = state.entries.shape
    block_k = triton.next_power_of_2(top_k)
    block_t = max(1, min(triton.next_power_of_2(tokens), SELECTIONS // block_k))
    _count[(experts,)](
        topk_ids, topk_weights, state.entries, state.scores, state.counters, tokens, math.log2(decay),
        TOP_K=top_k, PAGES=pages, BLOCK_T=block_t, BLOCK_K=block_k, num_warps=8 if block_t * block_k >= 2048 else 4,
    )  # fmt: skip
