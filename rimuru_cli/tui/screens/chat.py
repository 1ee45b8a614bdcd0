"""The chat window: the talk beside the pool, or above it where there is little room."""

from __future__ import annotations

from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.screen import Screen

from rimuru_cli.tui.chat_history import TypedHistory
from rimuru_cli.tui.widgets.chat_panel import ChatInput, ChatPanel
from rimuru_cli.tui.widgets.keys_line import KeysLine
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.pool_view import PoolView

LAYOUTS: Final = ("both", "talk-only", "pool-only")
LOADING: Final = ("The model is being loaded.", "Its memory shows up here as soon as that is done.", "F1 tells what the keys do.")
SIDE_BY_SIDE: Final = 100
"""From this many columns on, the pool stands beside the talk."""


class ChatScreen(Screen[None]):
    """Talk and pool in one window."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "app.help", "Help"),
        Binding("f2", "layout", "Layout"),
        Binding("c", "talk", "Talk"),
        Binding("escape", "escape", "Stop / pool"),
    ]
    CSS = """
    ChatScreen #window { layout: horizontal; height: 1fr; }
    ChatScreen #window > PoolView { margin-left: 2; }
    ChatScreen.-stacked #window { layout: vertical; }
    ChatScreen.-stacked #window > PoolView { height: 5; margin-left: 0; }
    ChatScreen.talk-only #window > PoolView { display: none; }
    ChatScreen.pool-only #window > ChatPanel { display: none; }
    ChatScreen.pool-only #window > PoolView { height: 1fr; margin-left: 0; }
    """

    def __init__(self, history: TypedHistory) -> None:
        super().__init__()
        self._history = history
        self.arrangement = LAYOUTS[0]

    def compose(self) -> ComposeResult:
        """Talk, pool, keys."""
        with Container(id="window"):
            yield ChatPanel(self._history)
            yield PoolView(waiting=LOADING)
        yield KeysLine()

    def on_mount(self) -> None:
        """The keyboard belongs to the line."""
        self.query_one(ChatInput).focus()

    def on_resize(self, event: Resize) -> None:
        """Beside or above each other."""
        self.set_class(event.size.width < SIDE_BY_SIDE, "-stacked")

    def on_screen_resume(self) -> None:
        """What happened while another screen was in front."""
        self.query_one(PoolView).redraw()

    def action_layout(self) -> None:
        """Both, only the talk, only the pool."""
        self.remove_class(*LAYOUTS)
        self.arrangement = LAYOUTS[(LAYOUTS.index(self.arrangement) + 1) % len(LAYOUTS)]
        self.add_class(self.arrangement)
        (self.query_one(PageMap) if self.arrangement == "pool-only" else self.query_one(ChatInput)).focus()
        self.call_after_refresh(self.query_one(PoolView).redraw)

    def action_talk(self) -> None:
        """Back to the line."""
        if self.arrangement == "pool-only":
            self.action_layout()
        self.query_one(ChatInput).focus()

    def action_escape(self) -> None:
        """Stop the answer if one is on its way, else give the keyboard to the pool."""
        stop_answer = getattr(self.app, "stop_answer", None)
        if stop_answer is not None and stop_answer():
            return
        page_map = self.query_one(PageMap)
        if page_map.is_on_screen:
            page_map.focus()
