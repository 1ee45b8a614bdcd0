"""The memory behind a pool's addresses: a fixed range, of which only the beginning is really there and the end can be given back.

Addresses never change, so page entries, views and captured graphs stay valid whatever is given back or taken again.

    CUDA      a reserved range of the driver's virtual memory, filled chunk by chunk
    POSIX     anonymous memory; pages that nobody touched cost nothing, and the tail is given back by madvise
    Windows   VirtualAlloc: reserve, commit, decommit
    else      plain memory: pages are withheld from use but stay with the process, and `why_kept` says so
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from rimuru_cli.engine.memory.driver import Driver, DriverError
from rimuru_cli.engine.memory.geometry import CHUNK_BYTES, GUARD_BYTES, SMALL_POOL

ALIGNMENT = 4096
_LARGE_PAGE = 2 << 20


class Backing(Protocol):
    """Memory for `data`.

    Attributes:
        data: uint8 [reserved bytes]; only the first `committed` of them may be touched.
        committed: bytes that are really there.
        why_kept: why a smaller pool gives nothing back here; empty where it does.
    """

    data: Tensor
    committed: int
    why_kept: str

    def resize(self, num_bytes: int) -> None:
        """Have memory for at least the first `num_bytes`, and give back what lies beyond. Contents up to there stay.

        Nothing may still be using what is given back.

        Raises:
            MemoryError: there is not that much; nothing has changed.
        """
        ...


class PlainBacking:
    """One allocation of torch that keeps its size."""

    def __init__(self, reserve: int, device: torch.device, why_kept: str) -> None:
        raw = torch.empty(reserve + ALIGNMENT + GUARD_BYTES, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGNMENT + GUARD_BYTES  # see CudaBacking
        self.data = raw[start : start + reserve]
        self.committed = reserve
        self.why_kept = why_kept

    def resize(self, num_bytes: int) -> None:
        """Nothing to do: all of it is there."""
        if num_bytes > self.committed:
            raise MemoryError(f"{num_bytes} bytes wanted, {self.committed} are there")


class PosixBacking:
    """Private anonymous memory; the system gives a page when it is first touched.

    Args:
        large: start at a multiple of 2 MiB and ask for large pages, which are cleared, locked and found by a device several times faster.

    Raises:
        OSError: the system reserves no such range.
    """

    def __init__(self, reserve: int, num_bytes: int, *, large: bool = False) -> None:
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
        size = max(reserve, 1) + (_LARGE_PAGE if large else 0)
        self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        if large and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._start = -whole.data_ptr() % _LARGE_PAGE if large else 0
        self.data = whole[self._start : self._start + reserve]
        self.committed = min(reserve, num_bytes)
        self.why_kept = ""

    def resize(self, num_bytes: int) -> None:
        """See `Backing.resize`."""
        start, stop = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in (num_bytes, self.committed))
        if start < stop:
            # On macOS MADV_DONTNEED is a hint that frees nothing.
            advice = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
            start, stop = self._start + start, min(self._start + stop, len(self._mapping))
            try:
                self._mapping.madvise(advice, start, stop - start)
            except OSError as error:
                self.why_kept = f"this system keeps memory that is not needed any more ({error.strerror})"
                num_bytes = self.committed
        self.committed = num_bytes


class WindowsBacking:
    """VirtualAlloc: addresses are reserved at once, memory is committed and decommitted.

    Raises:
        OSError: the system reserves no such range, or has not that much memory.
    """

    _COMMIT, _RESERVE, _DECOMMIT, _RELEASE, _READ_WRITE = 0x1000, 0x2000, 0x4000, 0x8000, 0x04

    def __init__(self, reserve: int, num_bytes: int) -> None:
        kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
        kernel.VirtualAlloc.restype = ctypes.c_void_p
        kernel.VirtualAlloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32)
        kernel.VirtualFree.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
        self._kernel = kernel
        self._address = kernel.VirtualAlloc(None, max(reserve, 1), self._RESERVE, self._READ_WRITE)
        if not self._address:
            raise OSError("VirtualAlloc reserves no such range")
        memory = (ctypes.c_uint8 * max(reserve, 1)).from_address(self._address)
        weakref.finalize(memory, kernel.VirtualFree, self._address, 0, self._RELEASE).atexit = False
        self.committed = 0
        self.why_kept = ""
        self.resize(num_bytes)
        self.data = torch.frombuffer(memory, dtype=torch.uint8)[:reserve]

    def resize(self, num_bytes: int) -> None:
        """See `Backing.resize`."""
        start, stop = (-(-size // ALIGNMENT) * ALIGNMENT for size in (num_bytes, self.committed))
        if start > stop and not self._kernel.VirtualAlloc(self._address + stop, start - stop, self._COMMIT, self._READ_WRITE):
            raise MemoryError(f"the system has no {start - stop} bytes of memory left")
        if start < stop and not self._kernel.VirtualFree(self._address + start, stop - start, self._DECOMMIT):
            self.why_kept = "this system keeps memory that is not needed any more"
            num_bytes = self.committed
        self.committed = num_bytes


class CudaBacking:
    """A range of the driver's virtual memory on the current device.

    The pool starts a little behind the range's beginning: a kernel that follows the entry -1 of an expert that it could not get reads the
    bytes before the pool. Its result is thrown away, but the bytes must be there.

    Raises:
        DriverError: the driver reserves no such range.
        MemoryError: the device has not that much memory.
    """

    def __init__(self, driver: Driver, reserve: int, num_bytes: int) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        torch.cuda.current_stream().synchronize()  # the calling thread has a context now
        grain = driver.granularity(device)
        self._chunk = grain if reserve < SMALL_POOL else -(-CHUNK_BYTES // grain) * grain
        self._range = _Range(driver, device, -(-(GUARD_BYTES + reserve) // self._chunk) * self._chunk)
        self.why_kept = ""
        self.committed = 0
        self.resize(num_bytes)
        self.data = torch.as_tensor(_Exported(self._range), device="cuda")[GUARD_BYTES : GUARD_BYTES + reserve]

    def resize(self, num_bytes: int) -> None:
        """See `Backing.resize`; waits for the device before it gives anything back."""
        count = -(-(GUARD_BYTES + num_bytes) // self._chunk)
        self._range.resize(count, self._chunk)
        self.committed = count * self._chunk


class _Range:
    """Reserved addresses, the first `chunks` pieces of which have memory."""

    def __init__(self, driver: Driver, device: int, num_bytes: int) -> None:
        self.driver, self.device, self.num_bytes = driver, device, num_bytes
        self.address = driver.reserve(num_bytes)
        self.chunks: list[int] = []  # bytes of each piece

    def resize(self, count: int, chunk: int) -> None:
        before = len(self.chunks)
        if count > before:
            try:
                for index in range(before, count):
                    self._add(self.address + index * chunk, chunk)
                self.driver.allow(self.address + before * chunk, (count - before) * chunk, self.device)
            except DriverError as error:
                self._cut(before)
                raise MemoryError(str(error)) from error
        elif count < before:
            torch.cuda.synchronize()
            self._cut(count)

    def _add(self, address: int, num_bytes: int) -> None:
        handle = self.driver.create(num_bytes, self.device)
        try:
            self.driver.map(address, num_bytes, handle)
        finally:
            self.driver.release(handle)  # the mapping keeps the memory; taking it away frees it
        self.chunks.append(num_bytes)

    def _cut(self, count: int) -> None:
        kept, gone = sum(self.chunks[:count]), sum(self.chunks[count:])
        if gone:
            self.driver.unmap(self.address + kept, gone)  # in one call: the driver makes the device forget addresses each time
            del self.chunks[count:]

    def free(self) -> None:
        """Give everything back; errors are those of a driver that is shutting down."""
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
            self._cut(0)
            self.driver.unreserve(self.address, self.num_bytes)


class _Exported:
    """What torch makes a tensor of; the range is given back when the last tensor over it is gone."""

    def __init__(self, memory: _Range) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, memory.free).atexit = False


def backing_for(reserve: int, num_bytes: int, device: torch.device, *, large: bool = False) -> Backing:
    """Memory whose end can be given back, where the system or the driver can do that.

    Args:
        reserve: bytes of addresses.
        num_bytes: of them, so many are to have memory at once.
        large: in main memory, use large pages where the system has them.

    Raises:
        MemoryError, RuntimeError: there is not that much memory.
    """
    if device.type == "cuda":
        driver = Driver.load()
        if driver is None or not driver.supports_virtual_memory(device.index or torch.cuda.current_device()):
            return PlainBacking(num_bytes, device, "this GPU's driver has no virtual memory")
        try:
            return CudaBacking(driver, reserve, num_bytes)
        except DriverError as error:
            return PlainBacking(num_bytes, device, f"the GPU's driver reserves no addresses ({error})")
    try:
        if sys.platform == "win32":
            return WindowsBacking(reserve, num_bytes)
        if hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            return PosixBacking(reserve, num_bytes, large=large)
    except OSError as error:
        return PlainBacking(num_bytes, device, f"the system reserves no addresses ({error})")
    return PlainBacking(num_bytes, device, "this system takes no memory back from a running program")
