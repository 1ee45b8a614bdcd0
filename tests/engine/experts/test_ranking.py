"""The live ranking equals its definition: decayed sums of normalised routing weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_cli.engine.experts.ranking import ExpertRanking

LAYERS, EXPERTS, TOP_K = 2, 7, 3


def _token(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ids = np.stack([generator.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)])
    return ids, generator.random((LAYERS, TOP_K)) + 0.01


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), decay=st.sampled_from([0.5, 0.9, 0.95, 0.99])
)
def test_any_split_into_steps_gives_the_definition(seed: int, sizes: list[int], decay: float) -> None:
    generator = np.random.default_rng(seed)
    ranking = ExpertRanking(LAYERS, EXPERTS, decay)
    expected = np.zeros((LAYERS, EXPERTS))
    for size in sizes:
        tokens = [_token(generator) for _ in range(size)]
        ranking.begin_step(size)
        for layer in range(LAYERS):
            if size == 1:
                ids, weights = tokens[0]
                ranking.add_token(layer, ids[layer].tolist(), weights[layer].tolist())
            else:
                ranking.add_tokens(layer, np.stack([ids[layer] for ids, _ in tokens]), np.stack([w[layer] for _, w in tokens]))
        for ids, weights in tokens:
            expected *= decay
            for layer in range(LAYERS):
                expected[layer, ids[layer]] += weights[layer] / weights[layer].sum()
    # Scores are kept up to one common factor.
    np.testing.assert_allclose(ranking.scores / ranking.scores.max(), expected / expected.max(), rtol=1e-9, atol=1e-12)


def test_thousands_of_tokens_do_not_overflow() -> None:
    ranking = ExpertRanking(1, 3, 0.9)
    for token in range(5000):
        ranking.begin_step(1)
        ranking.add_token(0, [token % 2], [1.0])
    assert np.isfinite(ranking.scores).all()
    assert ranking.order(0) == [1, 0, 2]
    ranking.begin_step(20000)
    ranking.add_tokens(0, np.full((20000, 1), 2), np.ones((20000, 1)))
    assert np.isfinite(ranking.scores).all() and ranking.order(0)[0] == 2


def test_a_seed_is_the_stationary_value() -> None:
    """A token that follows the profile exactly leaves the seeded scores where they are."""
    shares = np.array([[0.5, 0.3, 0.2]])
    ranking = ExpertRanking(1, 3, 0.95)
    ranking.seed(shares)
    before = ranking.scores / ranking.scores.sum()
    ranking.begin_step(1)
    ranking.add_token(0, [0, 1, 2], shares[0].tolist())
    np.testing.assert_allclose(ranking.scores / ranking.scores.sum(), before)
    assert ranking.order(0) == [0, 1, 2]


def test_unnormalised_weights_count_like_normalised_ones() -> None:
    small, large = ExpertRanking(1, 4), ExpertRanking(1, 4)
    for ranking, factor in ((small, 0.01), (large, 1.0)):
        ranking.begin_step(1)
        ranking.add_token(0, [1, 3], [0.2 * factor, 0.6 * factor])
    np.testing.assert_allclose(small.scores, large.scores)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, 2.0])
def test_a_decay_outside_zero_and_one_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        ExpertRanking(1, 1, decay)
