"""How much memory the driver page-locks, found out by asking it in growing steps and giving everything back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

MIB = 1 << 20
MOST_BYTES = 16 << 30
FREE_SHARE = 0.8
_FIRST_STEP = 256 * MIB
_LAST_STEP = 64 * MIB
# Portable and mapped, as the engine locks its experts.
_FLAGS = 3


class PinnedBudget(NamedTuple):
    """granted_bytes of asked_bytes were page-locked at once; refused: the driver said no before that."""

    granted_bytes: int
    asked_bytes: int
    refused: bool


class Locker(Protocol):
    """Locks and unlocks memory by address; `lock` says whether it was granted."""

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock the pages."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock what was locked at this address."""
        ...


class CudaLocker:
    """The CUDA driver's cudaHostRegister."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock the pages."""
        if int(self._runtime.cudaHostRegister(address, num_bytes, _FLAGS)) == 0:
            return True
        # The refusal stays behind as the thread's last error, and whoever starts the next kernel would be blamed for it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False

    def unlock(self, address: int) -> None:
        """Unlock what was locked at this address."""
        self._runtime.cudaHostUnregister(address)


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
