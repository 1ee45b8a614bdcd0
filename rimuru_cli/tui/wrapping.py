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
    return wrapped(text, width)[0]


def wrapped(text: str, width: int) -> tuple[list[str], list[int]]:
    """As `wrap`, and where in the text each line begins.

    What is added to the text changes nothing before the last line but one: wrapped from there on, the lines are the same.
    """
    width = max(1, width)
    if cell_len(text) <= width:
        return [text], [0]
    lines: list[str] = []
    starts: list[int] = []
    line, used, start = "", 0, 0
    for match in _PIECES.finditer(text):
        piece, at = match[0], match.start()
        size = cell_len(piece)
        if used + size <= width:
            line, used = line + piece, used + size
            continue
        if piece.isspace():
            # The break swallows it, unless it is the indentation of what follows.
            lines.append(line)
            starts.append(start)
            line, used, start = "", 0, match.end()
            continue
        if line.strip():
            lines.append(line.rstrip())
            starts.append(start)
        for part in chop_cells(piece, width) if size > width else [piece]:
            if at > match.start():
                lines.append(line)
                starts.append(start)
            line, used, start = part, cell_len(part), at
            at += len(part)
    if line or not lines:
        lines.append(line)
        starts.append(start)
    return [part if cell_len(part) <= width else part[:width] for part in lines], starts
