"""The layer x expert table as a map: which experts are resident, how much each is wanted, how often it was hit."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip

from rimuru_cli.engine.telemetry.frame import Frame
from rimuru_cli.tui import words
from rimuru_cli.tui.palette import FRESH, HEAT_GLYPHS, Palette, colour_style, mix
from rimuru_cli.tui.rows import Glyphs, HalfBlocks
from rimuru_cli.tui.widgets.strips import StripWidget, heading

Measure = Literal["score", "hits", "resident"]
MEASURES: Final[tuple[Measure, ...]] = ("score", "hits", "resident")
HEATS: Final = 9
ABSENT, RESIDENT, LOADING, NOTHING, MARK = 0, HEATS, 2 * HEATS, 2 * HEATS + 1, 2 * HEATS + 2
"""Codes of cells: nine heats of an absent expert, nine of a resident one, one on its way, no cell, the cursor."""
_PLAIN_HEAT: Final = 5
_GUTTER: Final = 4
_NOTES: Final = 38
"""Cells for what is said about layers at the right of the table, where there is room."""


class HeatMap(StripWidget, can_focus=True):
    """Layers from the top down, experts from the left; resident experts are coloured, absent ones grey, and warmer is wanted more.

    Attributes:
        measure: what warmth means.
        cursor: (row of the table, expert) that is looked at, or None.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(0, -1)", "Move", show=False),
        Binding("right", "move(0, 1)", "Move", show=False),
        Binding("up", "move(-1, 0)", "Move", show=False),
        Binding("down", "move(1, 0)", "Move", show=False),
        Binding("m", "measure", "Measure"),
        Binding("escape", "leave", "Let go", show=False),
    ]

    class Looked(Message):
        """The cursor is on another expert; None when it was taken away."""

        def __init__(self, cell: tuple[int, int] | None) -> None:
            super().__init__()
            self.cell = cell

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.measure: Measure = "score"
        self.cursor: tuple[int, int] | None = None
        self._halves = HalfBlocks([])
        self._drawn_with: Palette | None = None

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading and table; two layers a line where they do not fit otherwise, several experts or layers a cell if need be."""
        frame = self.pool.frame
        if frame is None or height < 2 or not frame.experts.resident.size:
            return []
        if self.palette != self._drawn_with:
            self._halves, self._drawn_with = HalfBlocks(colours_of_heats(self.palette)), self.palette
        codes = heat_codes(frame, self.measure)
        body = height - 1
        halves = self.palette.colours and codes.shape[0] > body
        rows = body * 2 if halves else body
        names = frame.engine.moe_layers
        room = width - _GUTTER
        cells, layers_per_row, experts_per_cell = fitted(codes, rows, room - _NOTES if room - _NOTES >= codes.shape[1] else room)
        if self.cursor is not None:
            layer, expert = min(self.cursor[0], codes.shape[0] - 1), min(self.cursor[1], codes.shape[1] - 1)
            self.cursor = (layer, expert)
            wide = max(1, cells.shape[1] // codes.shape[1])
            column = expert // experts_per_cell * wide
            cells[layer // layers_per_row, column : column + wide] = MARK
        title = self._title(frame, layers_per_row, experts_per_cell)
        lines = [heading(title, width, self.palette, focused=self.has_focus)]
        step = 2 if halves else 1
        for row in range(0, len(cells), step):
            label = names[min(row * layers_per_row, len(names) - 1)]
            if halves:
                lower = cells[row + 1] if row + 1 < len(cells) else np.full(cells.shape[1], NOTHING, np.uint8)
                body_strip = self._halves.row(cells[row], lower)
            elif self.palette.colours:
                body_strip = self._halves.row(cells[row], cells[row])
            else:
                body_strip = _GLYPHS.row(cells[row])
            soft = colour_style(self.palette.soft, self.palette.ground) if self.palette.colours else Style()
            parts = [Strip([Segment(f"{label:>{_GUTTER - 1}} ", soft)], _GUTTER), body_strip]
            if width - _GUTTER - body_strip.cell_length >= _NOTES:
                first = row * layers_per_row
                parts.append(Strip([Segment(layers_in_words(frame, first, first + step * layers_per_row), soft)]))
            lines.append(Strip.join(parts))
        return lines[:height]

    def _title(self, frame: Frame, layers: int, experts: int) -> str:
        measure: str = self.measure
        if measure == "hits" and frame.experts.hits is None:
            measure = "hits are not counted one by one on a device"
        return f"layer x expert: {measure}{f' ({layers}x{experts} a cell)' if layers * experts > 1 else ''}"

    def room_wanted(self, most: int) -> int:
        """The width that the table can use out of at most `most` cells: whole cells for all experts, no more."""
        frame = self.pool.frame
        experts = 0 if frame is None else frame.engine.num_experts
        if experts == 0 or most <= _GUTTER:
            return most
        columns = most - _GUTTER
        per_cell = -(-experts // columns)
        return _GUTTER + (-(-experts // per_cell) if per_cell > 1 else experts * min(4, columns // experts))

    def action_measure(self) -> None:
        """Another measure."""
        self.measure = MEASURES[(MEASURES.index(self.measure) + 1) % len(MEASURES)]
        self.update_lines()

    def action_move(self, layers: int, experts: int) -> None:
        """Move the cursor; the first key only puts it somewhere."""
        frame = self.pool.frame
        if frame is None or not frame.experts.resident.size:
            return
        if self.cursor is None:
            self.cursor = (0, 0)
        else:
            height, width = frame.experts.resident.shape
            self.cursor = (min(max(0, self.cursor[0] + layers), height - 1), min(max(0, self.cursor[1] + experts), width - 1))
        self.post_message(self.Looked(self.cursor))
        self.update_lines()

    def action_leave(self) -> None:
        """Take the cursor away."""
        self.cursor = None
        self.post_message(self.Looked(None))
        self.update_lines()

    def watch_has_focus(self, focused: bool) -> None:
        """The heading shows who has the keyboard."""
        super().watch_has_focus(focused)
        self.update_lines()


def heat_codes(frame: Frame, measure: Measure) -> NDArray[np.uint8]:
    """A code for each expert, uint8 [layers, experts]. Warmth is relative to the layer's warmest expert, on a square root scale, for scores
    fall off steeply."""
    table = frame.experts
    if measure == "resident" or (measure == "hits" and table.hits is None):
        heat = np.where(table.resident, _PLAIN_HEAT, 0)
    else:
        values = np.nan_to_num(table.score if measure == "score" or table.hits is None else table.hits).astype(np.float64)
        top = np.maximum(values.max(axis=1, keepdims=True, initial=0.0), 1e-30)
        heat = np.minimum(np.sqrt(np.maximum(values, 0.0) / top) * HEATS, HEATS - 1).astype(np.int64)
    codes = heat + np.where(table.resident, RESIDENT, ABSENT)
    codes[table.loading] = LOADING
    return codes.astype(np.uint8)


def fitted(codes: NDArray[np.uint8], rows: int, columns: int) -> tuple[NDArray[np.uint8], int, int]:
    """The table in at most `rows` x `columns` cells, and how many layers and experts share one. Small tables are drawn wider. A shared cell
    is resident if half of its experts are, and as warm as those are on average."""
    layers, experts = codes.shape
    rows, columns = max(1, rows), max(1, columns)
    per_row, per_column = -(-layers // rows), -(-experts // columns)
    if per_row == per_column == 1:
        return np.repeat(codes, min(4, columns // experts), axis=1), 1, 1
    shape = (-(-layers // per_row), per_row, -(-experts // per_column), per_column)
    padded = np.full((shape[0] * per_row, shape[2] * per_column), NOTHING, dtype=np.uint8)
    padded[:layers, :experts] = codes
    blocks = padded.reshape(shape).transpose(0, 2, 1, 3).reshape(shape[0], shape[2], -1)
    there, resident = blocks != NOTHING, (blocks >= RESIDENT) & (blocks <= LOADING)
    mostly = resident.sum(axis=2) * 2 >= there.sum(axis=2)
    counted = resident == mostly[:, :, None]
    heat = np.where(resident, np.minimum(blocks, LOADING - 1) - RESIDENT, blocks) * (counted & there)
    mean = heat.sum(axis=2) // np.maximum((counted & there).sum(axis=2), 1)
    shared = mean + np.where(mostly, RESIDENT, ABSENT)
    shared[(blocks == LOADING).any(axis=2)] = LOADING
    return shared.astype(np.uint8), per_row, per_column


def colours_of_heats(palette: Palette) -> list[str]:
    """A colour for each code of the heat map."""
    if not palette.colours:
        return []
    warm = list(palette.heat)
    if palette.depth == "16":
        cold = ["black"] * 3 + ["bright_black"] * 6
    else:
        cold = [mix(palette.ground, palette.ink, 0.04 + 0.035 * step) for step in range(HEATS)]
    return [*cold, *warm, palette.colour("buffer", FRESH), palette.ground, palette.ink]


_GLYPHS: Final = Glyphs(
    [(" ", Style())]
    + [("·", Style())] * (HEATS - 1)
    + [(HEAT_GLYPHS[max(2, step)], Style(bold=step >= 6)) for step in range(HEATS)]
    + [("╬", Style(bold=True)), (" ", Style()), ("X", Style(reverse=True))]
)


def layers_in_words(frame: Frame, first: int, end: int) -> str:
    """How many experts of some layers are resident, and the share of hits where it is counted by layer."""
    table = frame.experts
    resident = table.resident[first:end]
    text = f"  {int(resident.sum()):>5,} of {resident.size:,} resident"
    if table.layer_uses is not None and table.layer_hits is not None and (uses := int(table.layer_uses[first:end].sum())):
        text += f"  {words.percent(int(table.layer_hits[first:end].sum()) / uses):>7} hits"
    return text


def expert_words(frame: Frame, cell: tuple[int, int]) -> str:
    """What is known about one expert, in a line."""
    row, expert = cell
    table, now = frame.experts, frame.counters
    where = "on its way" if table.loading[row, expert] else "resident" if table.resident[row, expert] else "absent"
    scores = np.nan_to_num(table.score[row])
    rank = int((scores > scores[expert]).sum()) + 1
    text = f"layer {frame.engine.moe_layers[row]} · expert {expert} · {where} · rank {rank} of {len(scores)} · score {scores[expert]:.3g}"
    if table.hits is not None:
        text += f" · {int(table.hits[row, expert]):,} hits"
    text += f" · used {words.steps_ago(int(table.used_step[row, expert]), now.tables_step)}"
    if table.resident[row, expert]:
        text += f" · loaded {words.steps_ago(int(table.loaded_step[row, expert]), now.tables_step)}"
    if table.layer_uses is not None and table.layer_hits is not None and table.layer_uses[row]:
        text += f" · layer's hits {words.percent(table.layer_hits[row] / table.layer_uses[row])}"
    return text
