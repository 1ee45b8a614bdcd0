"""How many expert selections a cache of a given size would have served, replayed over a recorded routing.

All caches hold whole experts of any layer, `capacity` of them in all, and are asked layer by layer, token by token:

    uniform   experts chosen at random                                       -> the share of experts held
    lru       least recently used leaves
    profile   the hottest experts of the profile, fixed
    live      the highest decayed scores, seeded by the profile, updated after each token
    oracle    every token's experts known beforehand: min(capacity, selections) / selections
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.experts.defaults import DEFAULT_DECAY
from rimuru_cli.engine.experts.ranking import ExpertRanking

SHARES = (0.10, 0.25, 0.40, 0.50)


@dataclass(frozen=True)
class RoutingTrace:
    """What the routers chose.

    Attributes:
        experts: int64 [tokens, num_moe_layers, top_k].
        weights: float64, same shape.
        num_experts: experts per layer.
    """

    experts: NDArray[np.int64]
    weights: NDArray[np.float64]
    num_experts: int

    @property
    def tokens(self) -> int:
        """Recorded tokens."""
        return len(self.experts)

    def probabilities(self) -> NDArray[np.float64]:
        """Share of each layer's selections that fell on each expert: [num_moe_layers, num_experts], rows sum to 1."""
        layers = self.experts.shape[1]
        rows = [np.bincount(self.experts[:, layer].reshape(-1), minlength=self.num_experts) for layer in range(layers)]
        counts = np.stack(rows).astype(np.float64)
        shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        return shares

    def flat(self) -> NDArray[np.int64]:
        """Experts numbered through all layers: [tokens, num_moe_layers * top_k], in the order in which they are used."""
        offsets = np.arange(self.experts.shape[1]) * self.num_experts
        return (self.experts + offsets[None, :, None]).reshape(self.tokens, -1)


def coverage(trace: RoutingTrace, probabilities: NDArray[np.float64], share: float, decay: float = DEFAULT_DECAY) -> dict[str, float]:
    """Share of the trace's selections that each cache serves when it holds `share` of all experts.

    Args:
        trace: the held-out routing.
        probabilities: the profile, recorded on other text: [num_moe_layers, num_experts].
    """
    total = probabilities.size
    capacity = max(1, round(share * total))
    used = trace.flat()
    selections = max(1, used.size)
    per_token = used.shape[1]
    return {
        "uniform": capacity / total,
        "lru": _lru_hits(used, capacity) / selections,
        "profile": _fixed_hits(used, probabilities, capacity) / selections,
        "live": _live_hits(trace, used, probabilities, capacity, decay) / selections,
        "oracle": min(1.0, capacity / max(1, per_token)),
    }


def _lru_hits(used: NDArray[np.int64], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in used.reshape(-1).tolist():
        if expert in cache:
            hits += 1
            cache.move_to_end(expert)
        else:
            cache[expert] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def _held(scores: NDArray[np.float64], capacity: int) -> NDArray[np.bool_]:
    """The `capacity` experts with the highest scores, as flags over all of them."""
    held = np.zeros(scores.size, dtype=np.bool_)
    held[np.argsort(-scores.reshape(-1), kind="stable")[:capacity]] = True
    return held


def _fixed_hits(used: NDArray[np.int64], probabilities: NDArray[np.float64], capacity: int) -> int:
    return int(_held(probabilities, capacity)[used].sum())


def _live_hits(trace: RoutingTrace, used: NDArray[np.int64], probabilities: NDArray[np.float64], capacity: int, decay: float) -> int:
    num_layers, num_experts = probabilities.shape
    ranking = ExpertRanking(num_layers, num_experts, decay)
    ranking.seed(probabilities)
    hits = 0
    for token in range(trace.tokens):
        hits += int(_held(ranking.scores, capacity)[used[token]].sum())
        ranking.begin_step(1)
        for layer in range(num_layers):
            ranking.add_tokens(layer, trace.experts[token, layer][None], trace.weights[token, layer][None])
    return hits
