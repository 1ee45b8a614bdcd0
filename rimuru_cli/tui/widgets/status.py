"""Lines of words: who runs and how it stands, what is wrong, what the cursor is on, what became of a wish; and the wait for an engine."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from rimuru_cli.tui import words
from rimuru_cli.tui.advisor import advise, facts_of
from rimuru_cli.tui.palette import WARM, colour_style
from rimuru_cli.tui.state import PoolState
from rimuru_cli.tui.widgets.strips import StripWidget, text_line

WAITING = (
    "No engine is running.",
    "Start one in another terminal, for example:  rimuru chat",
    "It will show up here by itself.",
)


class TitleLine(StripWidget):
    """Model, device and process at the left, the state of the source at the right."""

    DEFAULT_CSS = "TitleLine { height: 1; }"

    def lines(self, width: int, height: int) -> list[Strip]:
        """One line."""
        bold, dim = Style(bold=True), Style(dim=True)
        state = state_words(self.pool, frozen=self.rimuru.frozen)
        room = max(0, width - len(state) - 1)
        frame = self.pool.frame
        parts: list[tuple[str, Style | None]] = [("rimuru", bold)]
        if frame is not None:
            engine = frame.engine
            parts += [(f"  {engine.model}", bold), (f"  {engine.precision} on {engine.device}", None)]
            parts += [(f"  {engine.role}, process {engine.pid}", dim), (f"  {engine.backend_reason}", dim)]
            if engine.notices:
                count = len(engine.notices)
                parts.insert(
                    2,
                    (
                        f"  {count} note{'s' if count > 1 else ''}: i",
                        colour_style(self.palette.colour("expert", WARM)) if self.palette.colours else bold,
                    ),
                )
        left = text_line(room, *parts)
        return [Strip.join([left, text_line(width - room, (" " + state, bold))])]


def state_words(pool: PoolState, *, frozen: bool) -> str:
    """How the source stands, in a word or two."""
    status = pool.status
    if status.position is not None and status.duration is not None:
        name = {"live": "playing", "paused": "paused", "ended": "at its end", "waiting": "waiting"}[status.state]
        return f"{name} {words.seconds_clock(status.position)}/{words.seconds_clock(status.duration)}"
    if frozen:
        return "frozen: p goes on"
    if status.state == "waiting":
        return "engine ended, waiting" if pool.frame is not None else "waiting"
    return "live, busy" if pool.frame is not None and pool.frame.busy else "live, idle" if pool.frame is not None else "live"


class AdvisorLine(StripWidget):
    """What is wrong and what to do, on one line or two; takes no room while nothing is."""

    def update_lines(self) -> None:
        """Show up or disappear, then draw."""
        parts = self._parts()
        if self.display != bool(parts):
            self.display = bool(parts)
        needed = 1 if sum(cell_len(text) for text, _ in parts) <= max(self.size.width, self.screen.size.width // 4) else 2
        if self.styles.height is None or self.styles.height.value != needed:
            self.styles.height = needed
        super().update_lines()

    def lines(self, width: int, height: int) -> list[Strip]:
        """The worst finding."""
        parts = self._parts()
        if height < 2 or len(parts) < 2:
            return [text_line(width, *parts)] if parts else []
        (what, warn), (do, bold), *more = parts
        return [text_line(width, (what, warn), *more), text_line(width, (f"  {do}", bold))]

    def _parts(self) -> list[tuple[str, Style | None]]:
        warn = colour_style(self.palette.colour("buffer", WARM), self.palette.ground) if self.palette.colours else Style(reverse=True)
        if self.pool.gone:
            after = [("A new one shows up here by itself.", Style(bold=True))] if self.rimuru.AWAITS_ENGINES else []
            return [("The engine has ended; this is its last moment. ", warn), *after]
        facts = facts_of(self.pool)
        found = advise(facts) if facts is not None else ()
        if not found:
            return []
        parts: list[tuple[str, Style | None]] = [(f"! {found[0].what} ", warn + Style(bold=True)), (found[0].do, Style(bold=True))]
        if len(found) > 1:
            parts.append((f"  (also: {', '.join(advice.topic for advice in found[1:])})", None))
        return parts


class DetailLine(StripWidget):
    """What the person just asked about: a wish and what became of it, else what lies under the cursor, else what can be done."""

    def __init__(self, hint: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hint = hint
        self._told: tuple[str, float] | None = None
        self._detail: str | None = None

    def tell(self, text: str, seconds: float = 8.0) -> None:
        """Say something for some seconds."""
        self._told = (text, self.pool.clock() + seconds)
        self.update_lines()

    def detail(self, text: str | None) -> None:
        """What lies under the cursor now."""
        self._detail = text
        self.update_lines()

    def update_lines(self) -> None:
        """A second line while something long is told; what lies under the cursor is cut instead, lest the map jumps with every key."""
        told = self._told is not None and self.pool.clock() < self._told[1] and cell_len(self._told[0]) > self.size.width > 0
        needed = 2 if told else 1
        if self.styles.height is None or self.styles.height.value != needed:
            self.styles.height = needed
        super().update_lines()

    def lines(self, width: int, height: int) -> list[Strip]:
        """One line, or two where a long one needs them."""
        if self._told is not None and self.pool.clock() >= self._told[1]:
            self._told = None
        told = self._told[0] if self._told is not None else None
        text = words.clean(told or self._detail or self._hint).replace("\n", " ")
        style = Style(bold=True) if told else None if self._detail else Style(dim=True)
        first = words.fit(text, width)
        if height < 2 or first == text:
            return [text_line(width, (text, style))]
        cut = text.rfind(" ", 0, width) + 1 or width
        return [text_line(width, (text[:cut], style)), text_line(width, (text[cut:], style))]


class WaitingPanel(StripWidget):
    """What to do as long as there is nothing to show."""

    def __init__(self, text: tuple[str, ...] = WAITING, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._text = text

    def lines(self, width: int, height: int) -> list[Strip]:
        """A few words in the middle."""
        top = max(0, (height - len(self._text)) // 2)
        styles = [Style(bold=True), *[Style()] * len(self._text)]
        middle = [text_line(width, (line.center(width), style)) for line, style in zip(self._text, styles, strict=False)]
        return [Strip.blank(width)] * top + middle
