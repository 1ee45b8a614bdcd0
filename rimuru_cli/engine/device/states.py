"""The model's `RecurrentState` on a device: states are named by page entries in tables that live there, so a decode step can be captured.

Rows of a step are ordered as those of `DeviceKVCache`: sequences with one row first, each a row of the tables, then the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.device.hybrid_plan import MAX_STATE_DIM
from rimuru_cli.engine.device.undo import Undo
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_cli.engine.state_blocks import StateBlock, StateBlocks
from rimuru_kernels.causal_conv1d import causal_conv1d_entries
from rimuru_kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_entries
from rimuru_kernels.mamba2 import state_space, state_space_entries

_MOST_KEY_DIM = 128
"""Longest keys of the delta rule's form by entries for several rows on a GPU; longer ones go by views, in torch."""


@dataclass(frozen=True)
class _Piece:
    """Rows of some sequences that are computed in one call.

    Attributes:
        rows, sequences: of the step.
        bounds: int32 [n + 1] on the device, where each sequence's rows end; None: one row each. `ends`: the same on the host.
        kept: which sequences' states are copied afterwards, and where to.
    """

    rows: slice
    sequences: slice
    bounds: Tensor | None
    ends: tuple[int, ...]
    kept: list[tuple[int, StateBlock]]

    @property
    def single_rows(self) -> bool:
        """Whether some sequence has one row."""
        return self.bounds is None or any(b - a == 1 for a, b in pairwise(self.ends))


class _Cut(NamedTuple):
    """Rows start .. stop - 1 of one sequence, and where its states are copied afterwards."""

    sequence: int
    start: int
    stop: int
    kept: StateBlock | None


