"""Charts from block characters: heights, colours, axes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rimuru_cli.tui.palette import LOOKS, WARM, Palette
from rimuru_cli.tui.plots import EIGHTHS, headroom_scale, linear_scale, round_up, series, stacked_area

KINDS = ("expert", "kv", "free")
PALETTES = [Palette(), Palette("16"), Palette("none")]


def column(strips: list[object], x: int) -> list[tuple[str, str | None, str | None]]:
    """(character, ink, ground) of a column, from the top down."""
    cells = []
    for strip in strips:
        at = 0
        for text, style, _ in strip:  # type: ignore[attr-defined]
            if at <= x < at + len(text):
                ink = style.color.name if style and style.color else None
                cells.append((text[x - at], ink, style.bgcolor.name if style and style.bgcolor else None))
            at += len(text)
    return cells


def filled(strips: list[object], x: int) -> int:
    """Eighths of a column."""
    eighths = 0
    for char, ink, ground in column(strips, x):
        eighths += (
            8
            if char == " " and ink == ground and ink is not None and ink.startswith("#") and ink != Palette().ground
            else max(0, EIGHTHS.find(char))
        )
    return eighths


def test_shares_become_heights() -> None:
    shares = np.array([[0.5, 0.25], [0.25, 0.5], [0.25, 0.25]])
    strips = stacked_area(shares, KINDS, 4, Palette())
    expert, kv, free = (Palette().colour(kind, WARM) for kind in KINDS)
    assert column(strips, 0) == [(" ", free, free), (" ", kv, kv), (" ", expert, expert), (" ", expert, expert)]
    assert column(strips, 1)[1:3] == [(" ", kv, kv), (" ", kv, kv)]


def test_a_border_within_a_line_is_drawn_in_eighths() -> None:
    strips = stacked_area(np.array([[3 / 8], [5 / 8], [0.0]]), KINDS, 1, Palette())
    assert column(strips, 0) == [("▃", Palette().colour("expert", WARM), Palette().colour("kv", WARM))]


def test_what_is_not_known_stays_empty() -> None:
    strips = stacked_area(np.array([[np.nan, 1.0], [np.nan, 0.0], [np.nan, 0.0]]), KINDS, 2, Palette())
    assert column(strips, 0) == [(" ", Palette().ground, Palette().ground)] * 2
    strips = series(np.array([np.nan, 0.0]), linear_scale(1.0), 2, Palette(), kind="kv", label_width=0)
    assert filled(strips, 0) == 0 and filled(strips, 1) == 1, "nothing known and nothing there are different things"


@settings(max_examples=40)
@given(
    hnp.arrays(np.float64, st.tuples(st.just(3), st.integers(1, 40)), elements=st.floats(0, 1 / 3)),
    st.integers(1, 12),
    st.sampled_from(PALETTES),
)
def test_stacked_areas_have_the_size_that_was_asked_for(shares: np.ndarray, height: int, palette: Palette) -> None:
    strips = stacked_area(shares, KINDS, height, palette)
    assert len(strips) == height and {strip.cell_length for strip in strips} == {shares.shape[1]}
    if not palette.colours:
        assert set("".join(strip.text for strip in strips)) <= {LOOKS[kind].glyph for kind in KINDS} | {" "}


@settings(max_examples=40)
@given(
    hnp.arrays(np.float64, st.integers(1, 40), elements=st.one_of(st.floats(0, 2), st.just(float("nan")))),
    st.integers(1, 12),
    st.integers(0, 6),
    st.sampled_from(PALETTES),
)
def test_series_have_the_size_that_was_asked_for(values: np.ndarray, height: int, labels: int, palette: Palette) -> None:
    strips = series(values, headroom_scale(), height, palette, kind="expert", label_width=labels)
    assert len(strips) == height and {strip.cell_length for strip in strips} == {labels + len(values)}


def test_series_heights() -> None:
    strips = series(np.array([0.0, 0.5, 1.0, 7.0]), linear_scale(1.0), 4, Palette(), kind="kv", label_width=0)
    assert [filled(strips, x) for x in range(4)] == [1, 16, 32, 32]


def test_the_axis_of_the_hit_rate_keeps_90_to_999_legible() -> None:
    place = headroom_scale().place
    assert place(0.0) == 0.0 and place(0.999) == pytest.approx(1.0) and place(1.0) == 1.0
    assert place(0.99) - place(0.9) == pytest.approx(place(0.999) - place(0.99)) == pytest.approx(0.3)
    assert place(0.9) <= 0.4, "most of the axis is for what is above 90 %"
    # On eight lines, 99.0 and 99.5 % differ by several eighths; on a linear axis they would not differ at all.
    assert round(place(0.995) * 64) - round(place(0.99) * 64) >= 4
    values = np.linspace(0, 1, 5000)
    places = [place(float(value)) for value in values]
    assert places == sorted(places), "more hits are never lower"
    labels = [label for _, label in headroom_scale().marks]
    assert labels == ["50", "90", "99", "99.9"]
    strips = series(np.array([0.95]), headroom_scale(), 10, Palette(), kind="expert")
    assert [strip.text[:5].strip() for strip in strips if strip.text[:5].strip()] == ["99.9", "99", "90", "50"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 1), (-1, 1), (1e-320, 1), (float("nan"), 1), (0.7, 1), (1, 1), (1.1, 2), (2.3, 2.5), (31, 40), (41.8, 50), (99, 100), (101, 200)],
)
def test_round_numbers_above(value: float, expected: float) -> None:
    assert round_up(value) == expected
