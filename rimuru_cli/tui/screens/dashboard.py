"""The dashboard on a screen of its own."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import Screen

from rimuru_cli.tui.widgets.keys_line import KeysLine
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.pool_view import PoolView


class DashboardScreen(Screen[None]):
    """The pool, and the keys below."""

    CSS = "DashboardScreen { layout: vertical; }"

    def compose(self) -> ComposeResult:
        """The pool and the keys."""
        yield PoolView()
        yield KeysLine()

    def on_mount(self) -> None:
        """The keyboard belongs to the map."""
        self.query_one(PageMap).focus()

    def on_screen_resume(self) -> None:
        """What happened while another screen was in front."""
        self.query_one(PoolView).redraw()
