"""The map's arithmetic: every byte of the pool has its cell, whatever the size of the pool, of the pages and of the screen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_engine import SyntheticEngine

from rimuru_cli.engine.telemetry.frame import BUFFER, CONV, EXPERT, FREE, KINDS, KV, SSM, TAIL, PageTable
from rimuru_cli.tui.page_grid import BLANK, CODES_OF_KINDS, CURSOR, MERGED, SPLIT, PageGrid, arrange, pages_of_huge
from rimuru_cli.tui.palette import BASE, FRESH, PART, SHADES, WARM


def table(rows: list[tuple[int, int, int]]) -> PageTable:
    """Pages from (size, level, kind), one after the other."""
    size = np.array([row[0] for row in rows], dtype=np.int64)
    nothing = np.full(len(rows), -1, dtype=np.int32)
    return PageTable(
        offset=np.cumsum(size) - size,
        size=size,
        level=np.array([row[1] for row in rows], dtype=np.uint8),
        kind=np.array([row[2] for row in rows], dtype=np.uint8),
        layer=nothing.astype(np.int16),
        owner=nothing,
        part=nothing,
        score=np.full(len(rows), np.nan, dtype=np.float32),
        rank=nothing,
        loaded_step=nothing,
        used_step=nothing,
    )


def base(pages: PageTable) -> np.ndarray:
    return np.full(len(pages), BASE, dtype=np.uint8)


def kinds(codes: np.ndarray) -> list[list[str]]:
    return [["." if code >= CODES_OF_KINDS else KINDS[code // SHADES] for code in row] for row in codes]


@settings(max_examples=40)
@given(st.integers(1, 10_000), st.integers(1, 100), st.integers(1, 50), st.booleans())
def test_any_pool_fits_any_screen(num_huge: int, width: int, rows: int, halves: bool) -> None:
    layout = arrange(num_huge, width, rows, halves=halves)
    shown: set[int] = set()
    for row in range(rows):
        for column in range(width):
            huge = layout.huge_at(column, row)
            assert huge is None or 0 <= huge < num_huge
            if huge is not None:
                shown.add(huge)
    assert layout.huge_at(width, 0) is None and layout.huge_at(-1, 0) is None and layout.huge_at(0, rows) is None
    if num_huge <= width * rows:
        assert shown == set(range(num_huge)), "where there is a cell for each, each can be pointed at"
    for huge in {0, num_huge // 2, num_huge - 1}:
        cells = layout.cells_of(huge)
        assert len(cells) >= 1 and cells[0] >= 0 and cells[-1] < layout.num_cells
        for columns, lines in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            other, cell = layout.moved(huge, cells[0], columns, lines)
            assert 0 <= other < num_huge
            if columns == 0 and other != huge and layout.huge_per_cell <= 1:
                assert layout.moved(other, cell, 0, -lines)[0] == huge, "down and up again leads back"


@given(st.integers(1, 3000), st.integers(1, 90), st.integers(1, 60))
def test_moving_right_visits_every_cell_of_the_map(num_huge: int, width: int, rows: int) -> None:
    layout = arrange(num_huge, width, rows)
    huge, cell, steps = 0, 0, 0
    while (after := layout.moved(huge, cell, 1, 0))[0] != huge:
        assert after[0] > huge
        (huge, cell), steps = after, steps + 1
    assert steps >= min(num_huge, layout.num_cells) - 1
    assert huge >= num_huge - 1 - layout.huge_per_cell


def test_few_huge_pages_become_bricks_and_many_a_tape() -> None:
    assert arrange(40, 100, 40).bricks and arrange(40, 100, 40).gap_rows == 1
    assert not arrange(3000, 100, 40).bricks
    assert arrange(3000, 100, 40).huge_per_cell == 0.75
    assert arrange(8000, 100, 40).huge_per_cell == 2.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(range(len(KINDS)))), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from([1, 700, 4096]),
)
def test_every_cell_has_a_code_and_no_byte_is_lost(rows: list[tuple[int, int]], width: int, height: int, huge: int) -> None:
    pages = table([(size, 3, kind) for size, kind in rows])
    pool = int(pages.size.sum())
    grid = PageGrid(pool, huge)
    grid.resize(width, height)
    codes = grid.draw(pages, base(pages), 0.0)
    assert codes.shape == (height, width) and codes.dtype == np.uint8
    assert ((codes < CODES_OF_KINDS) | (codes == BLANK)).all()
    assert grid._overlap.sum() == pytest.approx(pool), "the cells' shares add up to the pool"
    if not grid.layout.bricks:
        assert (codes != BLANK).all(), "a tape leaves nothing blank"


def test_a_tape_reads_like_text() -> None:
    pages = table([(100, 2, EXPERT), (100, 2, KV), (100, 1, FREE), (100, 2, BUFFER)] * 4)
    grid = PageGrid(1600, 100)
    grid.resize(8, 2)
    names = ["expert", "kv", "free", "buffer"] * 2
    assert kinds(grid.draw(pages, base(pages), 0.0)) == [names, names]
    assert grid.layout.huge_at(3, 1) == 11 and list(grid.layout.cells_of(11)) == [11]
    grid.resize(4, 2)  # two huge pages a cell: what is used shows, even where half is free
    assert kinds(grid.draw(pages, base(pages), 0.0)) == [["expert", "buffer"] * 2] * 2
    grid.resize(16, 2)  # two cells a huge page
    assert kinds(grid.draw(pages, base(pages), 0.0))[0] == [name for name in names for _ in range(2)]


def test_a_brick_shows_its_parts_and_gaps() -> None:
    whole, halves = [(400, 2, EXPERT)], [(200, 3, KV), (200, 3, FREE)]
    pages = table([*whole, *halves, *whole])
    grid = PageGrid(1200, 400)
    grid.resize(33, 4)
    assert grid.layout.bricks
    rows = kinds(grid.draw(pages, base(pages), 0.0))
    assert rows[0][:11] == ["expert"] * 10 + ["."]
    assert rows[0][11:22] == ["kv"] * 5 + ["free"] * 5 + ["."]
    assert rows[2] == rows[0] and rows[3] == ["."] * 33, "three rows of brick, one of gap"


def test_small_pages_that_fill_little_of_their_parent_are_dim() -> None:
    pages = table([(100, 3, KV)] * 3 + [(100, 3, FREE)] * 7 + [(100, 3, KV)] * 9 + [(100, 3, FREE)] + [(1000, 2, EXPERT)])
    grid = PageGrid(3000, 1000)
    grid.resize(3, 1)
    assert grid.draw(pages, base(pages), 0.0)[0].tolist() == [KV * SHADES + PART, KV * SHADES + BASE, EXPERT * SHADES + BASE]


def test_fresh_pages_brighten_their_cell() -> None:
    pages = table([(100, 2, EXPERT)] * 4)
    shades = np.array([BASE, WARM, FRESH, BASE], dtype=np.uint8)
    grid = PageGrid(400, 100)
    grid.resize(4, 1)
    assert (grid.draw(pages, shades, 0.0)[0] % SHADES).tolist() == [BASE, WARM, FRESH, BASE]
    grid.resize(2, 1)
    assert (grid.draw(pages, shades, 0.0)[0] % SHADES).tolist() == [WARM, FRESH], "one bright page of several is enough"


def test_one_kind_alone() -> None:
    pages = table([(100, 2, EXPERT), (100, 2, KV), (100, 2, SSM), (100, 3, CONV)])
    grid = PageGrid(400, 100)
    grid.resize(4, 1)
    assert kinds(grid.draw(pages, base(pages), 0.0, only=KV)) == [["free", "kv", "free", "free"]]


def test_splits_and_merges_flash_and_fade() -> None:
    before = table([(100, 2, EXPERT), (100, 1, FREE)])
    after = table([(100, 2, EXPERT), (50, 3, KV), (50, 3, FREE)])
    grid = PageGrid(200, 100)
    grid.resize(8, 1)
    grid.watch_splits(before, 0.0)
    assert grid.num_split() == 0 and not grid.flashing(0.0)
    grid.watch_splits(after, 1.0)
    assert grid.num_split() == 1 and grid.flashing(1.5)
    codes = grid.draw(after, base(after), 1.5)[0]
    assert codes[4] == SPLIT and kinds([codes])[0][5:] == ["kv", "free", "free"]
    assert SPLIT not in grid.draw(after, base(after), 2.0) and not grid.flashing(2.0)
    grid.watch_splits(before, 3.0)
    assert grid.draw(before, base(before), 3.1)[0][4] == MERGED


def test_a_storm_of_splits_does_not_hide_the_map() -> None:
    before, after = table([(100, 1, FREE)] * 500), table([(50, 3, KV), (50, 3, FREE)] * 500)
    grid = PageGrid(50_000, 100)
    grid.resize(50, 10)
    grid.watch_splits(before, 0.0)
    grid.watch_splits(after, 1.0)
    codes = grid.draw(after, base(after), 1.0)
    assert 0 < (codes == SPLIT).sum() <= 20


def test_an_expert_in_a_huge_page_of_its_own_size_is_no_split() -> None:
    grid = PageGrid(200, 100)
    grid.resize(2, 1)
    grid.watch_splits(table([(100, 1, FREE), (100, 1, FREE)]), 0.0)
    grid.watch_splits(table([(100, 2, EXPERT), (100, 1, FREE)]), 1.0)
    assert grid.num_split() == 0 and not grid.flashing(1.0)


def test_the_cursor_marks_the_ends_of_its_page() -> None:
    pages = table([(100, 2, EXPERT)] * 3)
    grid = PageGrid(300, 100)
    grid.resize(12, 1)
    codes = grid.draw(pages, base(pages), 0.0)
    grid.mark(codes, 1)
    assert [index for index, code in enumerate(codes[0]) if code == CURSOR] == [4, 7]


def test_the_last_huge_page_may_be_cut_short() -> None:
    pages = table([(100, 2, EXPERT), (100, 2, KV), (30, 2, TAIL)])
    grid = PageGrid(230, 100)
    assert grid.num_huge == 3
    grid.resize(3, 1)
    grid.watch_splits(pages, 0.0)
    assert kinds(grid.draw(pages, base(pages), 0.0))[0] == ["expert", "kv", "tail"]
    assert pages_of_huge(pages, 2, 100).tolist() == [2]
    assert pages_of_huge(pages, 0, 100).tolist() == [0]
    assert pages_of_huge(pages, 7, 100).tolist() == []


@pytest.mark.parametrize("hybrid", [False, True])
def test_frames_of_an_engine(hybrid: bool) -> None:
    engine = SyntheticEngine(pages=500, layers=8, experts=24, hybrid=hybrid)
    grid: PageGrid | None = None
    for scenario in ("idle", "prefill", "long context", "shrink storm", "recovery"):
        for frame in engine.play(scenario, 2):
            grid = grid or PageGrid(frame.engine.pool_bytes, frame.engine.huge_page_bytes)
            grid.resize(60, 24)
            grid.watch_splits(frame.pages, frame.time)
            codes = grid.draw(frame.pages, base(frame.pages), frame.time + 5)
            shown = {KINDS[code // SHADES] for code in np.unique(codes) if code < CODES_OF_KINDS}
            owned = {kind for kind, num_bytes in frame.pages.bytes_by_kind().items() if num_bytes > 0.02 * frame.engine.pool_bytes}
            assert owned <= shown
            pages = np.concatenate([pages_of_huge(frame.pages, huge, grid.huge_page_bytes) for huge in range(grid.num_huge)])
            assert (pages == np.arange(len(frame.pages))).all(), "every page lies in exactly one huge page"
