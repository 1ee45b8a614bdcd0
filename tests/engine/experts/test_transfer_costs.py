"""Streamed or on demand: the choice follows the measured costs."""

from __future__ import annotations

from rimuru_cli.engine.experts.executor import TransferCosts


def test_a_cached_host_tier_is_read_in_place() -> None:
    """Reading in place costs nothing extra when a first read is as quick as a copy, so streaming has nothing to hide."""
    costs = TransferCosts(read_seconds=1e-4, copy_seconds=1e-4)
    assert not costs.prefers_streaming(512, 8, 128, 60.0)


def test_a_slow_disk_is_hidden_behind_the_computation() -> None:
    costs = TransferCosts(read_seconds=5e-3, copy_seconds=1e-4)
    assert not costs.prefers_streaming(512, 8, 128, 60.0), "nothing is known about the computation yet, so there is nothing to hide behind"
    costs.observe_compute(512, 0.4)
    assert costs.prefers_streaming(512, 8, 128, 60.0)
    assert not costs.prefers_streaming(2, 8, 128, 60.0), "two tokens touch few experts; loading all of them would be waste"


def test_the_computation_is_learnt_as_a_moving_average() -> None:
    costs = TransferCosts(1.0, 1.0)
    costs.observe_compute(10, 1.0)
    assert costs.compute_seconds == 0.1
    costs.observe_compute(10, 2.0)
    assert 0.1 < costs.compute_seconds < 0.2
