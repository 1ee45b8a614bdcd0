"""Pages lent to steps: loading buffers for streamed steps, and scratch for small ones whose experts outnumber a layer's residents."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.device.copying import WASTED, contiguous, copy_expert
from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.device.staging import Staging
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind
from rimuru_cli.engine.memory.page_pool import PagePool


class ScratchPages:
    """Pages lent to steps: of a few experts, to on-demand steps that select more of a layer than it has residents; or loading buffers.

    Attributes:
        stream: the loading buffers, if they are lent now.
        rows: int32 [num_experts, pages_per_expert] on the device, entries of each lent expert place; -1 beyond. Captured graphs read it.
    """

    def __init__(self, pool: PagePool, num_experts: int, pages_per_expert: int) -> None:
        self._pool = pool
        self._per_expert = pages_per_expert
        self._pages: list[int] = []
        self.stream: StreamBuffers | None = None
        self.rows = torch.full((num_experts, pages_per_expert), -1, dtype=torch.int32, device=pool.data.device)

    @property
    def num_pages(self) -> int:
        """Pages that are lent now."""
        return len(self.pages)

    @property
    def pages(self) -> list[int]:
        """Entries of the pages that are lent now."""
        return self._pages + ([] if self.stream is None else self.stream.pages)

    @property
    def experts(self) -> int:
        """Experts that fit beside a layer's residents."""
        return len(self._pages) // self._per_expert

    def lend(self, experts: int) -> None:
        """Take pages so that `experts` fit in all, no fewer than before.

        Raises:
            OutOfPages: if the pool has too few free pages.
        """
        more = experts - self.experts
        if more > 0:
            self._pages += self._pool.allocate(PageKind.EXPERT, more * self._per_expert)
            self._write()

    def close(self) -> None:
        """Give all pages back to the pool. Only between steps."""
        if self.stream is not None:
            self._pool.free(self.stream.pages)
            self.stream = None
        if self._pages:
            self._pool.free(self._pages)
            self._pages = []
            self._write()

    @torch.inference_mode()
    def _write(self) -> None:
        rows = torch.full(self.rows.shape, -1, dtype=torch.int32)
        rows[: self.experts] = torch.tensor(self._pages, dtype=torch.int32).view(-1, self._per_expert)
        self.rows.copy_(rows)


class StreamBuffers:
    """Pages that a streamed step's absent experts pass through, for `capacity` experts of any layer and some of the next.

    Attributes:
        slots: int32 [experts, pages_per_expert], entries.
        pages: all of them; whoever made the buffers frees them.

    Raises:
        OutOfPages: if the pool has too few free pages.
    """

    def __init__(self, pool: PagePool, experts: int, pages_per_expert: int) -> None:
        self.pages = sorted(pool.allocate(PageKind.EXPERT, experts * pages_per_expert))
        self.slots = torch.tensor(self.pages, dtype=torch.int32).view(experts, pages_per_expert)


