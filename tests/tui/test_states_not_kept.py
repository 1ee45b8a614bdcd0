"""States that were not kept for lack of room are shown wherever somebody looks: `/memory` and the dashboard."""

from __future__ import annotations

from dataclasses import replace

from fake_engine import FakeEngine
from synthetic_engine import SyntheticEngine

from rimuru_cli.chat.show import pool_lines
from rimuru_cli.tui.state import PoolState
from rimuru_cli.tui.widgets.vitals import figures_of


def test_in_the_picture_of_the_pool() -> None:
    snapshot = FakeEngine().snapshot()
    assert not any("to resume from" in line for line in pool_lines(snapshot))
    assert any(line.startswith("  once there was no room") for line in pool_lines(replace(snapshot, states_not_kept=1)))
    assert any(line.startswith("  1,234 times there was no room") for line in pool_lines(replace(snapshot, states_not_kept=1234)))


def test_among_the_figures_of_the_dashboard() -> None:
    pool, frame = PoolState(), SyntheticEngine(200, layers=4, experts=16, top_k=2, hybrid=True).next("decode")
    pool.add(frame)
    assert "not kept" not in {figure.name for figure in figures_of(pool)}
    pool.add(replace(frame, time=frame.time + 1.0, counters=replace(frame.counters, states_not_kept=7)))
    shown = {figure.name: (figure.value, figure.unit) for figure in figures_of(pool)}
    assert shown["not kept"] == ("7", "states")
