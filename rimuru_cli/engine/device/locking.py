"""Page-locking ordinary memory, so that the device's copy engine and kernels read it at the link's full rate."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from rimuru_cli.engine.memory.driver import Driver

# Portable (every context of the process may use it) and mapped (kernels may read it).
_FLAGS = 3


class Locker(Protocol):
    """Locks and unlocks memory by address; `lock` says whether it was granted."""

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock the pages."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock what was locked at this address."""
        ...

    def device_address(self, address: int) -> int:
        """Where the device sees locked memory."""
        ...


class CudaLocker:
    """The CUDA driver's cudaHostRegister."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._driver = Driver.load()

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

    def device_address(self, address: int) -> int:
        """Where the device sees locked memory: the same address, except under some Windows drivers."""
        return address if self._driver is None else self._driver.device_address(address)


class NoLocker:
    """Where the computing is done on the CPU, all memory is within reach.

    Args:
        limit: bytes that are granted in all; None: no limit. For tests of what a driver's refusal leads to.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.locked: dict[int, int] = {}

    def lock(self, address: int, num_bytes: int) -> bool:
        """Count the pages."""
        if self._limit is not None and sum(self.locked.values()) + num_bytes > self._limit:
            return False
        self.locked[address] = num_bytes
        return True

    def unlock(self, address: int) -> None:
        """Forget what was locked at this address."""
        del self.locked[address]

    def device_address(self, address: int) -> int:
        """The same address."""
        return address


def locker_for(device: torch.device) -> Locker:
    """What locks memory for a device."""
    return CudaLocker() if device.type == "cuda" else NoLocker()