class ExpertStream:
    """The absent experts of all layers on their way through the buffers, layer after layer.

    Slots are used in turn: what layer l has been computed from is filled with the experts of the layers behind it while the next computes.
    All absent experts of a layer are there at once, so a layer is one kernel call and its result is the same bits for every placement.

    Args:
        copies: the stream that copies; None copies at once (on the CPU).
        timed: keep the times of the copies.

    Attributes:
        started, ended: of the copies, if `timed`; bytes_copied: in between.
    """

    def __init__(
        self,
        host: PinnedHost,
        residency: DeviceResidency,
        pool: PagePool,
        buffers: StreamBuffers,
        copies: torch.cuda.Stream | None,
        *,
        staging: Staging | None = None,
        timed: bool = False,
    ) -> None:
        self._host, self._pool, self._copies, self._staging = host, pool, copies, staging
        self._slots = buffers.slots.tolist()
        absent = [residency.absent(layer).numpy() for layer in range(host.num_layers)]
        self._queue = [(layer, int(expert)) for layer, experts in enumerate(absent) for expert in experts]
        self._ends = np.cumsum([len(experts) for experts in absent]).tolist()
        self._copied = 0  # of the queue
        if staging is not None:
            staging.expect(key for key in self._queue if not host.pinned[key])
        self._arrived: dict[int, torch.cuda.Event] = {}
        self.bytes_copied = 0
        # All tables in one transfer: a small copy for every layer would make the host wait each time.
        tables = residency.entries.copy()
        slots = buffers.slots.numpy()
        for layer, experts in enumerate(absent):
            start = self._ends[layer] - len(experts)
            tables[layer, experts] = slots[np.arange(start, self._ends[layer]) % len(slots)]
        self._entries = torch.from_numpy(tables).to(pool.data.device)
        self.started = self.ended = None
        if copies is not None:
            # The buffers' pages may have been read or written by what was queued before this step.
            copies.wait_stream(torch.cuda.current_stream())
            if timed:
                self.started, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                self.started.record(copies)
        self._fill(len(self._slots))

    def take(self, layer: int) -> Tensor:
        """Entries int32 [E, P] of a layer, its absent experts pointing into the buffers; the current stream waits for their arrival."""
        if self._copies is not None and layer in self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived.pop(layer))
        return self._entries[layer]

    def done(self, layer: int) -> None:
        """The layer's kernels are queued: its slots may be filled again after them."""
        if self._copied < len(self._queue):
            if self._copies is not None:
                self._copies.wait_stream(torch.cuda.current_stream())
            self._fill(self._ends[layer] + len(self._slots))

    def close(self) -> None:
        """What is queued afterwards on the current stream comes after the last copy."""
        if self._staging is not None:
            self._staging.forget()
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def rate(self) -> float:
        """Bytes per second from the first copy to the last, waits included; call it once the device is done. Needs `timed`."""
        assert self.started is not None and self.ended is not None
        return float(self.bytes_copied / max(1e-9, self.started.elapsed_time(self.ended) / 1e3))

    def _fill(self, limit: int) -> None:
        """Queue copies up to place `limit` of the queue."""
        with torch.cuda.stream(self._copies) if self._copies is not None else nullcontext():
            while self._copied < min(limit, len(self._queue)):
                layer = self._queue[self._copied][0]
                self._copy_run(layer, min(limit, self._ends[layer]))
                if self._copied == self._ends[layer] and self._copies is not None:
                    self._arrived[layer] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._arrived[layer].record(self._copies)
            if self.ended is not None and self._copied == len(self._queue):
                self.ended.record(self._copies)

    def _copy_run(self, layer: int, limit: int) -> None:
        """Copy the next expert, and with it those that follow it in main memory as well as in the pool."""
        start, size, page_bytes = self._copied, self._host.layer_bytes[layer], self._pool.geometry.expert_page_bytes
        tiles = self._host.pages.layer_pages[layer]
        first, pages = self._queue[start][1], self._slots[start % len(self._slots)][:tiles]
        count, copied = 1, size
        if not self._host.pinned[layer, first]:
            assert self._staging is not None, "an expert is not page-locked"
            self._staging.bring(layer, first, pages)
        else:
            sizes = self._host.tile_sizes(layer)
            whole = contiguous(pages, page_bytes) and (size - sum(sizes)) * WASTED <= size
            while (
                whole
                and start + count < limit
                and self._queue[start + count][1] == first + count
                and self._host.joined(layer, first + count - 1, first + count)
                and _follow(pages, self._slots[(start + count) % len(self._slots)], count * size)
            ):
                count += 1
            if count > 1:
                copied = count * size
                self._pool.bytes_of(pages[0], copied).copy_(self._host.run(layer, first, count), non_blocking=True)
            else:
                copied = copy_expert(self._pool, pages, self._host.run(layer, first, 1), sizes)
        self._copied += count
        self.bytes_copied += copied
        if self._host.pinned[layer, first]:
            self._host.bytes_read += count * size  # others are counted by whoever reads them


def _follow(first: list[int], other: list[int], distance: int) -> bool:
    """Whether both experts' pages are contiguous and lie `distance` bytes apart."""
    step = first[1] - first[0]
    return other[0] - first[0] == distance // ENTRY_BYTES and all(b - a == step for pages in (first, other) for a, b in pairwise(pages))
