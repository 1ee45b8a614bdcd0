"""The pool in one bar, with everything around it that counts towards the ceiling, and the legend below."""

from __future__ import annotations

from typing import Final

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.tui import words
from rimuru_cli.tui.palette import BASE, LOOKS, Palette, colour_style
from rimuru_cli.tui.widgets.page_map import MERGED_GLYPH, SPLIT_GLYPH
from rimuru_cli.tui.widgets.strips import StripWidget

ORDER: Final = ("dense", "workspace", "expert", "buffer", "kv", "ssm", "conv", "tail", "free")
"""From left to right: what never moves, experts, conversation state, nothing."""


class CompositionBar(StripWidget):
    """One stacked bar in bytes and its legend."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """The bar, and the legend if there is a second line."""
        frame = self.pool.frame
        if frame is None:
            return []
        amounts = composition(frame)
        return [stacked_bar(amounts, width, self.palette), legend(amounts, width, self.palette)][:height]


def composition(frame: Frame) -> dict[str, int]:
    """Bytes of each kind under the ceiling, in the order of the bar; kinds without bytes are left out."""
    amounts = {"dense": frame.engine.dense_bytes, "workspace": frame.engine.workspace_bytes, **frame.pages.bytes_by_kind()}
    return {name: amounts[name] for name in ORDER if amounts.get(name, 0) > 0}


def ends(amounts: dict[str, int], width: int) -> list[int]:
    """Where each part of a bar of `width` cells ends. The ends are rounded, not the lengths, so that the sum is always the width; a part
    that exists gets a cell as long as there are enough."""
    total = sum(amounts.values())
    reached = 0
    marks: list[int] = []
    for index, num_bytes in enumerate(amounts.values()):
        reached += num_bytes
        before = marks[-1] if marks else 0
        latest = width - (len(amounts) - index - 1)
        marks.append(max(before, min(max(round(reached / total * width), before + 1), latest)) if total else 0)
    return marks


def stacked_bar(amounts: dict[str, int], width: int, palette: Palette) -> Strip:
    """The bar; where there is room, parts carry their share in figures."""
    total = sum(amounts.values())
    segments, before = [], 0
    for (name, num_bytes), end in zip(amounts.items(), ends(amounts, width), strict=True):
        cells, label = end - before, share_label(num_bytes, total)
        named = f"{LOOKS[name].label} {label}"
        label = named if cells >= len(named) + 2 else label
        before = end
        if cells <= 0:
            continue
        if palette.colours:
            text = label.center(cells) if cells >= len(label) + 2 else " " * cells
            segments.append(Segment(text, _written_on(name, palette)))
        else:
            segments.append(Segment(f" {label} ".center(cells, LOOKS[name].glyph) if cells >= 8 else LOOKS[name].glyph * cells, Style()))
    return Strip(segments, before).adjust_cell_length(width)


def share_label(num_bytes: int, total: int) -> str:
    """A share in whole per cent; what is there never looks like nothing."""
    percent = round(num_bytes / total * 100)
    return f"{percent}%" if percent else "<1%"


def _written_on(name: str, palette: Palette) -> Style:
    colour = palette.colour(name, BASE)
    if palette.depth == "16":
        return colour_style("bright_white" if name in ("free", "tail", "workspace") else "black", colour)
    dark_ink = name not in ("free", "tail") and not (name == "dense" and not palette.dark)
    return colour_style("#101114" if dark_ink or (not palette.dark and name in ("free", "tail")) else "#f4f4f4", colour)


def legend(amounts: dict[str, int], width: int, palette: Palette) -> Strip:
    """Sign, name and share of each kind; as many words as fit: names shrink to their first word, then the amounts go."""
    total = sum(amounts.values())
    for brevity in range(3):
        parts: list[Segment] = []
        for name, num_bytes in amounts.items():
            look = LOOKS[name]
            sign = Segment("■" if palette.colours else look.glyph, palette.style(name, BASE))
            label = look.label if brevity == 0 else look.label.split()[0]
            amount = "" if brevity == 2 else f" {words.size(num_bytes)}" if brevity == 0 else f" {share_label(num_bytes, total)}"
            parts += [sign, Segment(f" {label}{amount}  ")]
        if brevity == 0 and not palette.colours:
            parts.append(Segment(f"{SPLIT_GLYPH} split {MERGED_GLYPH} merged"))
        strip = Strip(parts)
        if strip.cell_length <= width or brevity == 2:
            return strip.adjust_cell_length(width)
    raise AssertionError("the last brevity always returns")
