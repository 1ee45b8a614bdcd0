"""The pool's bytes: one contiguous range of addresses, its allocator, and nothing else. How much of the range is in use can change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.memory.allocator import PageAllocator
from rimuru_cli.engine.memory.backing import ALIGNMENT, Backing, PlainBacking, backing_for
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.memory.integrity import IntegrityError

BASE_ALIGNMENT = ALIGNMENT
"""Bytes; the pool starts at a memory page, so entries are aligned to 256 bytes in memory, not only within the pool."""

POISON = 0xFF
"""Repeated, this byte is NaN in float32, float16 and bfloat16."""

_SELF_MOVES = 17  # more than 16 rows, since torch has another kernel for fewer
_MOVED_AT_ONCE = 64 << 20  # bytes of the temporary copy when pages are moved; no step runs then, so its workspace is free


class PagePool:
    """One contiguous run of bytes on a device, handed out in pages.

    Args:
        geometry: page sizes.
        pool_bytes: size of the pool.
        device: where it lies.
        poison: fill the pool, and every page that is freed, with 0xFF, so that a read of unwritten or freed bytes shows up as NaN.
        reserve_bytes: largest size that the pool may be given later; None: its size is fixed. With it, both are whole huge pages.

    Attributes:
        data: uint8 [reserve_bytes], or [pool_bytes] where that is None. Contents are arbitrary until written (not zero-filled: a pool takes
            gigabytes); beyond `num_bytes` there may be no memory at all.
        allocator: who owns which page; all of the reserve that is not in use is withheld.
        num_bytes: size of the pool now.

    Raises:
        UsageError: the pool is larger than entries can address.
        RuntimeError, MemoryError: the device has not that much memory.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        pool_bytes: int,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
        reserve_bytes: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.poison = poison
        self.num_bytes = pool_bytes
        huge, whole = geometry.huge_page_bytes, max(pool_bytes, reserve_bytes or 0)
        assert reserve_bytes is None or not (pool_bytes % huge or whole % huge), "an elastic pool is made of whole huge pages"
        PageAllocator(geometry, whole)  # refuses what entries cannot address before memory is asked for
        self._backing: Backing
        if reserve_bytes is None:
            self._backing = PlainBacking(pool_bytes, torch.device(device), "the size of this pool is fixed")
        else:
            self._backing = backing_for(whole, pool_bytes, torch.device(device))
        self.data = self._backing.data
        self.allocator = PageAllocator(geometry, self.data.numel())
        self.allocator.withhold(range(pool_bytes // huge, self.allocator.num_huge_pages))
        self._typed: dict[torch.dtype, Tensor] = {}
        if poison:
            self.data[:pool_bytes].fill_(POISON)
        if reserve_bytes is not None and self.data.is_cuda:
            self._load_kernels()

    def _load_kernels(self) -> None:
        """Move some pages onto themselves: a device loads a kernel when it is first used, which takes longer than moving gigabytes."""
        for kind in self.geometry.kinds:
            stride = self.geometry.layout(kind).stride_bytes
            pages = [index * stride // ENTRY_BYTES for index in range(min(_SELF_MOVES, self.num_bytes // stride))]
            self.move(kind, pages, pages)

    @property
    def reserve_bytes(self) -> int:
        """The largest size that the pool can have."""
        return self.data.numel()

    @property
    def committed_bytes(self) -> int:
        """Memory that the pool really holds now."""
        return self._backing.committed

    @property
    def why_kept(self) -> str:
        """Why a smaller pool gives no memory back here; empty where it does."""
        return self._backing.why_kept

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

    # ---- a size that changes -------------------------------------------------------------------------------------------------------

    def limit(self, pool_bytes: int) -> None:
        """Hand out no page beyond `pool_bytes` any more; `num_bytes` stays until `shrink`. `limit(num_bytes)` takes it back."""
        huge = self.geometry.huge_page_bytes
        limit, now = pool_bytes // huge, self.num_bytes // huge
        self.allocator.release(range(min(limit, now)))
        self.allocator.withhold(range(limit, now))

    def shrink(self, pool_bytes: int) -> int:
        """Make the pool smaller and give memory back; nothing may be owned beyond. Returns the bytes given back to driver or system."""
        self.limit(pool_bytes)
        assert not any(self.allocator.held_in_withheld(kind) for kind in self.geometry.kinds), "pages are owned in what is to be given back"
        before = self._backing.committed
        self._backing.resize(pool_bytes)
        self.num_bytes = pool_bytes
        return 0 if self._backing.why_kept else before - self._backing.committed

    def grow(self, pool_bytes: int) -> None:
        """Make the pool larger, at most `reserve_bytes`.

        Raises:
            MemoryError: there is not that much memory; nothing has changed.
        """
        assert pool_bytes <= self.reserve_bytes, "the pool cannot grow beyond what was reserved for it"
        self._backing.resize(pool_bytes)
        if self.poison:
            self.data[self.num_bytes : pool_bytes].fill_(POISON)
        huge = self.geometry.huge_page_bytes
        self.allocator.release(range(self.num_bytes // huge, pool_bytes // huge))
        self.num_bytes = pool_bytes

    def moved(self, kind: PageKind, sources: Sequence[int], *, run: bool = False) -> list[int]:
        """Take other pages of a kind, `run`: that follow each other, and `move` there; the sources are still owned.

        Raises:
            OutOfPages: there are too few; nothing was taken, nor is it where the copy fails.
        """
        targets = self.allocate_runs(kind, 1, len(sources))[0] if run else self.allocate(kind, len(sources))
        try:
            self.move(kind, sources, targets)
        except BaseException:
            self.free(targets)
            raise
        return targets

    def move(self, kind: PageKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the bytes of pages to other pages of the kind, in order of the device's current stream. Ownership is not touched."""
        if not sources or self.data.is_meta:  # a simulation's pool has no bytes
            return
        geometry, layout = self.geometry, self.geometry.layout(kind)
        steps = [geometry.huge_page_bytes, layout.stride_bytes]
        if layout.parent is not None:
            steps.append(geometry.layout(layout.parent).stride_bytes)
        row = math.gcd(*steps)  # every page is whole rows of this size
        per_page = layout.stride_bytes // row
        words = self.typed(torch.int64)
        rows = words[: words.numel() // (row // 8) * (row // 8)].view(-1, row // 8)
        entries = torch.from_numpy(np.array((sources, targets), dtype=np.int64))  # torch takes many times longer for lists
        first = entries.to(self.data.device) * ENTRY_BYTES // row
        index = (first.unsqueeze(2) + torch.arange(per_page, device=self.data.device)).view(2, -1)
        at_once = max(1, _MOVED_AT_ONCE // row)
        for start in range(0, index.shape[1], at_once):
            read, write = index[:, start : start + at_once]
            rows.index_copy_(0, write, rows.index_select(0, read))

    # ---- the bytes -----------------------------------------------------------------------------------------------------------------

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
