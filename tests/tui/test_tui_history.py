"""The last minutes: rates, gaps, other engines, recordings that are wound back; and how long ago a page was loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tui_parts import small_engine

from rimuru_cli.engine.telemetry.frame import EXPERT, KINDS, AdjusterRecord, Frame
from rimuru_cli.tui.ages import StepClock
from rimuru_cli.tui.history import SLOT_SECONDS, SLOTS, History
from rimuru_cli.tui.messages import SourceStatus
from rimuru_cli.tui.palette import BASE, FRESH, WARM
from rimuru_cli.tui.state import PoolState

FRAME = small_engine().next("decode")


def at(time: float, *, engine_id: str = "a" * 16, **counters: float | None) -> Frame:
    return replace(
        FRAME, time=time, engine=replace(FRAME.engine, engine_id=engine_id), counters=replace(FRAME.counters, step=1, **counters)
    )


def test_the_hit_rate_is_that_of_the_last_seconds() -> None:
    history = History()
    assert history.hit_rate(10) is None
    for second in range(30):
        # Ten seconds of misses only, then hits only.
        history.add(at(100.0 + second, expert_uses=100 * second, expert_hits=max(0, 100 * (second - 9))))
    assert history.hit_rate(10) == 1.0
    assert history.hit_rate(1000) == pytest.approx(20 / 29)
    assert history.hit_rate(25) == pytest.approx(20 / 25, abs=0.03)


def test_columns_hold_means_and_sums() -> None:
    history = History()
    for tick in range(80):
        history.add(
            at(
                1000.0 + tick / 10,
                decode_rate=10.0 if tick < 40 else 30.0,
                link_rate=2e9,
                expert_uses=tick * 10,
                expert_hits=tick * 9,
                context_used=tick,
            )
        )
    columns = history.columns(8.0, 4)
    assert columns.seconds == 2.0
    assert columns.decode_rate.tolist() == [10.0, 10.0, 30.0, 30.0]
    assert columns.link_rate.tolist() == [2e9] * 4
    assert columns.hit_rate[1:] == pytest.approx([0.9] * 3)
    assert columns.composition.shape == (len(KINDS), 4)
    assert columns.composition.sum(axis=0) == pytest.approx([FRAME.engine.pool_bytes] * 4)
    assert columns.context[-1] == 79


def test_columns_begin_at_fixed_moments() -> None:
    """A chart that moved with every frame would shimmer."""
    history = History()
    seen = set()
    for tick in range(100):
        history.add(at(1000.0 + tick / 10, decode_rate=float(tick)))
        seen.add(tuple(np.nan_to_num(history.columns(20.0, 5).decode_rate, nan=-1.0)[:-1]))
    assert len(seen) <= 4, "all but the last column change only when a new one begins"


def test_a_short_silence_is_bridged_and_a_long_one_is_a_gap() -> None:
    history = History()
    history.add(at(1000.0, decode_rate=5.0))
    history.add(at(1001.9, decode_rate=5.0))
    assert not np.isnan(history.columns(2.0, 4).decode_rate).any()
    history.add(at(1020.0, decode_rate=7.0))
    columns = history.columns(20.0, 40)
    assert np.isnan(columns.decode_rate[15:35]).all() and columns.decode_rate[-1] == 7.0
    assert not np.isnan(columns.composition).any(), "all that time was one step, and nothing moved in it"
    later = at(1040.0)
    history.add(replace(later, counters=replace(later.counters, step=9)))
    assert np.isnan(history.columns(20.0, 40).composition[0, 15:35]).all()


def test_another_engine_or_an_earlier_moment_begins_anew() -> None:
    history = History()
    history.add(at(1000.0, expert_uses=10, expert_hits=10))
    history.add(at(1001.0, expert_uses=20, expert_hits=20))
    assert history.length > 1.0
    history.add(at(1002.0, engine_id="b" * 16, expert_uses=5, expert_hits=0))
    assert history.hit_rate(100) is None and history.length == SLOT_SECONDS
    history.add(at(1003.0, engine_id="b" * 16, expert_uses=15, expert_hits=0))
    assert history.hit_rate(100) == 0.0
    history.add(at(900.0, engine_id="b" * 16, expert_uses=1, expert_hits=1))
    assert history.hit_rate(100) is None, "wound back"


def test_ten_minutes_are_kept_and_memory_does_not_grow() -> None:
    history = History()
    for second in range(0, 3000, 2):
        history.add(at(1000.0 + second, decode_rate=float(second)))
    assert history.columns(600.0, 600).decode_rate.shape == (600,)
    assert np.isnan(history.columns(6000.0, 1200).decode_rate).sum() == 0
    assert history._composition.shape == (len(KINDS), SLOTS)
    history.add(at(1e6, decode_rate=1.0))  # a laptop that slept
    assert np.isnan(history.columns(60.0, 60).decode_rate[:-1]).all()


def test_swaps_and_preemptions_are_counted_over_time() -> None:
    history = History()
    for second in range(60):
        history.add(at(1000.0 + second, swaps=3 * second, preemptions=second // 30))
    assert history.swaps(10) == pytest.approx(30, abs=3)
    assert history.preemptions(60) == 1 and history.preemptions(5) == 0


def test_pages_fade_in_time_not_in_steps() -> None:
    clock = StepClock()
    for tick in range(40):
        clock.add(replace(at(1000.0 + tick / 10), counters=replace(FRAME.counters, step=tick * 7, tables_step=0)))
    loaded = np.array([-1, 0, 39 * 7, 38 * 7, 30 * 7, 20 * 7, 10 * 7], dtype=np.int32)
    assert clock.shades(loaded, 1003.9).tolist() == [BASE, BASE, FRESH, FRESH, WARM, WARM, BASE]
    assert clock.shades(loaded, 1005.0).tolist() == [BASE, BASE, WARM, WARM, BASE, BASE, BASE]
    assert (clock.shades(loaded, 1010.0) == BASE).all(), "also when no more frames come"


def test_what_a_first_frame_holds_is_not_just_loaded() -> None:
    clock = StepClock()
    clock.add(replace(at(1000.0), counters=replace(FRAME.counters, step=500, tables_step=500)))
    assert (clock.shades(np.array([500, 499, 3], dtype=np.int32), 1000.0) == BASE).all()


def test_the_state_keeps_more_events_than_a_frame_holds() -> None:
    state = PoolState(clock=lambda: 0.0)
    events = [AdjusterRecord(number, number, 0.0, 1, 0, "sequences need pages", 1, 0) for number in range(200)]
    for end in range(0, 201, 20):
        state.add(replace(at(1000.0 + end), events=tuple(events[max(0, end - 64) : end])))
    assert [event.number for event in state.events] == list(range(200))
    state.add(replace(at(2000.0, engine_id="c" * 16), events=tuple(events[:2])))
    assert len(state.events) == 2


def test_time_goes_on_without_frames_but_not_in_a_paused_recording() -> None:
    now = [50.0]
    state = PoolState(clock=lambda: now[0], status=SourceStatus("live"))
    state.add(at(1000.0))
    now[0] = 53.0
    assert state.now == 1003.0
    state.status = SourceStatus("paused", position=1.0, duration=2.0)
    assert state.now == 1000.0


def test_charts_show_what_there_is_until_the_window_is_full() -> None:
    state = PoolState(clock=lambda: 0.0)
    state.add(at(1000.0))
    assert state.shown_seconds == 15.0
    state.add(at(1050.0))
    assert state.shown_seconds == 60.0
    state.add(at(1500.0))
    assert state.shown_seconds == state.window_seconds == 120.0
    assert (FRAME.pages.kind == EXPERT).any()
