"""Scores and counters of large steps: the kernel against the rules in float64, and against what `resolve` keeps in small ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from rimuru_kernels.expert_fetch import FetchPlan, LayerResidency, ResolvePolicy, count, count_kernel, resolve


def make_state(experts: int, resident: int) -> LayerResidency:
    entries = torch.full((experts, 3), -1, dtype=torch.int32)
    entries[torch.randperm(experts)[:resident]] = torch.arange(3 * resident, dtype=torch.int32).view(resident, 3)
    counters = torch.tensor([7, 5, 3, 1])
    state = LayerResidency(entries, torch.rand(experts), 16 * (1 + torch.arange(experts)), counters)
    return LayerResidency(*(getattr(state, field.name).to(DEVICE) for field in dataclasses.fields(state)))


def routing(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, experts).topk(top_k).indices.sort(1).values
    return ids, torch.rand(tokens, top_k)


def by_hand(ids: Tensor, weights: Tensor, state: LayerResidency, decay: float) -> tuple[Tensor, list[int]]:
    """Scores in float64 after each token in turn, and the counters."""
    scores, resident = state.scores.cpu().double(), (state.entries[:, 0] >= 0).tolist()
    counters = state.counters.tolist()
    for row, weight in zip(ids.tolist(), weights.double().tolist(), strict=True):
        scores *= decay
        total = sum(w for e, w in zip(row, weight, strict=True) if e >= 0)
        for expert, w in zip(row, weight, strict=True):
            if expert >= 0:
                scores[expert] += w / total if total > 0 else 0.0
                counters[0] += 1
                counters[1] += resident[expert]
    return scores, counters


CASES = [(1, 1, 1), (3, 8, 2), (70, 60, 4), (300, 128, 8), (513, 40, 7), (2100, 16, 2)]


@pytest.mark.parametrize(("tokens", "experts", "top_k"), CASES)
@pytest.mark.parametrize("way", ["kernel", "op"])
def test_counts_follow_the_rules(tokens: int, experts: int, top_k: int, way: str) -> None:
    state = make_state(experts, experts // 2)
    ids, weights = routing(tokens, experts, top_k)
    ids[tokens // 2, 0] = -1
    scores, counters = by_hand(ids, weights, state, 0.95)
    if way == "kernel":
        count_kernel.count(ids.to(DEVICE), weights.to(DEVICE), state, 0.95)
    else:
        count(ids.to(DEVICE), weights.to(DEVICE), state, ResolvePolicy(decay=0.95))
    torch.testing.assert_close(state.scores.cpu().double(), scores, rtol=1e-5, atol=1e-6)
    assert state.counters.tolist() == counters


def test_a_small_step_counts_as_if_it_had_been_resolved() -> None:
    state = make_state(24, 24)
    other = LayerResidency(*(getattr(state, field.name).clone() for field in dataclasses.fields(state)))
    ids, weights = (t.to(DEVICE) for t in routing(6, 24, 4))
    policy = ResolvePolicy(decay=0.9)
    count(ids, weights, state, policy)
    resolve(ids, weights, other, FetchPlan.create(24, 3, 24, DEVICE), policy)
    torch.testing.assert_close(state.scores, other.scores, rtol=1e-5, atol=1e-6)
    assert state.counters.tolist() == other.counters.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_weights_that_are_no_shares_add_nothing(bad: float) -> None:
    ids = torch.tensor([[0, 2]], device=DEVICE)
    for way in (count_kernel.count, lambda *a: count(*a[:3], ResolvePolicy(decay=a[3]))):
        state = make_state(4, 2)
        before = state.scores.clone()
        way(ids, torch.full((1, 2), bad, device=DEVICE), state, 0.5)
        torch.testing.assert_close(state.scores, before * 0.5)


def test_the_same_bits_every_time() -> None:
    ids, weights = (t.to(DEVICE) for t in routing(700, 32, 8))
    start = make_state(32, 10)
    results = []
    for _ in range(3):
        state = dataclasses.replace(start, scores=start.scores.clone(), counters=start.counters.clone())
        count_kernel.count(ids, weights, state, 0.95)
        results.append(state.scores.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_nothing_to_count_and_misuse() -> None:
    state = make_state(8, 4)
    before = state.scores.clone()
    ids, weights = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    count(ids, weights, state)
    assert torch.equal(state.scores, before)
    ids, weights = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE), torch.ones(3, 2, device=DEVICE)
    with pytest.raises(ValueError, match="weights"):
        count(ids, weights.double(), state)
    with pytest.raises(ValueError, match="contiguous"):
        count(ids.t().contiguous().t(), weights, state)
    with pytest.raises(ValueError, match="do not fit"):
        count(ids, weights, dataclasses.replace(state, scores=state.scores.double()))
    with pytest.raises(ValueError, match="of 8 experts"):
        count(ids.repeat(1, 5), weights.repeat(1, 5), state)
