"""One huge page from near: every page in it as a tile with its owner, and a cursor to inspect one."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.message import Message
from textual.strip import Strip

from rimuru_cli.engine.telemetry.frame import KINDS, Frame
from rimuru_cli.tui import words
from rimuru_cli.tui.page_grid import pages_of_huge
from rimuru_cli.tui.palette import LOOKS, WARM, colour_style
from rimuru_cli.tui.widgets.strips import StripWidget, heading

_WIDTHS: Final = (40, 26, 18, 12, 8, 6, 4, 2)


class PageTiles(StripWidget, can_focus=True):
    """The pages of one huge page, in the order of addresses.

    Attributes:
        huge: which huge page.
        place: byte offset in the pool of the page that is inspected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1, 0)", "Move", show=False),
        Binding("right", "move(1, 0)", "Move", show=False),
        Binding("up", "move(0, -1)", "Move", show=False),
        Binding("down", "move(0, 1)", "Move", show=False),
        Binding("home", "go(0)", "First", show=False),
        Binding("end", "go(-1)", "Last", show=False),
    ]

    class Inspected(Message):
        """Another page is looked at."""

    def __init__(self, huge: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.huge = huge
        self.place = -1
        self._per_line = 1
        self._tile = 2
        self._first = 0

    def pages(self, frame: Frame) -> list[int]:
        """Indices of the pages in this huge page, in the frame's page table."""
        return [int(page) for page in pages_of_huge(frame.pages, self.huge, frame.engine.huge_page_bytes)]

    def inspected(self, frame: Frame) -> int | None:
        """Index of the page under the cursor; the page that holds its first byte now, if it was split or merged meanwhile."""
        pages = self.pages(frame)
        if not pages:
            return None
        wanted = frame.pages.at(self.place)
        return min(max(wanted, pages[0]), pages[-1])

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading, and tiles two lines high; tiles shrink until all fit, then the map scrolls with the cursor."""
        frame = self.pool.frame
        if frame is None or height < 3:
            return []
        pages = self.pages(frame)
        inspected = self.inspected(frame)
        fits = (size for size in _WIDTHS if size <= width and -(-len(pages) // (width // size)) * 2 < height)
        self._tile = next(fits, min(2, width))
        self._per_line = max(1, width // self._tile)
        bands = (height - 1) // 2
        band = pages.index(inspected) // self._per_line if inspected in pages else 0
        self._first = min(max(self._first, band - bands + 1), band)
        size = words.size(frame.engine.huge_page_bytes)
        split = f"split into {len(pages):,} pages" if len(pages) > 1 else "not split"
        lines = [heading(f"huge page {self.huge:,} of {size}: {split}", width, self.palette, focused=self.has_focus)]
        for start in range(self._first * self._per_line, len(pages), self._per_line):
            row = pages[start : start + self._per_line]
            lines.append(self._tile_line(frame, row, inspected, width, named=True))
            lines.append(self._tile_line(frame, row, inspected, width, named=False))
        return lines[:height]

    def _tile_line(self, frame: Frame, row: list[int], inspected: int | None, width: int, *, named: bool) -> Strip:
        shades, palette = self.pool.shades(), self.palette
        segments = []
        room = self._tile - (1 if self._tile >= 4 else 0)
        for page in row:
            name = KINDS[int(frame.pages.kind[page])]
            here = page == inspected and named  # the lower line of the tile goes on showing its kind
            text = words.short_owner(frame, page, room - 2) if named and room > 4 else ""
            if palette.colours:
                ground = palette.ink if here else palette.colour(name, max(int(shades[page]), WARM) if name != "free" else WARM)
                ink = (
                    palette.ground if here and palette.depth != "16" else "black" if name not in ("free", "tail") or here else palette.soft
                )
                style = colour_style(ink, ground)
                segments.append(Segment((f" {text}" if text else "").ljust(room), style))
            else:
                glyph = LOOKS[name].glyph
                shown = f"{glyph}{text}" if text else glyph * room
                segments.append(Segment(shown.ljust(room, glyph)[:room], Style(reverse=here, bold=here)))
            if room < self._tile:
                segments.append(Segment(" ", colour_style(palette.ground, palette.ground) if palette.colours else None))
        return Strip(segments).adjust_cell_length(width)

    def action_move(self, columns: int, rows: int) -> None:
        """Inspect a neighbour."""
        frame = self.pool.frame
        page = None if frame is None else self.inspected(frame)
        if frame is not None and page is not None:
            pages = self.pages(frame)
            at = pages.index(page) + columns + rows * self._per_line
            if 0 <= at < len(pages):
                self._inspect(frame, pages[at])

    def action_go(self, index: int) -> None:
        """Inspect the first or the last page."""
        frame = self.pool.frame
        if frame is not None and (pages := self.pages(frame)):
            self._inspect(frame, pages[index])

    def go_to(self, huge: int) -> None:
        """Look at another huge page, at its beginning."""
        frame = self.pool.frame
        if frame is None:
            return
        last = max(0, -(-frame.engine.pool_bytes // frame.engine.huge_page_bytes) - 1)
        self.huge = min(max(0, huge), last)
        self.place, self._first = self.huge * frame.engine.huge_page_bytes, 0
        self.post_message(self.Inspected())
        self.update_lines()

    def on_click(self, event: Click) -> None:
        """Inspect the page under the mouse."""
        frame, offset = self.pool.frame, event.get_content_offset(self)
        if frame is None or offset is None or offset.y < 1:
            return
        pages = self.pages(frame)
        at = (self._first + (offset.y - 1) // 2) * self._per_line + offset.x // self._tile
        if offset.x // self._tile < self._per_line and at < len(pages):
            self._inspect(frame, pages[at])

    def _inspect(self, frame: Frame, page: int) -> None:
        self.place = int(frame.pages.offset[page])
        self.post_message(self.Inspected())
        self.update_lines()


def page_facts(frame: Frame, page: int) -> list[tuple[str, str]]:
    """What the inspector says about a page: (name, value) in order."""
    pages, engine = frame.pages, frame.engine
    kind, now = int(pages.kind[page]), frame.counters
    # Experts' tables may be a step behind the others on a device.
    seen = now.tables_step if kind == KINDS.index("expert") else now.step
    facts = [
        ("kind", words.KIND_WORDS[kind]),
        ("owner", words.owner(frame, page)),
        ("level", words.level(int(pages.level[page]))),
        ("size", f"{words.size(int(pages.size[page]))} ({int(pages.size[page]):,} bytes)"),
        ("offset", f"{int(pages.offset[page]):,} (entry {int(pages.offset[page]) // 256:,})"),
    ]
    if pages.rank[page] >= 0:
        facts.append(("rank", f"{int(pages.rank[page]) + 1} of {engine.num_experts} in its layer"))
        facts.append(("score", f"{float(pages.score[page]):.4g}"))
    if KINDS[kind] not in ("free", "tail", "buffer"):
        facts.append(("last use", words.steps_ago(int(pages.used_step[page]), seen)))
        facts.append(("loaded", words.steps_ago(int(pages.loaded_step[page]), seen)))
    return facts


def page_words(frame: Frame, page: int) -> str:
    """The most important of these facts in one line."""
    facts = dict(page_facts(frame, page))
    text = f"{facts['kind']} · {facts['owner']}" if facts["kind"] != "free" else f"free · {facts['level']}"
    if "rank" in facts:
        text += f" · rank {facts['rank']}"
    if "last use" in facts:
        text += f" · used {facts['last use']} · loaded {facts['loaded']}"
    return text
