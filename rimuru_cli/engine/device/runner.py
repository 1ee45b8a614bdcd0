"""One forward pass on a device. Steps of one row per sequence replay a captured graph; others run kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.engine.device.experts import MAX_ON_DEMAND_ROWS, DeviceExperts, StreamBuffers, borrow_buffers
from rimuru_cli.engine.device.kv_cache import DeviceKVCache
from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_models.errors import DoesNotFitError
from rimuru_models.interfaces import CausalLM, ForwardContext


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DeviceRunner:
    """Runs the model over a plan and returns the logits that are sampled from."""

    def __init__(
        self,
        model: CausalLM,
        cache: DeviceKVCache,
        experts: DeviceExperts,
        residency: DeviceResidency,
        blocks: KVBlocks,
        pool: PagePool,
        *,
        graphs: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._experts = experts
        self._residency = residency
        self._blocks = blocks
        self._pool = pool
        self._graphs_wanted = graphs and pool.data.is_cuda
        self._graphs: dict[int, _Captured] = {}
        self._graph_pool: Any = None

    def forward(self, plan: Sequence[ScheduledRows]) -> Tensor | None:
        """Logits float32 [number of sampling rows, vocab] in the plan's order, or None if no row is sampled from."""
        order = sorted(range(len(plan)), key=lambda i: plan[i].count != 1)
        ordered = [plan[i] for i in order]
        tokens: list[int] = []
        ends: dict[int, int] = {}
        for index, rows in zip(order, ordered, strict=True):
            tokens += rows.sequence.tokens[rows.sequence.computed : rows.sequence.computed + rows.count]
            if rows.samples:
                ends[index] = len(tokens) - 1
        sampled = [ends[index] for index in sorted(ends)]
        # At least one row always fits: the floor of a layer is no less than top_k.
        passes = self._experts.rows_on_demand
        if len(tokens) > len(plan) or passes < 1:
            self._cache.begin_step(ordered, tokens)
            hidden = self._eager(len(tokens), on_demand=False)
            return self._model.logits(hidden[torch.tensor(sampled, device=hidden.device)]) if sampled else None
        # Decoding more sequences than the residents allow takes several passes; all experts of each are on the device then.
        parts = [self._decode(ordered[i : i + passes], tokens[i : i + passes]) for i in range(0, len(tokens), passes)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(sampled) < len(tokens):
            return logits[torch.tensor(sampled, device=logits.device)] if sampled else None
        return logits

    def _decode(self, plan: Sequence[ScheduledRows], tokens: list[int]) -> Tensor:
        """Logits of one row per sequence, misses fetched by the device."""
        self._cache.begin_step(plan, tokens)
        if self._graphs_wanted and self._experts.recorder is None:
            self._experts.begin_on_demand(len(tokens))
            # A copy, since the graph's own result is overwritten by the next replay.
            return self._replay(len(tokens)).clone()
        return self._model.logits(self._eager(len(tokens), on_demand=True))

    def _eager(self, rows: int, *, on_demand: bool) -> Tensor:
        buffers: StreamBuffers | None = None
        borrowed = 0
        if on_demand:
            self._experts.begin_on_demand(rows)
        else:
            buffers, borrowed = self._borrow()
            self._experts.begin_streamed(rows, buffers)
        try:
            return self._run(rows)
        finally:
            self._experts.end_step()
            if buffers is not None:
                self._pool.free(buffers.pages)
                if borrowed:
                    self._residency.expand(borrowed)

    def _borrow(self) -> tuple[StreamBuffers | None, int]:
        """Pages for the loading buffers; experts that had to make room for them come back after the step."""
        if self._experts.capacity == 0:
            return None, 0
        retired = 0
        pages = self._residency.pages_per_expert
        while True:
            capacity = self._experts.capacity
            lacking = 2 * capacity * pages - self._pool.allocator.available(PageKind.EXPERT)
            if lacking <= 0:
                return borrow_buffers(self._pool, capacity, pages), retired
            shrunk = self._residency.shrink(-(-lacking // pages))
            retired += shrunk
            # Pages of conversations that ended may lie scattered over more expert pages than they fill.
            if not shrunk and not self._blocks.evict(self._blocks.num_layers):
                raise DoesNotFitError(
                    "The pool is too fragmented to load the experts that are not resident.",
                    hint="Start anew with /clear, or give more --memory.",
                )

    def _run(self, rows: int) -> Tensor:
        cache = self._cache
        context = ForwardContext(positions=cache.positions[:rows], kv=cache, experts=self._experts, projected=cache)
        hidden = self._model.forward(cache.tokens[:rows], context)
        self._experts.copy_counters()
        return hidden

    def _replay(self, rows: int) -> Tensor:
        assert rows <= MAX_ON_DEMAND_ROWS
        captured = self._graphs.get(rows)
        if captured is None:
            captured = self._graphs[rows] = self._capture(rows)
        captured.graph.replay()
        return captured.logits

    def _capture(self, rows: int) -> _Captured:
        """Run once to compile and warm up, then capture. Both really compute; keys and values are simply stored again."""
        counted = self._residency.tables.counters.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._model.logits(self._run(rows))
        torch.cuda.current_stream().wait_stream(stream)
        self._residency.tables.counters.copy_(counted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            logits = self._model.logits(self._run(rows))
        self._graph_pool = graph.pool()
        return _Captured(graph, logits)
