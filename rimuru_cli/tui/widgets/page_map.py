"""The map of every page of the pool: half-block cells, rows redrawn only where something changed, and a cursor to look closer."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from rimuru_cli.engine.telemetry.frame import BUFFER, CONV, EXPERT, KINDS, KV, SSM, Frame
from rimuru_cli.tui import words
from rimuru_cli.tui.page_grid import BLANK, CURSOR, MERGED, NUM_CODES, SPLIT, PageGrid
from rimuru_cli.tui.palette import FRESH, LOOKS, SHADES, Palette, mix
from rimuru_cli.tui.rows import Glyphs, HalfBlocks
from rimuru_cli.tui.widgets.strips import StripWidget, heading

FILTERS: Final = (None, EXPERT, KV, BUFFER, SSM, CONV)
SPLIT_GLYPH, MERGED_GLYPH, CURSOR_GLYPH = "÷", "+", "X"
_EMPTY: Final = np.zeros((0, 0), dtype=np.uint8)


class PageMap(StripWidget, can_focus=True):
    """Draws every page of the pool in the order of addresses.

    Attributes:
        cursor: the huge page that is looked at, or None.
        only: kind code of the only kind that is shown, or None for all.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1, 0)", "Move", show=False),
        Binding("right", "move(1, 0)", "Move", show=False),
        Binding("up", "move(0, -1)", "Move", show=False),
        Binding("down", "move(0, 1)", "Move", show=False),
        Binding("home", "go(0)", "First page", show=False),
        Binding("end", "go(-1)", "Last page", show=False),
        Binding("enter", "zoom", "Zoom"),
        Binding("k", "filter", "Kind"),
        Binding("escape", "leave", "Let go", show=False),
    ]

    class Looked(Message):
        """The cursor is on another place; None when it was taken away."""

        def __init__(self, huge: int | None) -> None:
            super().__init__()
            self.huge = huge

    class Zoomed(Message):
        """Somebody wants to see a huge page from near."""

        def __init__(self, huge: int) -> None:
            super().__init__()
            self.huge = huge

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cursor: int | None = None
        self.only: int | None = None
        self._cell = 0
        self._grid: PageGrid | None = None
        self._engine_id = ""
        self._codes: NDArray[np.uint8] = _EMPTY
        self._halves = HalfBlocks([])
        self._glyphs = Glyphs([])
        self._drawn_with: Palette | None = None

    def show_frame(self) -> None:
        """Draw the newest frame; refreshes only rows that look different."""
        frame = self.pool.frame
        width, height = self.size
        height -= 1  # the heading
        if frame is None or width < 1 or height < 1 or not len(frame.pages):
            return
        grid = self._grid_for(frame, width, height)
        grid.watch_splits(frame.pages, frame.time)
        codes = grid.draw(frame.pages, self.pool.shades(), self.pool.now, only=self.only)
        if self.cursor is not None:
            grid.mark(codes, self.cursor)
        self._take(codes, height, heading(self._title(frame, grid), width, self.palette, focused=self.has_focus))

    def _grid_for(self, frame: Frame, width: int, height: int) -> PageGrid:
        engine, palette = frame.engine, self.palette
        rows = height * 2 if palette.colours else height
        known = self._grid
        if known is None or engine.engine_id != self._engine_id or known.pool_bytes != engine.pool_bytes:
            known = self._grid = PageGrid(engine.pool_bytes, engine.huge_page_bytes)
            self._engine_id = engine.engine_id
            self.cursor = None
        if (known.layout.width, known.layout.rows) != (width, rows) or palette != self._drawn_with:
            known.resize(width, rows, halves=palette.colours)
            self._cell = 0 if self.cursor is None else known.layout.cells_of(self.cursor)[0]
            self._halves, self._glyphs = HalfBlocks(colours_of_codes(palette)), Glyphs(glyphs_of_codes())
            self._drawn_with = palette
            self._codes = _EMPTY
        return known

    def _take(self, codes: NDArray[np.uint8], height: int, title: Strip) -> None:
        """Compare with what is on the screen, line by line."""
        per_line = 2 if self.palette.colours else 1
        if codes.shape != self._codes.shape or len(self._lines) != height + 1:
            changed = np.arange(height)
            self._lines = [Strip([])] * (height + 1)
            self._finished.clear()
        else:
            rows = (codes != self._codes).any(axis=1)
            changed = np.flatnonzero(rows.reshape(height, per_line).any(axis=1))
        self._codes = codes
        regions = []
        if title != self._lines[0]:
            self._lines[0] = title
            self._finished.pop(0, None)
            regions.append(Region(0, 0, title.cell_length, 1))
        for line in changed.tolist():
            row = line * per_line
            strip = self._halves.row(codes[row], codes[row + 1]) if per_line == 2 else self._glyphs.row(codes[row])
            self._lines[line + 1] = self._finished[line + 1] = strip
            regions.append(Region(0, line + 1, codes.shape[1], 1))
        if regions:
            self.refresh(*regions)

    def update_lines(self) -> None:
        """After another size or theme."""
        self._drawn_with = None
        self.show_frame()

    def _title(self, frame: Frame, grid: PageGrid) -> str:
        per_cell = grid.layout.huge_per_cell
        text = f"pool: {grid.num_huge:,} huge pages of {words.size(frame.engine.huge_page_bytes)}, {grid.num_split():,} split"
        if per_cell > 1.005:
            text += f", {per_cell:.3g} a cell"
        if self.only is not None:
            text += f"; {LOOKS[KINDS[self.only]].label} only"
        return text

    def look_at(self, huge: int, cell: int | None = None) -> None:
        """Put the cursor on a huge page; `cell` is the one it was reached at, if that was one of several."""
        if self._grid is not None:
            self.cursor = min(max(0, huge), self._grid.num_huge - 1)
            self._cell = self._grid.layout.cells_of(self.cursor)[0] if cell is None else cell
            self.post_message(self.Looked(self.cursor))
            self.show_frame()

    def action_move(self, columns: int, rows: int) -> None:
        """Move the cursor; the first key only puts it somewhere."""
        if self._grid is None:
            return
        if self.cursor is None:
            self.look_at(0)
        else:
            self.look_at(*self._grid.layout.moved(self.cursor, self._cell, columns, rows))

    def action_go(self, huge: int) -> None:
        """To the first or the last huge page."""
        if self._grid is not None:
            self.look_at(huge % self._grid.num_huge)

    def action_zoom(self) -> None:
        """Look at the huge page under the cursor from near."""
        if self.cursor is None:
            self.look_at(0)
        if self.cursor is not None:
            self.post_message(self.Zoomed(self.cursor))

    def action_filter(self) -> None:
        """Show one kind only, the next one with each press, then all again; kinds that the model has not are left out."""
        frame = self.pool.frame
        has = {None, EXPERT, KV, BUFFER}
        if frame is not None:
            has |= {kind for kind, size in ((SSM, frame.engine.ssm_page_bytes), (CONV, frame.engine.conv_page_bytes)) if size}
        choices = [kind for kind in FILTERS if kind in has]
        at = choices.index(self.only) if self.only in choices else 0
        self.only = choices[(at + 1) % len(choices)]
        self.show_frame()

    def action_leave(self) -> None:
        """Take the cursor away."""
        self.cursor = None
        self.post_message(self.Looked(None))
        self.show_frame()

    def watch_has_focus(self, focused: bool) -> None:
        """The heading shows who has the keyboard."""
        super().watch_has_focus(focused)
        self.show_frame()

    def on_click(self, event: Click) -> None:
        """Put the cursor there; a second click on the same place zooms."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y < 1 or self._grid is None:
            return
        huge = self._grid.layout.huge_at(offset.x, (offset.y - 1) * (2 if self.palette.colours else 1))
        if huge is None:
            return
        again = huge == self.cursor
        self.look_at(huge)
        if again:
            self.action_zoom()


def colours_of_codes(palette: Palette) -> list[str]:
    """A colour for each cell code."""
    if not palette.colours:
        return []
    colours = [palette.colour(kind, shade) for kind in KINDS for shade in range(SHADES)]
    merged = palette.soft if palette.depth == "16" else mix(palette.ink, palette.ground, 0.45)
    special = {BLANK: palette.ground, CURSOR: palette.ink, SPLIT: palette.ink, MERGED: merged}
    return colours + [special[code] for code in range(len(colours), NUM_CODES)]


def glyphs_of_codes() -> list[tuple[str, Style]]:
    """A sign and a weight for each cell code, where there are no colours."""
    plain, bold = Style(), Style(bold=True)
    looks = [LOOKS[kind] for kind in KINDS]
    glyphs = [(look.fresh_glyph, bold) if shade == FRESH else (look.glyph, plain) for look in looks for shade in range(SHADES)]
    special = {BLANK: (" ", plain), CURSOR: (CURSOR_GLYPH, Style(reverse=True)), SPLIT: (SPLIT_GLYPH, bold), MERGED: (MERGED_GLYPH, bold)}
    return glyphs + [special[code] for code in range(len(glyphs), NUM_CODES)]
