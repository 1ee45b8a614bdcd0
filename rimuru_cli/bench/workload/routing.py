"""Which experts the routers of a simulated model choose: popularity, topics and habit, drawn for all layers at once.

A request belongs to one of a few topics. In topic t, expert e of a layer weighs exp(POPULARITY * a_e + TOPIC * b_te) with normal a and b;
a token takes `top_k` experts as if each rang after an exponential time with that rate; with probability HABIT an expert of the token before
is taken again. The three numbers were fitted to a routing recorded on Qwen3-30B-A3B (top 6 of 128), of which 128 generated tokens gave, and
this model gives:

    experts of the token before that are used again      38.0 %    36.0 %
    ... of the token 16 before                           28.3      27.2
    selections of the most used 10, 20, 40 % of experts  55.7, 78.7, 96.9    60.3, 79.5, 94.6
    hits with 21.6, 36.4, 51.2 % of experts resident     79.7, 92.0, 96.2    78.9, 88.5, 94.0
    of the 40 % that are most used in other texts        68 to 73 (published)    71.4

Steps of more than a few tokens draw only how often each expert is used in all; a token's habit does not show in such sums.

Routers with random weights choose nearly evenly: `uniform` draws like them, for comparison with runs over made-up weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

POPULARITY, TOPIC, HABIT = 1.0, 1.6, 0.14
TOPICS = 16
FEW = 8
"""Steps of up to so many tokens, each of another request, draw every token."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Drawn:
    """A step's choices: `touched` bool [L, E]; `uses` float32 [L, E], selections of each expert (expected ones in larger steps)."""

    touched: NDArray[np.bool_]
    uses: Floats


class SyntheticRouting:
    """Routers of one model.

    Args:
        seed: of the weights and of all draws.
        uniform: every expert is as likely as any other at every token.

    Attributes:
        profile: float64 [L, E], shares of an average token's selections: what an offline profile of many texts would say.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int, seed: int = 0, *, uniform: bool = False) -> None:
        weights = np.random.default_rng([seed, 2])
        shape = (num_layers, num_experts)
        popularity = weights.normal(0.0, POPULARITY, shape)
        log_weights = popularity + weights.normal(0.0, TOPIC, (TOPICS, *shape))
        if uniform:
            log_weights = np.zeros_like(log_weights)
        self._habit = 0.0 if uniform else HABIT
        self._slowness = np.exp(-log_weights).astype(np.float32)  # mean times until an expert rings
        chances = inclusion(np.exp(log_weights), top_k)
        self.profile: NDArray[np.float64] = chances.mean(0) / top_k
        self._chances = chances.reshape(TOPICS, -1).astype(np.float32)
        self._log_left = np.log1p(-np.minimum(self._chances, np.float32(1 - 1e-6)))
        self._shape, self._top_k = shape, top_k
        self._random = np.random.default_rng([seed, 3])
        self._summed = self._sums = self._left = np.zeros(0, dtype=np.float32)
        # Chances drawn for steps that have not come yet, how many of these steps have, and what the generator was before it drew them.
        self._coins: Floats = np.zeros((0, log_weights[0].size), dtype=np.float32)
        self._used, self._before = 0, self._random.bit_generator.state
        self._last: dict[int, NDArray[np.bool_]] = {}  # of each request whose last token was drawn by itself

    def topic_of(self, request: int) -> int:
        """The topic of a request."""
        return int(np.random.default_rng(request).integers(TOPICS))

    def draw_each(self, topics: Mapping[int, int]) -> Drawn:
        """One token of each request; `topics` by request."""
        self._put_back()
        requests = list(topics)
        rates = self._slowness[list(topics.values())]
        times = self._random.standard_exponential(rates.shape, dtype=np.float32) * rates
        for row, request in enumerate(requests):
            last = self._last.get(request)
            if last is not None:
                times[row][last & (self._random.random(self._shape, dtype=np.float32) < self._habit)] = 0.0
        chosen = np.argpartition(times, self._top_k - 1, axis=2)[:, :, : self._top_k]
        tokens = np.zeros(times.shape, dtype=np.bool_)
        np.put_along_axis(tokens, chosen, True, axis=2)
        self._last = dict(zip(requests, tokens, strict=True))
        uses: Floats = tokens.sum(0, dtype=np.float32)
        return Drawn(uses > 0, uses)

    def draw_sums(self, tokens: Floats) -> Drawn:
        """A step of so many tokens of each topic, float32 [TOPICS]."""
        touched, uses = self.foresee(tokens, 1)
        self.use(1)
        return Drawn(touched[0], uses)

    def foresee(self, tokens: Floats, steps: int) -> tuple[NDArray[np.bool_], Floats]:
        """What `draw_sums` will say in the next `steps` steps: touched bool [steps, L, E], and the uses of each; nothing is drawn yet."""
        self._last = {}
        if not np.array_equal(tokens, self._summed):
            # Mostly the same sequences go on.
            self._summed, self._sums, self._left = tokens.copy(), tokens @ self._chances, np.exp(tokens @ self._log_left)
            self._sums.flags.writeable = False
        if len(self._coins) - self._used < steps:
            self._put_back()
            self._before = self._random.bit_generator.state
            self._coins = self._random.random((steps, len(self._left)), dtype=np.float32)
        touched = self._coins[self._used : self._used + steps] >= self._left
        return touched.reshape(steps, *self._shape), self._sums.reshape(self._shape)

    def use(self, steps: int) -> None:
        """So many of the steps that were foreseen have come."""
        self._used += steps

    def _put_back(self) -> None:
        """Be as if only what was used had been drawn."""
        if self._used < len(self._coins):
            self._random.bit_generator.state = self._before
            self._random.random((self._used, len(self._left)), dtype=np.float32)
        self._coins, self._used = self._coins[:0], 0


def inclusion(weights: NDArray[Any], top_k: int) -> NDArray[np.float64]:
    """Chances [..., E] to be among the first `top_k` of exponential clocks with rates `weights` [..., E]; they sum to `top_k`.

    A clock has rung by time t with 1 - exp(-weight * t); t is taken where `top_k` have rung on average.
    """
    if top_k >= weights.shape[-1]:
        return np.ones(weights.shape)
    low = np.full((*weights.shape[:-1], 1), -60.0)
    high = np.full_like(low, 60.0)
    for _ in range(60):
        middle = (low + high) / 2
        many = (-np.expm1(-weights * np.exp(middle))).sum(-1, keepdims=True) > top_k
        low, high = np.where(many, low, middle), np.where(many, middle, high)
    chances = -np.expm1(-weights * np.exp((low + high) / 2))
    return np.asarray(chances * (top_k / chances.sum(-1, keepdims=True)))
