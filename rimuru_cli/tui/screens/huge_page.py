"""The screen behind the zoom: one huge page, its parts, and everything that is known about one of them."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.strip import Strip

from rimuru_cli.tui.widgets.keys_line import KeysLine
from rimuru_cli.tui.widgets.status import TitleLine
from rimuru_cli.tui.widgets.strips import StripWidget, heading, text_line
from rimuru_cli.tui.widgets.tiles import PageTiles, page_facts
from rimuru_cli.tui.wrapping import wrap


class Inspector(StripWidget):
    """Name and value of everything that is known about the inspected page."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """One fact a line; long ones go on below."""
        frame = self.pool.frame
        page = None if frame is None else self.screen.query_one(PageTiles).inspected(frame)
        if frame is None or page is None:
            return []
        lines = [heading("page", width, self.palette)]
        room = max(8, width - 10)
        for name, value in page_facts(frame, page):
            pieces = wrap(value, room)
            names = [name, *[""] * (len(pieces) - 1)]
            lines += [
                text_line(width, (f"{n:<9} ", Style(dim=True)), (piece, Style(bold=True))) for n, piece in zip(names, pieces, strict=True)
            ]
        return lines[:height]


class HugePageScreen(Screen[None]):
    """One huge page and the inspector."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "leave", "Back"),
        Binding("pageup", "step(-1)", "Previous"),
        Binding("pagedown", "step(1)", "Next"),
    ]
    CSS = """
    HugePageScreen Horizontal { height: 1fr; }
    HugePageScreen PageTiles { width: 2fr; }
    HugePageScreen Inspector { width: 1fr; margin-left: 2; }
    HugePageScreen.-narrow Horizontal { layout: vertical; }
    HugePageScreen.-narrow PageTiles { width: 1fr; height: 1fr; }
    HugePageScreen.-narrow Inspector { width: 1fr; height: 10; margin-left: 0; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-broad")]  # noqa: RUF012  # typed so in the base class

    def __init__(self, huge: int) -> None:
        super().__init__()
        self._huge = huge
        self._words_at = -1.0

    def compose(self) -> ComposeResult:
        """Title, tiles, inspector, keys."""
        yield TitleLine()
        with Horizontal():
            yield PageTiles(self._huge)
            yield Inspector()
        yield KeysLine()

    def on_mount(self) -> None:
        """The keyboard belongs to the tiles."""
        tiles = self.query_one(PageTiles)
        tiles.go_to(self._huge)
        tiles.focus()

    def show_frame(self, *, everything: bool = False) -> None:
        """Draw the newest frame: tiles at once, words twice a second."""
        if not self.query(PageTiles):  # not composed yet, or about to be taken away
            return
        tiles = self.query_one(PageTiles)
        tiles.update_lines()
        now = tiles.pool.clock()
        if everything or now - self._words_at >= 0.5:
            self._words_at = now
            self.query_one(Inspector).update_lines()
            self.query_one(TitleLine).update_lines()

    def on_page_tiles_inspected(self) -> None:
        """Another page, other facts."""
        self.query_one(Inspector).update_lines()

    def action_step(self, by: int) -> None:
        """The neighbouring huge page."""
        tiles = self.query_one(PageTiles)
        tiles.go_to(tiles.huge + by)

    def action_leave(self) -> None:
        """Back to the pool, with the cursor on this page."""
        self.app.pop_screen()
