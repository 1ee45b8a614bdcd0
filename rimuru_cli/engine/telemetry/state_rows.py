"""Where the states of recurrent layers lie, as rows of `Tables.states`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rimuru_cli.engine.telemetry.tables import Ints

if TYPE_CHECKING:
    from rimuru_cli.engine.state_blocks import StateBlock, StateBlocks

SSM_ROW, CONV_ROW = 0, 1
_NO_ROWS: Ints = np.zeros((0, 5), dtype=np.int32)


class StateRows:
    """Rows of all blocks of states; those of a block are made once, and again when it has moved."""

    def __init__(self) -> None:
        self._known: dict[StateBlock, tuple[tuple[int, ...], Ints]] = {}

    def rows(self, states: StateBlocks | None, owners: Mapping[StateBlock, int]) -> Ints:
        """int32 [n, 5]: 0 SSM or 1 conv, entry, model layer (-1: owned and unused), sequence (-1: kept to resume from), row of the state.

        Args:
            states: of an engine; None: its model has none.
            owners: sequences by the blocks that they hold.
        """
        if states is None:
            return _NO_ROWS
        for gone in self._known.keys() - states.live.keys():
            del self._known[gone]
        found = []
        for block in states.live:
            # Pages of a run follow each other, so their first ones tell whether the block has moved.
            place = tuple(run[0] for run in (*block.ssm, *block.conv))
            known = self._known.get(block)
            if known is None or known[0] != place:
                known = self._known[block] = (place, _rows_of(block, states))
            known[1][:, 3] = owners.get(block, -1)
            found.append(known[1])
        return np.concatenate(found) if found else _NO_ROWS


def _rows_of(block: StateBlock, states: StateBlocks) -> Ints:
    layout, layers = states.layout, list(states.places)
    rows = [
        (SSM_ROW, page, layers[place] if place < len(layers) else -1, -1, -1)
        for place, page in enumerate(page for run in block.ssm for page in run)
    ]
    for number, run in enumerate(block.conv):
        for index, page in enumerate(run):
            place = number * layout.run_layers + index // layout.rows
            used = place < len(layers)
            rows.append((CONV_ROW, page, layers[place] if used else -1, -1, index % layout.rows if used else -1))
    return np.array(rows, dtype=np.int32).reshape(-1, 5)
