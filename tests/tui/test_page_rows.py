"""Rows of cells: always as wide as they should be, whatever the codes; drawn once each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.tui.page_grid import NUM_CODES
from rimuru_cli.tui.palette import Palette
from rimuru_cli.tui.rows import Glyphs, HalfBlocks
from rimuru_cli.tui.widgets.page_map import colours_of_codes, glyphs_of_codes

CODES = st.lists(st.tuples(st.integers(0, NUM_CODES - 1), st.integers(0, NUM_CODES - 1)), min_size=1, max_size=200)
HALVES = HalfBlocks(colours_of_codes(Palette()))


@given(CODES)
def test_a_row_has_a_cell_for_each_pair_in_the_right_colours(codes: list[tuple[int, int]]) -> None:
    upper, lower = (np.array([pair[i] for pair in codes], dtype=np.uint8) for i in range(2))
    strip = HALVES.row(upper, lower)
    assert strip.cell_length == len(codes) == len(strip.text)
    colours = colours_of_codes(Palette())
    at = 0
    for text, style, _ in strip:
        for char in text:
            above, below = colours[upper[at]], colours[lower[at]]
            assert style is not None and style.bgcolor is not None and style.color is not None
            assert (style.color.name, style.bgcolor.name) == (above, below)
            assert char == (" " if above == below else "▀")
            at += 1
    assert HALVES.row(upper, lower) is strip, "the same row is not drawn twice"


@given(st.lists(st.integers(0, NUM_CODES - 1), min_size=1, max_size=200))
def test_glyph_rows(codes: list[int]) -> None:
    strip = Glyphs(glyphs_of_codes()).row(np.array(codes, dtype=np.uint8))
    assert strip.text == "".join(glyphs_of_codes()[code][0] for code in codes)


def test_runs_are_one_segment_each() -> None:
    upper = np.array([4] * 50 + [12] * 50, dtype=np.uint8)
    assert len(list(HALVES.row(upper, upper))) == 2


def test_the_store_of_rows_is_bounded() -> None:
    halves = HalfBlocks(colours_of_codes(Palette()))
    rng = np.random.default_rng(0)
    for _ in range(2100):
        row = rng.integers(0, NUM_CODES, 16).astype(np.uint8)
        halves.row(row, row)
    assert len(halves._kept) <= 2048
