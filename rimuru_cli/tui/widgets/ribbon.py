"""The adjuster's decisions in order of time: a ribbon of marks, and what one of them was in words when it is selected."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.strip import Strip

from rimuru_cli.engine.telemetry.frame import AdjusterRecord
from rimuru_cli.tui import words
from rimuru_cli.tui.palette import WARM, Palette, colour_style
from rimuru_cli.tui.widgets.strips import StripWidget, heading, text_line


class EventRibbon(StripWidget, can_focus=True):
    """Newest at the right. Without a selection, the line below tells the newest decision.

    Attributes:
        selected: number of the event that is looked at, or None.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Earlier", show=False),
        Binding("right", "move(1)", "Later", show=False),
        Binding("up", "move(-1)", "Earlier", show=False),
        Binding("down", "move(1)", "Later", show=False),
        Binding("home", "end(0)", "First", show=False),
        Binding("end", "end(-1)", "Last", show=False),
        Binding("escape", "leave", "Let go", show=False),
    ]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.selected: int | None = None

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading, ribbon and details; with more room, the latest decisions line by line."""
        events = self.pool.events
        palette = self.palette
        if self.pool.frame is None or height < 2:
            return []
        shrunk, expanded = sum(event.shrunk for event in events), sum(event.expanded for event in events)
        title = "adjuster: no decision yet"
        if events:
            number = f"{len(events):,} decision{'s' if len(events) > 1 else ''}"
            title = f"adjuster: {number}, {shrunk:,} experts retired, {expanded:,} admitted"
        lines = [heading(title, width, palette, focused=self.has_focus)]
        shown = events[-width // 2 :] if width >= 2 else []
        chosen = self._chosen(events)
        if chosen is not None and shown and chosen.number < shown[0].number:
            start = events.index(chosen)
            shown = events[start : start + width // 2]
        segments = [segment for event in shown for segment in self._mark(event, event.number == self.selected)]
        lines.append(Strip(segments).adjust_cell_length(width))
        details = chosen or (events[-1] if events else None)
        if height >= 3:
            text = in_words(details) if details else "Pages go to the conversation when it needs them, and come back when it ends."
            lines.append(text_line(width, (text, None)))
        room = height - len(lines)
        if room > 0 and events:
            # A list with the newest on top; it begins so far down that the selected one is in it.
            below = len(events) - 1 - events.index(chosen) if chosen else 0
            end = len(events) - min(max(0, below - room // 2), max(0, len(events) - room))
            for event in reversed(events[max(0, end - room) : end]):
                style = Style(bold=True) if event is chosen else None
                lines.append(text_line(width, (f"{words.clock(event.time)}  ", None), *(self._coloured(event)), (in_words(event), style)))
        return lines[:height]

    def _mark(self, event: AdjusterRecord, selected: bool) -> list[Segment]:
        sign, style = sign_of(event, self.palette)
        return [Segment(sign, style + Style(reverse=True) if selected else style), Segment(" ")]

    def _coloured(self, event: AdjusterRecord) -> tuple[tuple[str, Style | None], ...]:
        sign, style = sign_of(event, self.palette)
        return ((f"{sign} ", style),)

    def _chosen(self, events: list[AdjusterRecord]) -> AdjusterRecord | None:
        return next((event for event in events if event.number == self.selected), None)

    def action_move(self, by: int) -> None:
        """Select another event; the first key selects the newest."""
        events = self.pool.events
        if not events:
            return
        numbers = [event.number for event in events]
        if self.selected not in numbers:
            self.selected = numbers[-1]
        else:
            self.selected = numbers[min(max(0, numbers.index(self.selected) + by), len(numbers) - 1)]
        self.update_lines()

    def action_end(self, index: int) -> None:
        """Select the first or the last event that is known."""
        if self.pool.events:
            self.selected = self.pool.events[index].number
            self.update_lines()

    def action_leave(self) -> None:
        """Back to the newest."""
        self.selected = None
        self.update_lines()

    def watch_has_focus(self, focused: bool) -> None:
        """The heading shows who has the keyboard."""
        super().watch_has_focus(focused)
        self.update_lines()


def sign_of(event: AdjusterRecord, palette: Palette) -> tuple[str, Style]:
    """The mark of a decision: down where experts made room, up where they came back."""
    if event.shrunk and event.expanded:
        sign, kind = "↕", "dense"
    elif event.shrunk:
        sign, kind = "▼", "kv"
    elif event.expanded:
        sign, kind = "▲", "expert"
    else:
        sign, kind = "•", "dense"
    return sign, colour_style(palette.colour(kind, WARM)) if palette.colours else Style(bold=True)


def in_words(event: AdjusterRecord) -> str:
    """A decision in words: what, why, and the numbers it was made from."""
    deeds = [f"retired {event.shrunk}"] if event.shrunk else []
    deeds += [f"admitted {event.expanded}"] if event.expanded else []
    count = event.shrunk + event.expanded
    deed = " and ".join(deeds) + f" expert{'s' if count != 1 else ''}" if deeds else "left everything as it was"
    why = f"because {words.clean(event.reason)}" if deeds else words.clean(event.reason)
    return f"step {event.step:,}: {deed}, {why} (R_b {event.required_blocks:,}, F_b {event.free_blocks:,})"
