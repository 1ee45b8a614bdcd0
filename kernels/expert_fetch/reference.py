"""Residency decisions and copies in plain Python and torch: what the Triton kernels must equal. For tests and for reading."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rimuru_kernels.expert_fetch.state import FetchPlan, LayerResidency, ResolvePolicy

ENTRY_BYTES = 256


def resolve(
    topk_ids: Tensor, topk_weights: Tensor, state: LayerResidency, plan: FetchPlan, policy: ResolvePolicy, num_tokens: Tensor | None
) -> None:
    """See `rimuru_kernels.expert_fetch.resolve`; arguments are taken as checked."""
    tokens = topk_ids.shape[0] if num_tokens is None else min(topk_ids.shape[0], int(num_tokens))
    experts = state.entries.shape[0]
    scores, uses = [float(s) for s in state.scores], [0] * experts
    for ids, weights in zip(topk_ids[:tokens].tolist(), topk_weights[:tokens].tolist(), strict=True):
        total = sum(weight for expert, weight in zip(ids, weights, strict=True) if expert >= 0)
        scores = [score * policy.decay for score in scores]
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                uses[expert] += 1
                share = weight / (total if total > 0 else 1.0)
                scores[expert] += share if 0.0 <= share <= 1.0 else 0.0
    state.scores.copy_(torch.tensor(scores))
    scores = state.scores.tolist()  # compared as they are stored, in float32

    resident = (state.entries[:, 0] >= 0).tolist()
    misses = sorted((e for e in range(experts) if uses[e] and not resident[e]), key=lambda e: (-scores[e], e))
    readable = (state.host != 0).tolist()
    victims = sorted((e for e in range(experts) if resident[e] and readable[e] and not uses[e]), key=lambda e: (scores[e], e))
    for e in range(experts):
        if uses[e] and resident[e]:
            plan.entries[e] = state.entries[e]
    copies = lent = 0
    for e in misses:
        source = int(state.host[e])
        worthless = bool(victims) and scores[e] < scores[victims[0]]
        plan.entries[e] = -1
        room = lent < plan.scratch.shape[0] and int(plan.scratch[lent, 0]) >= 0
        if source and room and (not victims or (policy.never_evict_better and worthless)):
            plan.entries[e] = plan.scratch[lent]
            lent += 1
        elif source and victims:
            victim = victims.pop(0)
            row = state.entries[victim].clone()
            state.entries[victim] = -1
            state.entries[e] = row
            plan.entries[e] = row
        else:
            continue
        plan.sources[copies] = source
        plan.pages[copies] = plan.entries[e]
        copies += 1
    plan.count[0] = copies
    hits = sum(uses[e] for e in range(experts) if resident[e])
    state.counters.add_(torch.tensor([sum(uses), hits, copies, len(misses) - copies], device=state.counters.device))


def count(topk_ids: Tensor, topk_weights: Tensor, state: LayerResidency, decay: float) -> None:
    """See `rimuru_kernels.expert_fetch.count`; arguments are taken as checked."""
    tokens, known = len(topk_ids), topk_ids >= 0
    ids = topk_ids.clamp(min=0).long()
    weights = torch.where(known, topk_weights, 0.0)
    sums = weights.sum(1, keepdim=True)
    share = weights / torch.where(sums > 0.0, sums, 1.0)
    share = torch.where((share >= 0.0) & (share <= 1.0), share, 0.0)
    share *= (decay ** torch.arange(tokens - 1, -1, -1, device=ids.device).float()).unsqueeze(1)
    state.scores.mul_(decay**tokens).index_add_(0, ids.reshape(-1), share.reshape(-1))
    state.counters[0] += known.sum()
    state.counters[1] += ((state.entries[:, 0] >= 0)[ids] & known).sum()


def predict(ids: Tensor, weights: Tensor, state: LayerResidency, plan: FetchPlan, policy: ResolvePolicy, limit: int) -> None:
    """See `rimuru_kernels.expert_fetch.predict`; ids and weights [1, k] are the guess, weights summing to 1."""
    guess = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    scores = [policy.decay * score for score in state.scores.tolist()]
    resident, readable = (state.entries[:, 0] >= 0).tolist(), (state.host != 0).tolist()
    lacking = sorted((e for e in guess if not resident[e] and readable[e]), key=lambda e: (-guess[e], e))
    victims = sorted((e for e in range(len(scores)) if resident[e] and readable[e] and e not in guess), key=lambda e: (scores[e], e))
    copies = 0
    for e, victim in zip(lacking[:limit], victims, strict=False):
        if not scores[e] + guess[e] > scores[victim]:
            break
        row = state.entries[victim].clone()
        state.entries[victim] = -1
        state.entries[e] = row
        plan.sources[copies] = state.host[e]
        plan.pages[copies] = row
        copies += 1
    plan.count[0] = copies
    state.counters[2] += copies


def fetch(plan: FetchPlan, pool: Tensor, page_bytes: int, columns: tuple[int, int], copied: int) -> None:
    """See `rimuru_kernels.expert_fetch.fetch`; arguments are taken as checked. Sources are addresses of this process."""
    for row in range(int(plan.count)):
        entries = plan.pages[row].tolist()
        for column in range(*columns):
            address = int(plan.sources[row]) + column * page_bytes
            content = (ctypes.c_uint8 * copied).from_address(address)
            start = entries[column] * ENTRY_BYTES
            pool[start : start + copied] = torch.frombuffer(content, dtype=torch.uint8).to(pool.device)
