"""The talk so far: wrapped once, drawn line by line, following its end while nobody scrolls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from rimuru_cli.tui.palette import WARM, Palette, colour_style
from rimuru_cli.tui.words import clean
from rimuru_cli.tui.wrapping import wrap, wrapped

if TYPE_CHECKING:
    from rimuru_cli.tui.app import RimuruApp

Voice = Literal["you", "model", "reasoning", "note", "warning", "error"]
_PREFIX: Final[dict[Voice, str]] = {"you": "> ", "reasoning": "| ", "warning": "! ", "error": "! "}


_LAY_OUT_SECONDS: Final = 0.1


@dataclass
class _Entry:
    """One thing said. `done` are the wrapped lines up to the place `upto` of the text; what is behind it may still be wrapped otherwise."""

    voice: Voice
    text: str = ""
    done: list[str] = field(default_factory=list)
    upto: int = 0
    rest: list[str] = field(default_factory=list)

    def grow(self, text: str, width: int) -> None:
        self.text += text
        *whole, last = self.text[self.upto :].split("\n")
        for line in whole:
            self.done += wrap(line, width)
            self.upto += len(line) + 1
        lines, starts = wrapped(last, width) if last or not self.done else ([], [])
        self.done += lines[:-2]
        self.upto += starts[-2] if len(starts) > 2 else 0
        self.rest = lines[-2:]

    def rewrap(self, width: int) -> None:
        text, self.text, self.done, self.upto = self.text, "", [], 0
        self.grow(text, width)

    @property
    def lines(self) -> list[str]:
        return self.done + self.rest


class Transcript(ScrollView, can_focus=True):
    """Shows what was said; the newest is at the bottom."""

    # The place of the scroll bar is kept free: one that came later would hide the ends of lines that are wrapped already.
    DEFAULT_CSS = "Transcript { overflow-x: hidden; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "Up", show=False),
        Binding("down,j", "scroll_down", "Down", show=False),
        Binding("ctrl+y", "copy", "Copy answer"),
    ]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._entries: list[_Entry] = []
        self._lines: list[tuple[Voice, str]] = []
        self._width = 1
        self._following = True
        self._changed: int | None = None

    @property
    def _palette(self) -> Palette:
        return cast("RimuruApp", self.app).palette

    def say(self, voice: Voice, text: str) -> None:
        """Add something; an answer or reasoning that goes on is appended to what is there of it."""
        text = clean(text)
        last = self._entries[-1] if self._entries else None
        if last is None or last.voice != voice or voice == "you":
            last = _Entry(voice)
            self._entries.append(last)
            text = text.lstrip("\n") if voice in ("model", "reasoning") else text
        elif voice not in ("model", "reasoning"):
            text = "\n" + text
        last.grow(text, self._text_width(voice))
        self._show_soon(len(self._entries) - 1)

    def _show_soon(self, first: int) -> None:
        """Lay out from an entry on, ten times a second at most however fast the answer comes."""
        if self._changed is None:
            self._changed = first
            self.set_timer(_LAY_OUT_SECONDS, self._show_changes)
        self._changed = min(self._changed, first)

    def _show_changes(self) -> None:
        if self._changed is not None:
            self._lay_out(self._changed)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._lines.clear()
        self._lay_out(0)

    def last_answer(self) -> str:
        """The text of the newest answer."""
        return next((entry.text for entry in reversed(self._entries) if entry.voice == "model"), "")

    def text(self) -> str:
        """All lines as they are wrapped."""
        return "\n".join(line for _, line in self._lines)

    def _text_width(self, voice: Voice) -> int:
        return max(1, self._width - len(_PREFIX.get(voice, "")))

    def _lay_out(self, first: int) -> None:
        """Lines anew from an entry on."""
        self._changed = None
        kept = sum(len(entry.lines) + 1 for entry in self._entries[:first])
        del self._lines[kept:]
        for entry in self._entries[first:]:
            prefix = _PREFIX.get(entry.voice, "")
            indent = " " * len(prefix) if entry.voice == "you" else prefix
            self._lines += [(entry.voice, (prefix if i == 0 else indent) + line) for i, line in enumerate(entry.lines)]
            self._lines.append((entry.voice, ""))
        self.virtual_size = Size(self._width, len(self._lines))
        self.refresh()
        self._follow()

    def _follow(self) -> None:
        """Stay at the end, unless the person scrolled away from it. There may be no scroll bar before the new size is known."""
        if self._following:
            self.call_after_refresh(self._to_end)

    def _to_end(self) -> None:
        if self._following:  # the person may have scrolled meanwhile
            self.scroll_end(animate=False, immediate=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Scrolling to the end is the wish to follow it, scrolling anywhere else is not."""
        super().watch_scroll_y(old_value, new_value)
        self._following = new_value >= self.max_scroll_y - 1

    def on_resize(self) -> None:
        """Wrap everything anew for another width."""
        width = max(1, self.scrollable_content_region.width)
        if width != self._width:
            self._width = width
            for entry in self._entries:
                entry.rewrap(self._text_width(entry.voice))
            self._lay_out(0)
        self._follow()

    def render_line(self, y: int) -> Strip:
        """One line of the part that is seen."""
        width, base = self.size.width, self._palette.text
        at = y + self.scroll_offset.y
        if at >= len(self._lines):
            return Strip.blank(width, base)
        voice, line = self._lines[at]
        return Strip([Segment(line, self._style(voice))]).adjust_cell_length(width).apply_style(base)

    def _style(self, voice: Voice) -> Style:
        palette = self._palette
        if voice == "you":
            return Style(bold=True)
        if voice in ("reasoning", "note"):
            return Style(dim=True)
        if voice in ("warning", "error"):
            return colour_style(palette.colour("buffer", WARM)) + Style(bold=True) if palette.colours else Style(bold=True)
        return Style()

    def action_copy(self) -> None:
        """Put the newest answer on the clipboard, where the terminal lets programs do that."""
        self.app.copy_to_clipboard(self.last_answer())
