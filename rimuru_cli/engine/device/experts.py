"""Running MoE layers on a device: residency decided there for small steps, streamed through two buffers for large ones.

On demand (few tokens): `resolve` finds the misses of a layer and gives them the pages of worse residents, `fetch` copies them from
page-locked memory, the fused kernel reads everything where it lies. No host round trip, so a whole decode step is one graph.

Streamed (many tokens): while layer l computes, the copy engine fills the other buffer with the absent experts of layer l + 1. A buffer
holds all absent experts of a layer, so a layer is one kernel call and its result is the same bits for every placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.experts.executor import Recorder
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_kernels.expert_fetch import FetchPlan, ResolvePolicy, fetch, resolve
from rimuru_kernels.fused_moe import MoeWorkspace, paged_moe

# Steps of at most this many rows decide residency on the device.
MAX_ON_DEMAND_ROWS = 8


class NoBuffers:
    """Loading buffers are borrowed from the pool for each streamed step; between steps there are none."""

    num_pages = 0

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class StreamBuffers:
    """Pages of the two loading buffers of one streamed step: int32 [capacity, pages_per_expert] each."""

    halves: tuple[Tensor, Tensor]
    pages: list[int]


class DeviceExperts:
    """The model's `ExpertProvider` on a device.

    Attributes:
        override: if set, (ids, weights) [num_layers, T, k] that replace the routers' choice (replaying a recorded routing).
        recorder: told every layer's routing, if set (not in captured steps).
        streamed_steps: steps that went through the loading buffers.
    """

    def __init__(
        self,
        *,
        host: PinnedHost,
        residency: DeviceResidency,
        pool: PagePool,
        moe_layers: tuple[int, ...],
        top_k: int,
        max_tokens: int,
        decay: float,
        dtype: torch.dtype,
    ) -> None:
        device = pool.data.device
        self._host, self._residency, self._pool = host, residency, pool
        self._index = {layer: index for index, layer in enumerate(moe_layers)}
        self._f, self._d = residency.view.f, residency.view.d
        self._page_bytes = pool.geometry.expert_page_bytes
        self._decay = decay
        self._top_k = top_k
        self._policy = ResolvePolicy(decay=decay)
        pages = residency.pages_per_expert
        self._plan = FetchPlan.create(host.num_experts, pages, MAX_ON_DEMAND_ROWS * top_k, device)
        sizes = (top_k, host.num_experts, self._f, self._d, dtype, device)
        self._small = MoeWorkspace(MAX_ON_DEMAND_ROWS, *sizes)
        self._large = MoeWorkspace(max_tokens, *sizes)
        self._copies = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._stream: _Stream | None = None
        # The device's counters as of the last step; copied within the step, so that reading them waits for nothing.
        self._totals = torch.zeros_like(residency.tables.counters, device="cpu")
        if device.type == "cuda":
            self._totals = self._totals.pin_memory()
        self._seen_hits = 0
        self._step_rows = 0
        self.override: tuple[Tensor, Tensor] | None = None
        self.recorder: Recorder | None = None
        self.streamed_steps = 0

    @property
    def capacity(self) -> int:
        """Absent experts of the layer that has most of them: what a loading buffer must hold."""
        return self._host.num_experts - self._residency.fewest_visible

    @property
    def rows_on_demand(self) -> int:
        """Rows for which every layer surely has pages, whatever they select: all selected experts must be resident at once."""
        fewest = self._residency.fewest_visible
        if fewest == self._host.num_experts:
            return MAX_ON_DEMAND_ROWS
        return min(MAX_ON_DEMAND_ROWS, fewest // self._top_k)

    def begin_on_demand(self, num_rows: int) -> None:
        """Prepare a step whose misses are fetched by the device."""
        self._step_rows = num_rows
        self._residency.push()
        self._residency.stale = True

    def begin_streamed(self, num_rows: int, buffers: StreamBuffers | None) -> None:
        """Prepare a step over all experts; `buffers` hold the absent ones, None if there are none."""
        self._step_rows = num_rows
        self._residency.pull()
        self._residency.push()
        if buffers is not None:
            self._stream = _Stream(self._host, self._residency, self._pool, buffers, self._copies)
            self.streamed_steps += 1

    def end_step(self) -> None:
        """Finish the forward pass, also one that failed."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def forward(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, d], topk_ids [T, k] ascending in each row, topk_weights [T, k] -> [T, d], all of model layer `layer`."""
        index = self._index[layer]
        if self.override is not None:
            topk_ids, topk_weights = self.override[0][index], self.override[1][index]
        if self.recorder is not None:
            self.recorder(index, topk_ids.cpu(), topk_weights.cpu())
        state = self._residency.tables.layer(index)
        if len(x) <= MAX_ON_DEMAND_ROWS and self._stream is None:
            resolve(topk_ids, topk_weights, state, self._plan, self._policy)
            fetch(self._plan, self._pool.data, self._page_bytes)
            return paged_moe(x, topk_ids, topk_weights, self._pool.data, self._plan.entries, self._f, workspace=self._small)
        entries = state.entries if self._stream is None else self._stream.take(index)
        self._count(topk_ids, topk_weights, state.entries, state.scores, state.counters)
        out = paged_moe(x, topk_ids, topk_weights, self._pool.data, entries, self._f, workspace=self._large)
        if self._stream is not None:
            self._stream.done(index)
        return out

    @property
    def uses(self) -> int:
        """Expert selections so far."""
        return self.counts()[0]

    @property
    def hits(self) -> int:
        """Selections whose expert was resident."""
        return self.counts()[1]

    @property
    def row_hits(self) -> NDArray[np.int64]:
        """Hits of the last step, spread evenly over its rows (the device counts them per layer, not per row)."""
        before, self._seen_hits = self._seen_hits, self.hits
        share, rest = divmod(self._seen_hits - before, max(1, self._step_rows))
        return np.array([share + (row < rest) for row in range(self._step_rows)], dtype=np.int64)

    def copy_counters(self) -> None:
        """Queue the copy of the counters to the host; part of every step."""
        self._totals.copy_(self._residency.tables.counters, non_blocking=True)

    def counts(self) -> tuple[int, int]:
        """Expert selections, and those whose expert was resident, as of the last step that the host waited for."""
        return int(self._totals[:, 0].sum()), int(self._totals[:, 1].sum())

    def _count(self, ids: Tensor, weights: Tensor, entries: Tensor, scores: Tensor, counters: Tensor) -> None:
        """Scores and counters of a large step, as `resolve` keeps them for small ones."""
        tokens = len(ids)
        ages = torch.arange(tokens - 1, -1, -1, device=ids.device)
        share = weights / weights.sum(1, keepdim=True) * (self._decay ** ages.float()).unsqueeze(1)
        scores.mul_(self._decay**tokens)
        scores.index_add_(0, ids.reshape(-1), share.reshape(-1))
        counters[0] += ids.numel()
        counters[1] += (entries[:, 0] >= 0)[ids].sum()