class DeviceStates:
    """Satisfies `interfaces.RecurrentState` over the pages of the sequences in a step.

    Args:
        states: who owns the pages.
        pool: uint8 [bytes].
        dtype: of convolution states.
        max_sequences: most sequences of a step.
        undo: room for the states before a step.

    Attributes:
        undo: see there.
    """

    def __init__(self, states: StateBlocks, pool: Tensor, dtype: torch.dtype, *, max_sequences: int, undo: Undo) -> None:
        self._states, self._pool, self._dtype = states, pool, dtype
        self.undo = undo
        layout = states.layout
        shape = (layout.layers, max_sequences)
        self._recurrent = torch.full(shape, -1, dtype=torch.int32, device=pool.device)
        self._convolution = torch.full((*shape, layout.rows), -1, dtype=torch.int32, device=pool.device)
        self._rows: list[StateBlock | None] = [None] * max_sequences
        self._moves = states.moves
        self._blocks: list[StateBlock] = []
        self._pieces: list[_Piece] = []
        # As the convolution takes them; and where states of it are to be kept that are not a piece's last: behind which row of all.
        self._convolved: list[_Piece] = []
        self._kept_rows: list[tuple[int, StateBlock]] = []

    def begin_step(self, plan: Sequence[ScheduledRows]) -> None:
        """Bring the tables up to date for the scheduled rows, sequences of one row first."""
        self._blocks = [_states_of(rows) for rows in plan]
        self._write()
        decode = sum(1 for rows in plan if rows.count == 1)
        starts = [0, *accumulate(rows.count for rows in plan)]
        cuts = [cut for number in range(decode, len(plan)) for cut in _cuts(number, starts[number], plan[number])]
        first: list[_Piece] = []
        if decode:
            kept = [(number, block) for number, rows in enumerate(plan[:decode]) for _, block in rows.keep]
            first = [_Piece(slice(0, decode), slice(0, decode), None, (), kept)]
        self._pieces = self._convolved = first + self._together(cuts)
        self._kept_rows = []
        whole = [_Cut(number, starts[number], starts[number + 1], None) for number in range(decode, len(plan))]
        if len(cuts) > len(whole):
            kept_rows = [(cut.stop, cut.stop - starts[cut.sequence], cut.kept) for cut in cuts if cut.kept is not None]
            if all(count >= self._states.layout.rows for _, count, _ in kept_rows):
                # What a convolution keeps are rows of its input, so it need not be cut for that.
                self._convolved = first + self._together(whole)
                self._kept_rows = [(row, block) for row, _, block in kept_rows]

    def _together(self, cuts: Sequence[_Cut]) -> list[_Piece]:
        """Sequences that follow each other go together, as far as the next cut."""
        pieces: list[_Piece] = []
        first = 0
        while first < len(cuts):
            last = first
            while last + 1 < len(cuts) and cuts[last + 1].sequence > cuts[last].sequence:
                last += 1
            together = cuts[first : last + 1]
            start, stop = together[0].start, together[-1].stop
            ends = [0, *(cut.stop - start for cut in together)]
            bounds = torch.tensor(ends, dtype=torch.int32, device=self._pool.device)
            kept = [(cut.sequence, cut.kept) for cut in together if cut.kept is not None]
            sequences = slice(together[0].sequence, together[-1].sequence + 1)
            pieces.append(_Piece(slice(start, stop), sequences, bounds, tuple(ends), kept))
            first = last + 1
        return pieces

    def holds(self, plan: Sequence[ScheduledRows]) -> bool:
        """Whether the tables are those of these sequences as they are now."""
        same = all(known is rows.sequence.states for known, rows in zip(self._rows, plan, strict=False))
        return self._moves == self._states.moves and same

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within the block, steps neither read nor change any state."""
        tables = (self._recurrent, self._convolution)
        kept = [table.clone() for table in tables]
        for table in tables:
            table.fill_(-1)
        try:
            yield
        finally:
            for table, entries in zip(tables, kept, strict=True):
                table.copy_(entries)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `interfaces.RecurrentState.convolve`."""
        place = self._states.places[layer]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for piece in self._convolved:
            entries = self._convolution[place, piece.sequences]
            causal_conv1d_entries(
                x[piece.rows], weight, bias, self._pool, entries, piece.bounds, state_dtype=self._dtype, out=out[piece.rows]
            )
            for number, block in piece.kept:
                block.convolution[place].copy_(self._blocks[number].convolution[place])
        for row, block in self._kept_rows:
            block.convolution[place].copy_(x[row - self._states.layout.rows : row])
        return out

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """See `interfaces.RecurrentState.delta_rule`."""
        place = self._states.places[layer]
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        for piece in self._pieces:
            rows = piece.rows
            parts = q[rows], k[rows], v[rows], log_decay[rows], beta[rows]
            if piece.bounds is None or q.shape[2] <= _MOST_KEY_DIM:
                entries = self._recurrent[place, piece.sequences]
                gated_delta_rule_entries(*parts, self._pool, entries, piece.bounds, out=out[rows], single_rows=piece.single_rows)
            else:
                out[rows] = gated_delta_rule(*parts, self._views(piece, place), piece.ends)
            self._keep(piece, place)
        return out

    def state_space(self, layer: int, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """See `interfaces.RecurrentState.state_space`."""
        place = self._states.places[layer]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for piece in self._pieces:
            rows = piece.rows
            parts = x[rows], dt[rows], a_log, b[rows], c[rows], d
            if piece.bounds is None or b.shape[2] <= MAX_STATE_DIM:
                entries = self._recurrent[place, piece.sequences]
                state_space_entries(*parts, self._pool, entries, piece.bounds, out=out[rows], single_rows=piece.single_rows)
            else:
                out[rows] = state_space(*parts, self._views(piece, place), piece.ends)
            self._keep(piece, place)
        return out

    def _views(self, piece: _Piece, place: int) -> list[Tensor]:
        return [block.recurrent[place] for block in self._blocks[piece.sequences]]

    def _keep(self, piece: _Piece, place: int) -> None:
        for number, block in piece.kept:
            block.recurrent[place].copy_(self._blocks[number].recurrent[place])

    def _write(self) -> None:
        if self._moves != self._states.moves:
            self._rows, self._moves = [None] * len(self._rows), self._states.moves
        changed = [row for row, block in enumerate(self._blocks) if self._rows[row] is not block]
        if not changed:
            return
        count = len(self._blocks)
        entries = torch.from_numpy(np.array([block.entries for block in self._blocks], dtype=np.int32)).transpose(0, 1)
        self._recurrent[:, :count].copy_(entries[:, :, 0])
        self._convolution[:, :count].copy_(entries[:, :, 1:])
        self._rows[:count] = self._blocks


def _states_of(rows: ScheduledRows) -> StateBlock:
    assert rows.sequence.states is not None, "a scheduled sequence has states"
    return rows.sequence.states


def _cuts(number: int, start: int, rows: ScheduledRows) -> list[_Cut]:
    """The rows of a sequence between the places where its states are wanted.

    It is cut there whether there was room to keep them or not, so that rounding does not depend on what the pool has free.
    """
    done = rows.sequence.computed
    kept = dict(rows.keep)
    places = sorted({place - done for place in rows.sequence.keep_at if done < place < done + rows.count} | kept.keys() | {rows.count})
    return [_Cut(number, start + a, start + b, kept.get(b)) for a, b in pairwise([0, *places])]
