"""The host tier of a device: experts in page-locked memory, so that copy engine and kernels read them at link speed.

Every expert there is contiguous (gate | up | down) and starts at a multiple of 4096 bytes, in places of one size. Memory is locked in
pieces as it is filled. What the budget or the driver does not allow stays where the checkpoint has it: the device cannot read that (its
pointer is 0), and the host has to bring it (`staging.py`).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.engine.device.expert_files import ExpertFiles, ExpertSource, formats_of
from rimuru_cli.engine.device.locking import Locker, locker_for
from rimuru_cli.engine.experts.packed_view import PageView
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.memory.backing import ALIGNMENT, Backing, backing_for
from rimuru_cli.engine.memory.geometry import MAX_PAGE_BYTES

__all__ = ["ExpertSource", "PinnedHost", "reading_threads"]

_PIECE = 512 << 20  # bytes that are locked at once: large enough that calls do not count, small enough to go on reading meanwhile
_SMALLEST_PIECE = 16 << 20

Key = tuple[int, int]


class PinnedHost:
    """All experts of a model: page-locked, or mapped from the checkpoint where memory or driver do not allow that.

    Args:
        source: where the experts come from; it stays open where some remain mapped.
        device: whose driver locks the pages; on the CPU nothing is locked.
        pages: how experts lie in the pool's pages, and so here; None: as the source's formats say, in the largest pages.
        progress: called with (bytes done, bytes in all).
        budget: most bytes to lock; None: all experts, as far as the driver goes.
        scores: [num_layers, num_experts], which experts come first where not all can be locked (higher first); None: layers take turns.
        locker: locks the memory; None: the device's.

    Attributes:
        pages: how experts lie in pages.
        num_layers, num_experts: as of `HostStore`; expert_bytes: of one expert's pages, the mean over layers; layer_bytes: of each layer's.
        stride_bytes: from one expert to the next in locked memory: the largest layer_bytes rounded up to 4096.
        pointers: int64 [num_layers, num_experts], the address of each expert as the device sees it; 0: it cannot read this one.
        pinned: bool [num_layers, num_experts], which ones those are.
        refused: the driver locked less than it was asked for.
        bytes_read: bytes of experts that the host side copied to the device so far.
        brought: experts that the host had to bring in the middle of a step, because the device cannot read them, so far.
        shared: several engines use it, so that none of them closes it.
    """

    def __init__(
        self,
        source: ExpertSource,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        *,
        pages: ExpertPages | None = None,
        budget: int | None = None,
        scores: NDArray[np.float64] | None = None,
        locker: Locker | None = None,
    ) -> None:
        config = source.config
        self.num_layers = len(config.moe_layers)
        self.num_experts = config.num_experts
        if pages is None:
            formats = formats_of(source)
            experts = None if formats is None else formats.experts
            pages = ExpertPages.build(config, source.expert_dtype.itemsize, experts, MAX_PAGE_BYTES)
        self.pages = pages
        self.expert_bytes = pages.expert_bytes
        self.layer_bytes = [count * pages.page_bytes for count in pages.layer_pages]
        self.stride_bytes = -(-max(self.layer_bytes) // ALIGNMENT) * ALIGNMENT
        self._tile_sizes = [
            [pages.tile_bytes(layer, part) for part in range(3) for _ in range(tiles.of(part))]
            for layer, tiles in enumerate(pages.layer_tiles)
        ]
        self.bytes_read = 0
        self.brought = 0
        self.shared = False
        self.refused = False
        self._locker = locker_for(device) if locker is None else locker
        self._files = ExpertFiles(source, pages)
        self._progress = progress or (lambda done, total: None)
        self._pieces: list[tuple[int, int]] = []  # first slot and number of slots of each locked piece
        self._piece_of: list[int] = []  # of each slot
        self._staging: list[Backing] = []
        # Addresses that are locked. A lock that outlived its memory would make the driver read stale bytes wherever new memory got these
        # addresses, so it ends with this object, closed or not.
        self._locked: list[int] = []
        weakref.finalize(self, _unlock, self._locker, self._locked).atexit = False
        shape = (self.num_layers, self.num_experts)
        self._slots: NDArray[np.int64] = np.full(shape, -1, dtype=np.int64)
        self._contents: list[Key] = []  # of each slot
        total = self.num_layers * self.num_experts
        count = total if budget is None else max(0, min(total, budget // self.stride_bytes))
        ranking = np.zeros(shape) if scores is None else scores
        self._backing = backing_for(count * self.stride_bytes, count * self.stride_bytes, torch.device("cpu"), large=True)
        self._memory = self._backing.data
        try:
            self._load(_best(ranking, count))
            locked = sum(count for _, count in self._pieces)
            if locked < count:
                # The driver stopped half-way, so what is locked holds the first layers only: it had better hold the best of all layers.
                self.refused = True
                self._backing.resize(locked * self.stride_bytes)
                self._load(_best(ranking, locked))
        except BaseException:
            self.shared = False
            self.close()
            raise
        self.pinned: NDArray[np.bool_] = self._slots >= 0
        self.pointers = torch.zeros(shape, dtype=torch.int64)
        for first, length in self._pieces:
            address = self._locker.device_address(self._address(first))
            for slot in range(first, first + length):
                self.pointers[self._contents[slot]] = address + (slot - first) * self.stride_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory, padding included."""
        return sum(count for _, count in self._pieces) * self.stride_bytes

    @property
    def padding_bytes(self) -> int:
        """Part of it that holds nothing, because experts start at whole memory pages, and have places of one size."""
        return self.pinned_bytes - sum(self.layer_bytes[layer] for layer, _ in self._contents[: self.pinned_bytes // self.stride_bytes])

    @property
    def mapped_bytes(self) -> int:
        """Bytes of experts that are not page-locked and stay mapped from the checkpoint."""
        return int(((self._slots < 0).sum(1) * self.layer_bytes).sum())

    @property
    def notices(self) -> tuple[str, ...]:
        """What a person should know about where the experts lie."""
        if not self.mapped_bytes:
            return ()
        why = "the driver page-locks no more" if self.refused else "main memory has no room to page-lock more"
        locked, rest = self.pinned_bytes / 2**30, self.mapped_bytes / 2**30
        return (
            f"{locked:.1f} GiB of experts lie in page-locked memory and {rest:.1f} GiB stay on disk, because {why}; answers are slower "
            "when they need those.",
        )

    def content(self, layer: int, expert: int) -> Tensor:
        """The bytes of one expert's pages, page-locked or just read: uint8 [layer_bytes]. Counts as a read of the host tier."""
        self.bytes_read += self.layer_bytes[layer]
        slot = int(self._slots[layer, expert])
        if slot >= 0:
            return self._bytes(slot, 1)
        content = torch.empty(self.layer_bytes[layer], dtype=torch.uint8)
        self._files.read(layer, expert, content)
        return content

    def tile_sizes(self, layer: int) -> list[int]:
        """Bytes that each page of an expert of a MoE layer holds; the rest of a page is empty."""
        return self._tile_sizes[layer]

    def copy_to(self, view: PageView, layer: int, expert: int, pages: Sequence[int]) -> None:
        """See `HostTier.copy_to`; for pools in main memory."""
        for page, part in zip(pages, self.content(layer, expert).view(len(pages), -1), strict=True):
            # numpy and not torch: see `memory.views.copy_in_pieces`.
            np.copyto(view.pool.bytes_of(page, part.numel()).numpy(), part.numpy())

    def joined(self, layer: int, expert: int, following: int) -> bool:
        """Whether `following` begins where `expert` ends, so that both are one run of bytes that the copy engine takes at once."""
        slot, other = int(self._slots[layer, expert]), int(self._slots[layer, following])
        whole = self.stride_bytes == self.layer_bytes[layer] and slot >= 0 and other == slot + 1
        return whole and self._piece_of[slot] == self._piece_of[other]

    def run(self, layer: int, first: int, count: int) -> Tensor:
        """The bytes of `count` page-locked experts that are `joined`, from `first` on: uint8 [count * layer_bytes], a view."""
        slot = int(self._slots[layer, first])
        assert slot >= 0, f"expert {first} of layer {layer} is not page-locked"
        return self._bytes(slot, count)

    def read(self, layer: int, expert: int, out: Tensor) -> None:
        """Copy one expert's bytes, page-locked or not, to `out`, uint8 [layer_bytes] in main memory. From any thread."""
        slot = int(self._slots[layer, expert])
        if slot < 0:
            self._files.read(layer, expert, out)
        else:
            np.copyto(out.numpy(), self._bytes(slot, 1).numpy())

    def staging(self, places: int) -> Tensor:
        """Memory that is locked beside the budget, for experts on their way: uint8 [places, stride_bytes]; plain where that is refused."""
        backing = backing_for(places * self.stride_bytes, places * self.stride_bytes, torch.device("cpu"), large=True)
        if self._locker.lock(backing.data.data_ptr(), backing.data.numel()):
            self._staging.append(backing)
            self._locked.append(backing.data.data_ptr())
        return backing.data.view(places, self.stride_bytes)

    def close(self) -> None:
        """Unlock the memory, unless it is shared."""
        if self.shared:
            return
        _unlock(self._locker, self._locked)
        self._pieces, self._staging = [], []
        self._files.close()
        self._backing.resize(0)

    # ---- loading -------------------------------------------------------------------------------------------------------------------

    def _load(self, wanted: Sequence[Key]) -> None:
        """Put these experts into the slots, in order, several at a time; lock pieces as soon as they are full, until the driver refuses."""
        before, self._contents = self._contents, list(wanted)
        size = max(1, min(_PIECE, max(_SMALLEST_PIECE, len(wanted) * self.stride_bytes // 8)) // self.stride_bytes)
        bounds = [*range(0, len(wanted), size), len(wanted)]
        done, total = 0, sum(self.layer_bytes[layer] for layer, _ in wanted)
        self._slots.fill(-1)
        # One thread locks, the others read: locking a piece takes as long as reading a few experts.
        with ThreadPoolExecutor(reading_threads(), "rimuru-read") as readers, ThreadPoolExecutor(1, "rimuru-lock") as lock:
            changed = (slot for slot, key in enumerate(wanted) if before[slot : slot + 1] != [key])
            reading = {slot: readers.submit(self._read_slot, slot) for slot in changed}
            locking = []
            try:
                for start, stop in pairwise(bounds):
                    for slot in range(start, stop):
                        if slot in reading:
                            reading[slot].result()
                        done += self.layer_bytes[wanted[slot][0]]
                        self._progress(done, total)
                    if not before:
                        locking.append(lock.submit(self._lock, start, stop))
                    if any(piece.done() and not piece.result() for piece in locking):
                        break
                for piece in locking:
                    piece.result()
            finally:
                for read in reading.values():
                    read.cancel()
        locked = sum(count for _, count in self._pieces)
        for slot, key in enumerate(self._contents[:locked]):
            self._slots[key] = slot

    def _read_slot(self, slot: int) -> None:
        layer, expert = self._contents[slot]
        self._files.read(layer, expert, self._bytes(slot, 1))

    def _lock(self, start: int, stop: int) -> bool:
        """Lock slots start to stop, which follow those locked so far; fewer where the driver refuses. Returns whether all were locked."""
        if start != sum(count for _, count in self._pieces):
            return False  # refused before
        size = stop - start
        while start < stop:
            size = min(size, stop - start)
            if self._locker.lock(self._address(start), size * self.stride_bytes):
                self._piece_of += [len(self._pieces)] * size
                self._pieces.append((start, size))
                self._locked.append(self._address(start))
                start += size
            elif size == 1 or size * self.stride_bytes <= _SMALLEST_PIECE:
                return False
            else:
                size = (size + 1) // 2
        return True

    def _address(self, slot: int) -> int:
        return self._memory.data_ptr() + slot * self.stride_bytes

    def _bytes(self, slot: int, count: int) -> Tensor:
        start, size = slot * self.stride_bytes, self.layer_bytes[self._contents[slot][0]]
        return self._memory[start : start + (count - 1) * self.stride_bytes + size]


def _unlock(locker: Locker, addresses: list[int]) -> None:
    while addresses:
        locker.unlock(addresses.pop())


def _best(scores: NDArray[np.float64], count: int) -> list[Key]:
    """The `count` best experts as (layer, expert), ascending; equals go round the layers."""
    layers = scores.shape[0]
    order = np.argsort(-scores.T.reshape(-1), kind="stable")[:count]
    return sorted((int(i) % layers, int(i) // layers) for i in order)


def reading_threads() -> int:
    """Threads that read: the rate of memory is reached with a few, a disk likes several requests at once."""
    usable: int | None = None
    with contextlib.suppress(AttributeError, OSError):
        usable = len(os.sched_getaffinity(0))
    return max(2, min(8, usable or os.cpu_count() or 1))
