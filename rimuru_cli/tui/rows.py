"""From cell codes to strips, one row of the screen at a time, with every row that was drawn before kept for the next time."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from rimuru_cli.tui.palette import colour_style

_KEPT: Final = 2048


class HalfBlocks:
    """Draws rows of half-block cells: two codes a character, the upper one as ink and the lower one as ground.

    Args:
        colours: a colour for each code.
    """

    def __init__(self, colours: list[str]) -> None:
        self._colours = colours
        self._kept: dict[bytes, Strip] = {}

    def row(self, upper: NDArray[np.uint8], lower: NDArray[np.uint8]) -> Strip:
        """A strip of as many cells as there are codes."""
        key = upper.tobytes() + lower.tobytes()
        strip = self._kept.get(key)
        if strip is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            strip = self._kept[key] = self._draw(upper, lower)
        return strip

    def _draw(self, upper: NDArray[np.uint8], lower: NDArray[np.uint8]) -> Strip:
        pairs = upper.astype(np.uint16) * 256 + lower
        starts = np.concatenate(([0], np.flatnonzero(pairs[1:] != pairs[:-1]) + 1))
        lengths = np.diff(np.append(starts, len(pairs)))
        colours, segments = self._colours, []
        for pair, length in zip(pairs[starts].tolist(), lengths.tolist(), strict=True):
            above, below = colours[pair >> 8], colours[pair & 255]
            segments.append(Segment((" " if above == below else "▀") * length, colour_style(above, below)))
        return Strip(segments, len(pairs))


class Glyphs:
    """Draws rows of one code a character, told apart by sign and weight alone.

    Args:
        glyphs: sign and style of each code.
    """

    def __init__(self, glyphs: list[tuple[str, Style]]) -> None:
        self._glyphs = glyphs

    def row(self, codes: NDArray[np.uint8]) -> Strip:
        """A strip of as many cells as there are codes."""
        starts = np.concatenate(([0], np.flatnonzero(codes[1:] != codes[:-1]) + 1))
        lengths = np.diff(np.append(starts, len(codes)))
        segments = []
        for code, length in zip(codes[starts].tolist(), lengths.tolist(), strict=True):
            glyph, style = self._glyphs[code]
            segments.append(Segment(glyph * length, style))
        return Strip(segments, len(codes))
