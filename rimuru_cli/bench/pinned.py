"""How much memory the driver page-locks, found out by asking it in growing steps and giving everything back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from rimuru_cli.engine.device.locking import CudaLocker, Locker

__all__ = ["CudaLocker", "Locker", "PinnedBudget", "measure_pinned_budget"]

MIB = 1 << 20
MOST_BYTES = 16 << 30
FREE_SHARE = 0.8
_FIRST_STEP = 256 * MIB
_LAST_STEP = 64 * MIB


class PinnedBudget(NamedTuple):
    """granted_bytes of asked_bytes were page-locked at once; refused: the driver said no before that."""

    granted_bytes: int
    asked_bytes: int
    refused: bool


def measure_pinned_budget(
    free_bytes: int,
    locker: Locker,
    progress: Callable[[int, int], None] | None = None,
    *,
    first_step: int = _FIRST_STEP,
    last_step: int = _LAST_STEP,
) -> PinnedBudget:
    """Lock ordinary memory until the driver refuses or the limit is reached, then unlock all of it.

    Args:
        free_bytes: free main memory; at most 80 % of it, and at most 16 GiB, are asked for.
        progress: called with (bytes locked, bytes asked for).
        first_step, last_step: bytes of the first step; each granted one doubles what is held, each refused one is halved down to the last.
    """
    limit = min(MOST_BYTES, int(FREE_SHARE * free_bytes))
    held: list[torch.Tensor] = []
    granted, step, refused = 0, first_step, False
    try:
        while granted < limit and step >= last_step:
            if progress is not None:
                progress(granted, limit)
            block = _memory(min(step, limit - granted))
            if block is not None and locker.lock(block.data_ptr(), block.numel()):
                held.append(block)
                granted += block.numel()
                step = step if refused else granted
            else:
                refused = True
                step //= 2
    finally:
        for block in held:
            locker.unlock(block.data_ptr())
    return PinnedBudget(granted, limit, refused)


def _memory(num_bytes: int) -> torch.Tensor | None:
    """Memory that nobody has touched yet (locking does), or None if there is none."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        return None
