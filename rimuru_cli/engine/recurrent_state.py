"""The model's `RecurrentState` over pages: states are updated where they lie, and copied out where the scheduler wants them kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_cli.engine.state_blocks import StateBlock, StateBlocks
from rimuru_kernels.causal_conv1d import causal_conv1d
from rimuru_kernels.gated_delta_rule import gated_delta_rule
from rimuru_kernels.mamba2 import state_space
from rimuru_models.states import StatesInPlace

# Some rows of a step and the states they continue -> their outputs.
_Part = Callable[[slice, list[Tensor], tuple[int, ...]], Tensor]


class PagedStates(StatesInPlace):
    """States of the sequences in a step, in their pages.

    Where a state is to be kept after some row, the rows before it and those behind it are computed one after the other.
    """

    def __init__(self, states: StateBlocks) -> None:
        self._places = states.places
        self._blocks: list[StateBlock] = []
        self._keep: list[list[tuple[int, StateBlock]]] = []

    def begin_step(self, plan: Sequence[ScheduledRows]) -> None:
        """Point at the pages of the scheduled sequences."""
        self.cu_seqlens = (0, *accumulate(rows.count for rows in plan))
        self._blocks = []
        for rows in plan:
            assert rows.sequence.states is not None, "a scheduled sequence has states"
            self._blocks.append(rows.sequence.states)
        keep = [rows.keep for rows in plan]
        self._keep = keep if any(keep) else []

    def recurrent(self, layer: int) -> list[Tensor]:
        """See `StatesInPlace.recurrent`."""
        place = self._places[layer]
        return [block.recurrent[place] for block in self._blocks]

    def convolution(self, layer: int) -> list[Tensor]:
        """See `StatesInPlace.convolution`."""
        place = self._places[layer]
        return [block.convolution[place] for block in self._blocks]

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `interfaces.RecurrentState.convolve`."""
        if not self._keep:
            return super().convolve(layer, x, weight, bias)
        place = self._places[layer]
        kept = [[block.convolution[place] for _, block in keep] for keep in self._keep]
        return self._in_parts(lambda rows, states, cuts: causal_conv1d(x[rows], weight, bias, states, cuts), self.convolution(layer), kept)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """See `interfaces.RecurrentState.delta_rule`."""
        if not self._keep:
            return super().delta_rule(layer, q, k, v, log_decay, beta)
        return self._in_parts(
            lambda rows, states, cuts: gated_delta_rule(q[rows], k[rows], v[rows], log_decay[rows], beta[rows], states, cuts),
            self.recurrent(layer),
            self._kept(layer),
        )

    def state_space(self, layer: int, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """See `interfaces.RecurrentState.state_space`."""
        if not self._keep:
            return super().state_space(layer, x, dt, a_log, b, c, d)
        return self._in_parts(
            lambda rows, states, cuts: state_space(x[rows], dt[rows], a_log, b[rows], c[rows], d, states, cuts),
            self.recurrent(layer),
            self._kept(layer),
        )

    def _kept(self, layer: int) -> list[list[Tensor]]:
        place = self._places[layer]
        return [[block.recurrent[place] for _, block in keep] for keep in self._keep]

    def _in_parts(self, run: _Part, states: list[Tensor], kept: list[list[Tensor]]) -> Tensor:
        parts = []
        for (start, stop), state, keep, copies in zip(pairwise(self.cu_seqlens), states, self._keep, kept, strict=True):
            first = start
            for (row, _), copy in zip(keep, copies, strict=True):
                parts.append(run(slice(first, start + row), [state], (0, start + row - first)))
                copy.copy_(state)
                first = start + row
            if first < stop:
                parts.append(run(slice(first, stop), [state], (0, stop - first)))
        return torch.cat(parts)
