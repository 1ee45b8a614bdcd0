"""The order in which the codes of a packed row come out of its bytes, several hundred at a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rimuru_cli.engine.experts.pages import decoded_columns
from rimuru_kernels.packed_weights import PackedFormat
from rimuru_kernels.packed_weights.format import BLOCK, HIGH_BITS, LOW_BITS


@dataclass(frozen=True)
class CodeOrder:
    """Where the columns of a row stand after decoding.

    Codes of 8 bits stand as they are. Of 4 and 5 bits the low halves of a row's bytes come first, then the high halves: [2, blocks, 32]. Of
    6 bits it is [2, 2, blocks, 16], because 16 columns of a block have their high bits in the same place of neighbouring bytes.

    Attributes:
        width: columns, with what fills up the last block or group.
        run: neighbours in this order that share a scale; 0: the whole row.
        columns: int64 [width], the column at each place; None: its own.
        groups: int64 [width / run], the group of each run; None: its own.
        turned: where groups of whole blocks stand as [pieces, blocks, neighbours]: pieces and neighbours; None: they do not.
    """

    width: int
    run: int
    columns: Tensor | None = None
    groups: Tensor | None = None
    turned: tuple[int, int] | None = None

    def by_run(self, values: Tensor) -> Tensor:
        """Values of groups, float32 [rows, groups], as values of runs, [rows, runs]."""
        if self.groups is None:
            return values
        if self.turned is None:
            return values.index_select(1, self.groups)
        pieces, neighbours = self.turned
        moved = values.view(torch.float64) if neighbours == 2 else values
        return moved.view(len(values), -1, pieces).transpose(1, 2).reshape(len(values), -1).view(torch.float32)


@cache
def code_order(fmt: PackedFormat, columns: int) -> CodeOrder | None:
    """The order for rows of so many columns; None where groups are neither whole parts of blocks of 64 nor whole blocks."""
    group, width = fmt.group, decoded_columns(fmt, columns)
    if LOW_BITS[fmt.values] == 8:
        return CodeOrder(width, group)
    if group not in (0, 16, 32) and group % BLOCK:
        return None
    pieces = 2 if HIGH_BITS.get(fmt.values) == 2 else 1  # of half a block
    length = BLOCK // 2 // pieces
    places = torch.arange(width).view(-1, 2, pieces, length).permute(1, 2, 0, 3).reshape(-1)
    if not group:
        return CodeOrder(width, 0, places)
    run = min(length, group)
    if pieces == 1 and group >= BLOCK and width % group == 0:
        run = group // 2  # halves of neighbouring blocks are neighbours
    known = fmt.groups(columns)
    groups = (places[::run] // group).clamp_max(known - 1)  # of what fills up the last block: any
    if torch.equal(groups, torch.arange(known)):
        return CodeOrder(width, run, places)
    turned = (2 * pieces, length // run) if run == group and known * group == width else None
    return CodeOrder(width, run, places, groups, turned)
