"""How often frames come: never more than so many a second, never more than a share of the time, and no silence after one bad frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.engine.telemetry.publish import Pace


@given(st.floats(1e-5, 2e-3))
def test_cheap_frames_come_at_the_full_rate(seconds: float) -> None:
    pace = Pace(0.5, 0.007)
    assert all(pace.wait(seconds) == pytest.approx(0.5 - seconds) for _ in range(20))


@given(st.floats(5e-4, 0.2))
def test_dear_frames_come_less_often(seconds: float) -> None:
    pace = Pace(0.05, 0.007)
    for _ in range(40):
        wait = pace.wait(seconds)
    assert seconds / (seconds + wait) < 0.008


def test_one_frame_that_was_interrupted_silences_nothing() -> None:
    pace = Pace(0.05, 0.007)
    assert pace.wait(10.0) < 0.5, "the first"
    for _ in range(30):
        pace.wait(2e-4)
    assert pace.wait(10.0) <= 0.05
    assert pace.wait(2e-4) <= 0.06
