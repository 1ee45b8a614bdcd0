"""The left half of the chat window: the talk, how it stands, and the line to type in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from rimuru_cli.chat.line_input import complete_words
from rimuru_cli.output import bar, format_bytes
from rimuru_cli.tui.chat_history import TypedHistory
from rimuru_cli.tui.widgets.strips import StripWidget, text_line
from rimuru_cli.tui.widgets.transcript import Transcript


class ChatInput(TextArea):
    """A message of several lines. Enter sends it; Alt-Enter, Ctrl-J or a backslash before Enter begins a new line.

    Attributes:
        commands: slash commands and the words that may follow them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send"),
        Binding("alt+enter,ctrl+j,shift+enter", "new_line", "New line", show=False),
        Binding("tab", "complete", "Complete", show=False),
        Binding("pageup", "scroll_talk(-1)", "Scroll", show=False),
        Binding("pagedown", "scroll_talk(1)", "Scroll", show=False),
    ]

    class Sent(Message):
        """A message is complete."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, history: TypedHistory, **kwargs: Any) -> None:
        super().__init__(soft_wrap=True, show_line_numbers=False, compact=True, placeholder="Ask something, or /help", **kwargs)
        self.typed = history
        self.commands: Mapping[str, list[str]] = {}

    def check_consume_key(self, key: str, character: str | None = None) -> bool:
        """Whatever can be typed is typed here, and so does not do what it does elsewhere."""
        return super().check_consume_key(key, character) or key in ("plus", "minus", "equals_sign")

    def action_send(self) -> None:
        """Send what is typed; nothing is not sent, and a backslash at the end goes on in the next line."""
        text = self.text
        if text.endswith("\\") and self.cursor_location == self.document.end:
            self.action_delete_left()
            self.action_new_line()
            return
        if not text.strip():
            return
        self.post_message(self.Sent(text))

    def taken(self, text: str) -> None:
        """The message went out: remember it and begin anew."""
        self.typed.add(text)
        self.clear()

    def action_new_line(self) -> None:
        """Begin a new line."""
        self.insert("\n")

    def action_complete(self) -> None:
        """Complete a slash command as far as it is certain; elsewhere Tab goes on to the next part."""
        row, column = self.cursor_location
        before = self.text[:column] if row == 0 else "\n"
        words = complete_words(before, tuple(self.commands), lambda name: self.commands.get(name, []))
        if not words:
            self.screen.focus_next()
            return
        typed = before.rpartition(" ")[2]
        common = words[0]
        while not all(word.startswith(common) for word in words):
            common = common[:-1]
        self.insert(common[len(typed) :] + (" " if len(words) == 1 else ""))
        if len(words) > 1 and common == typed:
            self.screen.query_one(ChatStatus).tell("  ".join(words))

    def action_scroll_talk(self, direction: int) -> None:
        """Scroll the talk without leaving the line."""
        talk = self.screen.query_one(Transcript)
        if direction < 0:
            talk.scroll_page_up(animate=False)
        else:
            talk.scroll_page_down(animate=False)

    async def on_key(self, event: Key) -> None:
        """Keys that mean something else here than in an editor. They are taken in turn with what was typed before them: as bindings of
        priority they would overtake it, and a fast Enter would find the line empty."""
        match event.key:
            case "enter":
                self.action_send()
            case "alt+enter" | "ctrl+j" | "shift+enter":
                self.action_new_line()
            case "tab":
                self.action_complete()
            case "pageup" | "pagedown":
                self.action_scroll_talk(-1 if event.key == "pageup" else 1)
            case "up" if self.cursor_location[0] == 0 and self._recall(self.typed.earlier(self.text)):
                pass
            case "down" if self.cursor_location[0] == self.document.line_count - 1 and self._recall(self.typed.later()):
                pass
            case _:
                return
        event.prevent_default()
        event.stop()

    def _recall(self, text: str | None) -> bool:
        """Show an earlier message; False if there is none."""
        if text is None:
            return False
        self.text = text
        self.move_cursor(self.document.end)
        return True


class ChatStatus(StripWidget):
    """One line: how far loading is, whether an answer is on its way, how full the context is."""

    DEFAULT_CSS = "ChatStatus { height: 1; }"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._text = "starting"
        self._told: tuple[str, float] | None = None

    def stand(self, text: str) -> None:
        """How the talk stands from now on."""
        self._text = text
        self.update_lines()

    def progress(self, stage: str, done: int, total: int) -> None:
        """How far a long piece of work is."""
        self.stand(f"{stage}  {bar(done / total, 16)}  {format_bytes(done)} of {format_bytes(total)}" if total > 0 else stage)

    def tell(self, text: str, seconds: float = 5.0) -> None:
        """Say something for some seconds."""
        self._told = (text, self.pool.clock() + seconds)
        self.set_timer(seconds + 0.1, self.update_lines)
        self.update_lines()

    def lines(self, width: int, height: int) -> list[Strip]:
        """One line."""
        if self._told is not None and self.pool.clock() < self._told[1]:
            return [text_line(width, (self._told[0], Style(bold=True)))]
        return [text_line(width, (self._text, Style(dim=True)))]


class ChatPanel(Vertical):
    """Talk, status and input."""

    DEFAULT_CSS = """
    ChatPanel { width: 1fr; height: 1fr; }
    ChatPanel > Transcript { height: 1fr; }
    ChatPanel > ChatInput { height: auto; min-height: 1; max-height: 8; border: none; border-left: thick $primary; padding: 0 0 0 1; }
    """

    def __init__(self, history: TypedHistory, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._history = history

    def compose(self) -> ComposeResult:
        """From the top down."""
        yield Transcript()
        yield ChatStatus()
        yield ChatInput(self._history)
