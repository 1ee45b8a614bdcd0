"""What lives on the device so that residency can be decided there: per layer, and per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COUNTER_NAMES = ("uses", "hits", "fetched", "unplaced")
"""Columns of `LayerResidency.counters`."""


@dataclass(frozen=True)
class LayerResidency:
    """One layer's experts. Rows of larger tensors [L, ...] do well: `entries[layer]` and so on.

    Attributes:
        entries: int32 [E, P], the P = 3 * tiles page entries of each resident expert (gate, up, down tiles); -1 in every column: absent.
        scores: float32 [E], decayed sum of routing shares, never negative; the engine seeds it from a hotset profile.
        host: int64 [E], device address of each expert's bytes (gate | up | down, P pages one after the other) in page-locked host
            memory, a multiple of 16; 0: the device cannot read this expert, so it stays where it is.
        counters: int64 [4], running sums: expert uses (token, expert), uses that were resident, experts copied, experts for which there
            was no place (the step's result is then wrong and the step must be repeated another way).
    """

    entries: Tensor
    scores: Tensor
    host: Tensor
    counters: Tensor


@dataclass(frozen=True)
class FetchPlan:
    """What one layer's step copies; overwritten by the next layer's, so all layers share one plan on one stream.

    Attributes:
        entries: int32 [E, P], page entries for this step: valid in the rows of the experts that the step selected, stale elsewhere.
        sources: int64 [M], host addresses of the experts to copy.
        pages: int32 [M, P], where each goes.
        count: int32 [1], how many.
        scratch: int32 [N, P], loading-buffer pages for misses that no resident can make room for, or that are not worth an eviction (see
            `ResolvePolicy`); N may be 0, and rows of -1 at the end are not there.
        arrived: int32 [1], zero between launches.
        tally: int64 [E], zero between launches.
    """

    entries: Tensor
    sources: Tensor
    pages: Tensor
    count: Tensor
    scratch: Tensor
    arrived: Tensor
    tally: Tensor

    @classmethod
    def create(
        cls, num_experts: int, pages_per_expert: int, max_misses: int, device: torch.device, scratch: Tensor | None = None
    ) -> FetchPlan:
        """A plan for steps that miss at most `max_misses` experts of a layer (tokens * top_k, or all experts)."""
        most = min(num_experts, max_misses)
        if scratch is None:
            scratch = torch.empty((0, pages_per_expert), dtype=torch.int32, device=device)
        return cls(
            entries=torch.full((num_experts, pages_per_expert), -1, dtype=torch.int32, device=device),
            sources=torch.zeros(most, dtype=torch.int64, device=device),
            pages=torch.full((most, pages_per_expert), -1, dtype=torch.int32, device=device),
            count=torch.zeros(1, dtype=torch.int32, device=device),
            scratch=scratch,
            arrived=torch.zeros(1, dtype=torch.int32, device=device),
            tally=torch.zeros(num_experts, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class ResolvePolicy:
    """How misses are placed.

    Attributes:
        decay: of scores, per token.
        never_evict_better: a miss that scores lower than every expert that could make room goes to a scratch row of the plan, is used for
            this step and forgotten; once the scratch rows are used up, misses evict.
    """

    decay: float = 0.95
    never_evict_better: bool = False
