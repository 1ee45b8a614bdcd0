"""Replayed caches against counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rimuru_cli.engine.experts.coverage import RoutingTrace, coverage


def _trace(rows: list[list[list[int]]], num_experts: int) -> RoutingTrace:
    experts = np.array(rows, dtype=np.int64)
    return RoutingTrace(experts, np.ones(experts.shape), num_experts)


def test_probabilities_count_selections() -> None:
    trace = _trace([[[0, 1], [2, 3]], [[0, 2], [2, 3]]], 4)
    np.testing.assert_allclose(trace.probabilities(), [[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.5, 0.5]])


def test_lru_thrashes_on_a_sweep_and_the_live_ranking_does_not() -> None:
    """Every token sweeps through more experts than fit: LRU always threw out what comes next, a ranking keeps what it has."""
    trace = _trace([[[0, 1, 2, 3], [0, 1, 2, 3]] for _ in range(50)], 8)
    result = coverage(trace, trace.probabilities(), 0.25)
    assert result["lru"] == 0.0
    assert result["live"] == result["profile"] == result["oracle"] == 0.5
    assert result["uniform"] == 0.25


def test_lru_by_hand() -> None:
    trace = _trace([[[0]], [[1]], [[0]], [[2]], [[1]], [[2]]], 4)  # two slots: 0, 1 | 0 hits | 2 throws out 1 | 1 throws out 0 | 2 hits
    assert coverage(trace, np.full((1, 4), 0.25), 0.5)["lru"] == pytest.approx(2 / 6)


def test_the_profile_is_judged_on_other_text() -> None:
    fitted, held_out = _trace([[[0, 1]]] * 10, 4), _trace([[[1, 2]]] * 10, 4)
    assert coverage(fitted, fitted.probabilities(), 0.5)["profile"] == 1.0
    assert coverage(held_out, fitted.probabilities(), 0.5)["profile"] == 0.5


def test_the_live_ranking_follows_a_change_of_subject() -> None:
    trace = _trace([[[0, 1]]] * 40 + [[[2, 3]]] * 40, 4)
    result = coverage(trace, _trace([[[0, 1]]], 4).probabilities(), 0.5)
    assert result["profile"] == 0.5
    assert result["live"] > 0.8
