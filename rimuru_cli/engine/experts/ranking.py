"""Live ranking of experts: a decayed sum of routing weights per (layer, expert), seeded by a hotset profile.

Score of expert e in a layer after token t:  s_t(e) = decay * s_{t-1}(e) + w_t(e),  where w_t(e) is the token's routing weight for e,
normalised so that a token's weights sum to 1 (layers stay comparable whether or not the model renormalises them).

Instead of multiplying the whole table once per token, scores are stored divided by decay^t and additions are multiplied by the
growing `gain` = decay^-t; orderings are unaffected and a token costs O(top_k) per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.experts.defaults import DEFAULT_DECAY

_MAX_GAIN = 1e12


class ExpertRanking:
    """Scores of all experts of all MoE layers.

    Attributes:
        scores: float64 [num_moe_layers, num_experts], comparable with one another at any one moment.
        decay: factor per token.
    """

    def __init__(self, num_layers: int, num_experts: int, decay: float = DEFAULT_DECAY) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay must lie between 0 and 1, not {decay}")
        self.decay = decay
        self.scores: NDArray[np.float64] = np.zeros((num_layers, num_experts))
        self._gain = 1.0

    def seed(self, probabilities: NDArray[np.float64]) -> None:
        """Start from routing shares [num_layers, num_experts] (rows sum to 1): the stationary value p / (1 - decay)."""
        if probabilities.shape != self.scores.shape:
            raise ValueError(f"a seed of shape {probabilities.shape} does not match scores of shape {self.scores.shape}")
        self._gain = 1.0
        self.scores[:] = probabilities / (1.0 - self.decay)

    def begin_step(self, num_tokens: int) -> None:
        """Let `num_tokens` tokens pass: everything counted so far decays, what is added next counts in full."""
        kept = self.decay**num_tokens
        if kept * _MAX_GAIN < self._gain:
            # The gain would grow too large (or overflow): apply it to the table and start again at 1.
            self.scores *= kept / self._gain
            self._gain = 1.0
        else:
            self._gain /= kept

    def add_token(self, layer: int, expert_ids: Sequence[int], weights: Sequence[float]) -> None:
        """Count one token (a step of one token): `expert_ids` [top_k] with routing `weights` [top_k]."""
        factor = self._gain / (sum(weights) or 1.0)
        row = self.scores[layer]
        for expert, weight in zip(expert_ids, weights, strict=True):
            row[expert] += weight * factor

    def add_tokens(self, layer: int, expert_ids: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Count the tokens of a step, oldest first: `expert_ids` and `weights` [num_tokens, top_k]."""
        num_tokens = len(expert_ids)
        # The step's tokens are spread over `num_tokens` decays; the newest counts in full.
        ages = np.arange(num_tokens - 1, -1, -1)
        totals = weights.sum(axis=1, keepdims=True)
        share = weights / np.where(totals > 0, totals, 1.0) * (self.decay**ages)[:, None]
        counts = np.bincount(expert_ids.reshape(-1), weights=share.reshape(-1), minlength=self.scores.shape[1])
        self.scores[layer] += counts * self._gain

    def add_counts(self, counts: NDArray[np.floating[Any]], num_tokens: int) -> None:
        """Count the `num_tokens` tokens of a step whose order is not known.

        Args:
            counts: [num_moe_layers, num_experts], the sums of their weights.
        """
        # On average a token's age is that of one in the middle: as if every expert's tokens lay evenly within the step.
        kept = (1.0 - self.decay**num_tokens) / ((1.0 - self.decay) * num_tokens)
        self.scores += counts * (kept * self._gain)

    def present(self) -> NDArray[np.float32]:
        """The scores as defined above, float32 [num_moe_layers, num_experts], a copy."""
        return (self.scores / self._gain).astype(np.float32)

    def order(self, layer: int) -> list[int]:
        """Experts of one layer, best first; equal scores in ascending expert order."""
        return [int(e) for e in np.argsort(-self.scores[layer], kind="stable")]