class _Stream:
    """The absent experts of all layers on their way through two buffers."""

    def __init__(
        self, host: PinnedHost, residency: DeviceResidency, pool: PagePool, buffers: StreamBuffers, copies: torch.cuda.Stream | None
    ) -> None:
        self._host, self._residency, self._pool, self._buffers, self._copies = host, residency, pool, buffers, copies
        self._absent = [residency.absent(layer) for layer in range(host.num_layers)]
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._used: dict[int, torch.cuda.Event] = {}
        self._entries: dict[int, Tensor] = {}
        if copies is not None:
            # The buffers' pages may have been read or written by what was queued before this step.
            copies.wait_stream(torch.cuda.current_stream())
        for layer in range(min(2, host.num_layers)):
            self._fill(layer)

    def take(self, layer: int) -> Tensor:
        """Entries int32 [E, P] of a layer, its absent experts pointing into a buffer; the current stream waits for their arrival."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_event(self._arrived.pop(layer))
        return self._entries.pop(layer)

    def done(self, layer: int) -> None:
        """The layer's kernels are queued: its buffer may be filled again after them."""
        if self._copies is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
            self._used[layer] = event
        if layer + 2 < self._host.num_layers:
            self._fill(layer + 2)

    def close(self) -> None:
        """What is queued afterwards on the current stream comes after the last copy."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def _fill(self, layer: int) -> None:
        absent = self._absent[layer]
        half = self._buffers.halves[layer % 2]
        entries = self._residency.tables.entries[layer].clone()
        entries[absent.to(entries.device)] = half[: len(absent)].to(entries.device)
        self._entries[layer] = entries
        if self._copies is None:
            self._copy(layer, absent, half)
            return
        with torch.cuda.stream(self._copies):
            if layer - 2 in self._used:
                self._copies.wait_event(self._used.pop(layer - 2))
            self._copy(layer, absent, half)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._copies)
            self._arrived[layer] = event

    def _copy(self, layer: int, absent: Tensor, half: Tensor) -> None:
        """Neighbours in host memory that are neighbours in the pool too are one copy."""
        page_bytes = self._pool.geometry.expert_page_bytes
        size = self._host.expert_bytes
        ids, pages = absent.tolist(), half.tolist()
        start = 0
        while start < len(ids):
            stop = start + 1
            while stop < len(ids) and ids[stop] == ids[start] + stop - start and _follow(pages[start], pages[stop], (stop - start) * size):
                stop += 1
            if _contiguous(pages[start], page_bytes):
                target = self._pool.bytes_of(pages[start][0], (stop - start) * size)
                target.copy_(self._host.run(layer, ids[start], stop - start), non_blocking=True)
            else:
                stop = start + 1
                parts = self._host.run(layer, ids[start], 1).view(-1, page_bytes)
                for page, part in zip(pages[start], parts, strict=True):
                    self._pool.bytes_of(page, page_bytes).copy_(part, non_blocking=True)
            self._host.bytes_read += (stop - start) * size
            start = stop


def _contiguous(pages: list[int], page_bytes: int) -> bool:
    return page_bytes % ENTRY_BYTES == 0 and all(b - a == page_bytes // ENTRY_BYTES for a, b in pairwise(pages))


def _follow(first: list[int], other: list[int], distance: int) -> bool:
    """Whether both experts' pages are contiguous and lie `distance` bytes apart."""
    step = first[1] - first[0]
    return other[0] - first[0] == distance // ENTRY_BYTES and all(b - a == step for pages in (first, other) for a, b in pairwise(pages))


def borrow_buffers(pool: PagePool, capacity: int, pages_per_expert: int) -> StreamBuffers:
    """Take pages for two loading buffers of `capacity` experts; they are freed with `pool.free(buffers.pages)`.

    Raises:
        OutOfPages: if the pool has too few free pages.
    """
    pages = sorted(pool.allocate(PageKind.EXPERT, 2 * capacity * pages_per_expert))
    table = torch.tensor(pages, dtype=torch.int32).view(2, capacity, pages_per_expert)
    return StreamBuffers((table[0], table[1]), pages)
