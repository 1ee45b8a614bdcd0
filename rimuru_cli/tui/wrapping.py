"""Breaking text into lines of a width in columns, at spaces where there are any."""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len, chop_cells

_PIECES: Final = re.compile(r"\s+|\S+")


def wrap(text: str, width: int) -> list[str]:
    """The lines of a text without line breaks; every line is at most `width` columns wide, and nothing but spaces at breaks is lost.

    An empty text is one empty line.
    """
    width = max(1, width)
    if cell_len(text) <= width:
        return [text]
    lines: list[str] = []
    line, used = "", 0
    for piece in _PIECES.findall(text):
        size = cell_len(piece)
        if used + size <= width:
            line, used = line + piece, used + size
            continue
        if piece.isspace():
            # The break swallows it, unless it is the indentation of what follows.
            lines.append(line)
            line, used = "", 0
            continue
        if line.strip():
            lines.append(line.rstrip())
            line, used = "", 0
        chopped = chop_cells(piece, width) if size > width else [piece]
        lines.extend(chopped[:-1])
        line, used = chopped[-1], cell_len(chopped[-1])
    if line or not lines:
        lines.append(line)
    return [part if cell_len(part) <= width else part[:width] for part in lines]
