"""A widget that is a list of finished lines: it compares them with the last ones and refreshes only rows that differ.

Such widgets have neither border nor padding; a heading is a line like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from rimuru_cli.tui.palette import Palette, colour_style
from rimuru_cli.tui.state import PoolState
from rimuru_cli.tui.words import clean, fit

if TYPE_CHECKING:
    from rimuru_cli.tui.app import RimuruApp


class StripWidget(Widget):
    """Draws what `put` was given. Subclasses lay their lines out in `lines`, which is called when there is something new to show."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._lines: list[Strip] = []
        self._finished: dict[int, Strip] = {}

    @property
    def rimuru(self) -> RimuruApp:
        """The app, with its state and palette."""
        return cast("RimuruApp", self.app)

    @property
    def pool(self) -> PoolState:
        """The state that is shown."""
        return self.rimuru.pool

    @property
    def palette(self) -> Palette:
        """How things look on this terminal."""
        return self.rimuru.palette

    def lines(self, width: int, height: int) -> list[Strip]:
        """The content for this size; fewer lines than `height` leave the rest empty."""
        return []

    def update_lines(self) -> None:
        """Lay the lines out again and refresh those that changed."""
        width, height = self.size
        if width > 0 and height > 0 and self.is_attached:
            self.put(self.lines(width, height))

    def put(self, lines: Sequence[Strip]) -> None:
        """Take new lines; rows that look as before are left alone."""
        before, self._lines = self._lines, list(lines)
        longest = max(len(before), len(self._lines))
        changed = [y for y in range(longest) if not _same(before, self._lines, y)]
        self._finished = {y: strip for y, strip in self._finished.items() if y not in changed}
        width = self.size.width
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """One line: as it was laid out, in the style of text where it has none of its own, as wide as the widget."""
        finished = self._finished.get(y)
        width = self.size.width
        if finished is None or finished.cell_length != width:
            line = self._lines[y] if y < len(self._lines) else Strip([])
            finished = self._finished[y] = line.adjust_cell_length(width).apply_style(self.palette.text)
        return finished

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines of a region. Textual's own way adds borders, padding and filters, line by line and frame by frame; these widgets have
        none of them, and their strips stay the same objects until they change, with what was worked out about them."""
        lines = [self.render_line(y) for y in crop.line_range]
        if not self.palette.colours:
            background = self.background_colors[1]
            for each in self.app.get_line_filters():
                lines = [line.apply_filter(each, background) for line in lines]
        if crop.column_span != (0, self.size.width):
            lines = [line.crop(*crop.column_span) for line in lines]
        return lines

    def restyle(self) -> None:
        """Forget what was drawn, after another theme."""
        self._lines = []
        self._finished.clear()
        self.refresh()

    def on_resize(self) -> None:
        """Another size, another layout."""
        self.update_lines()

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """All the width there is."""
        return container.width


def heading(title: str, width: int, palette: Palette, *, focused: bool = False) -> Strip:
    """The line above a panel: its name in a rule; the panel that has the keyboard is marked."""
    rule = colour_style(palette.soft, palette.ground) if palette.colours else Style(dim=True)
    name = colour_style(palette.ink, palette.ground) + Style(bold=True) if palette.colours else Style(bold=True)
    mark = "▶ " if focused else "─ "
    shown = fit(clean(title), max(0, width - 4))
    return Strip([Segment(mark, name if focused else rule), Segment(shown, name), Segment(" " + "─" * width, rule)]).crop(0, width)


def _same(before: list[Strip], after: list[Strip], y: int) -> bool:
    if y >= len(before) or y >= len(after):
        return False
    return before[y] is after[y] or before[y] == after[y]


def text_line(width: int, *parts: tuple[str, Style | None]) -> Strip:
    """Pieces of text as one line, cut at the width. Control characters do not get through."""
    segments, left = [], width
    for text, style in parts:
        shown = fit(clean(text).replace("\n", " "), left)
        if shown:
            segment = Segment(shown, style)
            segments.append(segment)
            left -= segment.cell_length
    return Strip(segments, width - left).adjust_cell_length(width)
