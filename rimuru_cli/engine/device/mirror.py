"""A picture of the device's tables for those who look on, which nobody waits for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mirrored(NamedTuple):
    """The tables after step `step`: entries int32 [L, E, P], scores float32 [L, E]."""

    entries: NDArray[np.int32]
    scores: NDArray[np.float32]
    step: int


class TablesMirror:
    """Copies tables to the host behind the steps that change them, one copy at a time.

    Args:
        entries: int32 [L, E, P], on any device.
        scores: float32 [L, E].
    """

    def __init__(self, entries: Tensor, scores: Tensor) -> None:
        self._tables = (entries, scores)
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._arrived: torch.cuda.Event | None = None
        self._pending: int | None = None  # step after which the copy on its way was taken
        self._shown: Mirrored | None = None

    def turn(self, step: int) -> Mirrored | None:
        """Take in a copy that has arrived, send the next one off, and return the newest that is here (None: none yet).

        Only between steps, which `step` have been; what is returned stays as it is.
        """
        if self._pending is not None and (self._arrived is None or self._arrived.query()):  # type: ignore[no-untyped-call]
            assert self._buffers is not None, "a copy on its way has a place to go"
            entries, scores = (buffer.numpy().copy() for buffer in self._buffers)
            self._shown = Mirrored(entries, scores, self._pending)
            self._pending = None
        if self._pending is None and (self._shown is None or self._shown.step != step):
            self._send(step)
        return self._shown

    def forget(self) -> None:
        """What was copied, or is on its way, is out of date."""
        self._pending = self._shown = None

    def _send(self, step: int) -> None:
        cuda = self._tables[0].is_cuda
        if self._buffers is None:
            entries, scores = (torch.empty(table.shape, dtype=table.dtype, pin_memory=cuda) for table in self._tables)
            self._buffers = (entries, scores)
            self._arrived = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        for buffer, table in zip(self._buffers, self._tables, strict=True):
            buffer.copy_(table, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._pending = step
