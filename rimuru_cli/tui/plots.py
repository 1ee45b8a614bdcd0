"""Charts from block characters, as strips: stacked areas, and one series against a scale. Pure functions of numbers and a palette."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from rimuru_cli.tui.palette import LOOKS, WARM, Palette, colour_style

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
Floats = NDArray[np.float64]


def stacked_area(shares: Floats, kinds: Sequence[str], height: int, palette: Palette) -> list[Strip]:
    """Stacked areas, eight steps a line.

    Args:
        shares: [kinds, columns], 0 to 1, adding up to at most 1 a column; NaN columns stay empty. Kinds are stacked from the bottom up.
        kinds: their names.
        height: lines.
        palette: how kinds look.

    Returns:
        `height` strips of `columns` cells, from the top down.
    """
    num_kinds, width = shares.shape
    unknown = np.isnan(shares).any(axis=0)
    tops = np.cumsum(np.nan_to_num(shares), axis=0)
    middles = (np.arange(height * 8) + 0.5) / (height * 8)
    # Which kind each eighth of a line belongs to; num_kinds where nothing is.
    owner = (tops[None, :, :] <= middles[:, None, None]).sum(axis=1)
    owner[:, unknown] = num_kinds
    strips = []
    for line in range(height - 1, -1, -1):
        block = owner[line * 8 : line * 8 + 8]
        if not palette.colours:
            glyphs = [*(LOOKS[kind].glyph for kind in kinds), " "]
            strips.append(Strip([Segment("".join(glyphs[index] for index in block[4]))], width))
            continue
        bottom, top = block[0], block[7]
        filled = (block == bottom[None, :]).cumprod(axis=0).sum(axis=0)
        names: list[str | None] = [*kinds, None]
        cells = zip(bottom.tolist(), top.tolist(), filled.tolist(), strict=True)
        strips.append(_run_lengths([_two_kinds(names[low], names[high], count, palette) for low, high, count in cells], width))
    return strips


def _two_kinds(low: str | None, high: str | None, eighths: int, palette: Palette) -> tuple[str, Style]:
    """A cell of which the lowest eighths are one kind and the rest another (None: the ground)."""
    below = palette.ground if low is None else palette.colour(low, WARM)
    above = palette.ground if high is None else palette.colour(high, WARM)
    if eighths >= 8 or below == above:
        return " ", colour_style(below, below)
    return EIGHTHS[eighths], colour_style(below, above)


@dataclass(frozen=True)
class Scale:
    """A vertical axis: `place` takes a value to 0 (bottom) ... 1 (top); `marks` are values with a line and a label of their own."""

    place: Callable[[float], float]
    marks: tuple[tuple[float, str], ...]


def linear_scale(top: float, unit: str = "", marks: int = 2) -> Scale:
    """From 0 to a round number that is at least `top`."""
    limit = round_up(top)
    step = limit / marks
    labels = tuple((step * i, f"{step * i:g}{unit}") for i in range(1, marks + 1))
    return Scale(lambda value: value / limit, labels)


def round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 4, 5, 10 times a power of ten; 1 for nothing, and for what is as good as nothing."""
    if not math.isfinite(value) or value < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 10) if step * power >= value * (1 - 1e-9))


def headroom_scale() -> Scale:
    """An axis for a hit rate: 90, 99 and 99.9 % are equally far apart, above a linear part from 0 to 90 %.

    Misses that get ten times rarer always look the same: what separates 99.0 from 99.8 % is as visible as what separates 30 from 80 %.
    99.9 % and more is the top.
    """

    def place(share: float) -> float:
        if share <= 0.9:
            return max(0.0, 0.4 * share / 0.9)
        nines = -math.log10(max(1e-9, 1.0 - share))
        return min(1.0, 0.4 + 0.3 * (nines - 1.0))

    return Scale(place, ((0.5, "50"), (0.9, "90"), (0.99, "99"), (0.999, "99.9")))


def series(values: Floats, scale: Scale, height: int, palette: Palette, *, kind: str, label_width: int = 5) -> list[Strip]:
    """One series as columns of eighths over marks, with the marks' labels at the left.

    Args:
        values: one number a column, NaN for none.
        scale: the axis.
        height: lines.
        palette, kind: the colour.
        label_width: cells for the labels; 0 leaves them out.

    Returns:
        `height` strips of `label_width + len(values)` cells, from the top down.
    """
    known = ~np.isnan(values)
    heights = np.zeros(len(values), dtype=np.int64)
    # At least one eighth where there is a value: nothing seen and next to nothing are different things.
    heights[known] = [max(1, round(min(1.0, scale.place(float(v))) * height * 8)) for v in values[known]]
    lines = {min(height - 1, max(0, math.ceil(scale.place(value) * height) - 1)): label for value, label in scale.marks}
    bar = palette.style(kind, WARM)
    # A full cell is drawn as ground: many fonts leave lines between full blocks.
    full = (" ", colour_style(palette.colour(kind, WARM), palette.colour(kind, WARM))) if palette.colours else (EIGHTHS[8], bar)
    quiet = colour_style(palette.soft, palette.ground) if palette.colours else Style()
    strips = []
    for line in range(height - 1, -1, -1):
        label = lines.get(line)
        cells: list[tuple[str, Style]] = [(char, quiet) for char in f"{label or '':>{label_width}}"[:label_width]]
        empty = ("┈" if label else " ", quiet)
        filled = np.clip(heights - line * 8, 0, 8).tolist()
        cells += [full if eighths == 8 else (EIGHTHS[eighths], bar) if eighths else empty for eighths in filled]
        strips.append(_run_lengths(cells, label_width + len(values)))
    return strips


def gauge(share: float, width: int, palette: Palette, *, kind: str) -> Strip:
    """A horizontal bar in eighths of a cell."""
    steps = " ▏▎▍▌▋▊▉█"
    eighths = round(min(1.0, max(0.0, share if math.isfinite(share) else 0.0)) * width * 8)
    whole, rest = divmod(eighths, 8)
    text = "█" * whole + (steps[rest] if rest else "")
    return Strip([Segment(text.ljust(width, " " if palette.colours else "·"), palette.style(kind, WARM))], width)


def _run_lengths(cells: list[tuple[str, Style]], width: int) -> Strip:
    """Neighbours of one style become one segment."""
    return Strip([Segment("".join(text for text, _ in group), style) for style, group in groupby(cells, key=lambda cell: cell[1])], width)
