"""The pool's bytes: one contiguous tensor, its allocator, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rimuru_cli.engine.memory.allocator import PageAllocator
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.memory.integrity import IntegrityError

BASE_ALIGNMENT = 4096
"""Bytes; the pool starts at a memory page, so entries are aligned to 256 bytes in memory, not only within the pool."""

POISON = 0xFF
"""Repeated, this byte is NaN in float32, float16 and bfloat16."""


class PagePool:
    """One contiguous run of bytes on a device, handed out in pages.

    Args:
        geometry: page sizes.
        pool_bytes: size of the pool.
        device: where it lies.
        poison: fill the pool, and every page that is freed, with 0xFF, so that a read of unwritten or freed bytes shows up as NaN.

    Attributes:
        data: uint8 [pool_bytes]. Contents are arbitrary until written (not zero-filled: a pool takes gigabytes).
        allocator: who owns which page.

    Raises:
        UsageError: the pool is larger than entries can address.
        RuntimeError: from torch, if the device has not that much memory.
    """

    def __init__(self, geometry: PoolGeometry, pool_bytes: int, device: torch.device | str = "cpu", *, poison: bool = False) -> None:
        self.geometry = geometry
        self.allocator = PageAllocator(geometry, pool_bytes)
        self.poison = poison
        raw = torch.empty(pool_bytes + BASE_ALIGNMENT, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % BASE_ALIGNMENT
        self.data = raw[start : start + pool_bytes]
        self._typed: dict[torch.dtype, Tensor] = {}
        if poison:
            self.data.fill_(POISON)

    def allocate(self, kind: PageKind, count: int) -> list[int]:
        """See `PageAllocator.allocate`."""
        return self.allocator.allocate(kind, count)

    def allocate_runs(self, kind: PageKind, runs: int, run_length: int) -> list[list[int]]:
        """See `PageAllocator.allocate_runs`."""
        return self.allocator.allocate_runs(kind, runs, run_length)

    def free(self, pages: Iterable[int]) -> None:
        """See `PageAllocator.free`; with poison the pages' bytes are overwritten."""
        if not self.poison:
            self.allocator.free(pages)
            return
        pages = list(pages)
        kinds = [self.allocator.owner_of(page) for page in pages]
        self.allocator.free(pages)
        for page, kind in zip(pages, kinds, strict=True):
            if kind is None:
                raise IntegrityError(f"page {page} was freed without an owner")
            self.bytes_of(page, self.geometry.layout(kind).stride_bytes).fill_(POISON)

    def bytes_of(self, entry: int, num_bytes: int) -> Tensor:
        """The bytes that start at an entry: uint8 [num_bytes], a view. Ownership is not checked."""
        start = entry * ENTRY_BYTES
        assert entry >= 0 and start + num_bytes <= self.data.numel(), f"{num_bytes} bytes at entry {entry} reach outside the pool"
        return self.data[start : start + num_bytes]

    def typed(self, dtype: torch.dtype) -> Tensor:
        """All whole entries of the pool as one dtype: a 1-D view, in which entry e starts at element e * 256 / itemsize."""
        view = self._typed.get(dtype)
        if view is None:
            whole = self.data.numel() // ENTRY_BYTES * ENTRY_BYTES
            view = self._typed[dtype] = self.data[:whole].view(dtype)
        return view
