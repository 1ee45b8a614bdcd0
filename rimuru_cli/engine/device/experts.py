"""Running MoE layers on a device: residency decided there for small steps, streamed through buffers for large ones.

On demand: `route` (or `resolve`) finds the misses of a layer and gives them the pages of worse residents, and the fused kernel copies them
from page-locked memory and reads everything where it lies. No host round trip, so a whole decode step is one graph.

Streamed: while a layer computes, the copy engine brings the absent experts of the layers behind it into buffers (`streaming.py`).

Either way the same kernels compute on the same values, chosen by the number of rows alone: results are the same bits for every placement.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.engine.device.choice import StepChoice
from rimuru_cli.engine.device.link import LinkRates
from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_cli.engine.device.prediction import Prediction
from rimuru_cli.engine.device.replay import ReplayedRouting
from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.device.staging import HostService, Staging
from rimuru_cli.engine.device.streaming import ExpertStream, ScratchPages, StreamBuffers
from rimuru_cli.engine.experts.executor import Recorder
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_kernels.expert_fetch import FetchPlan, LayerResidency, ResolvePolicy, count, resolve, route
from rimuru_kernels.fused_moe import MoeWorkspace, paged_moe
from rimuru_kernels.rms_norm import add_rms_norm
from rimuru_kernels.topk_gating import topk_gating
from rimuru_models.moe import router_logits

ROUTED_ROWS = 8
"""Up to this many rows, norm, router, gating and decisions are one launch; every program of it norms every row, which more would feel."""


class DeviceExperts(StepChoice):
    """The model's `ExpertProvider` and `RoutedExperts` on a device.

    Attributes:
        override: if set, a recorded routing that replaces the routers' choice.
        recorder: told every layer's routing, if set (not in captured steps).
        on_demand: whether the last step decided residency on the device.
        streamed_steps: steps that went through the loading buffers.
        timed: measure the streamed copies; their rate is `stream_rate`.
    """

    def __init__(
        self,
        *,
        host: PinnedHost,
        residency: DeviceResidency,
        pool: PagePool,
        scratch: ScratchPages,
        moe_layers: tuple[int, ...],
        top_k: int,
        max_tokens: int,
        decay: float,
        dtype: torch.dtype,
        rates: LinkRates,
        live: bool = True,
        prediction: bool = False,
    ) -> None:
        super().__init__(
            num_experts=host.num_experts,
            expert_bytes=host.expert_bytes,
            top_k=top_k,
            decay=decay,
            residency=residency,
            rates=rates,
            miss_rate=1.0 - residency.num_resident / residency.total,
            served=bool(host.mapped_bytes),
        )
        device = pool.data.device
        self._host, self._residency, self._pool = host, residency, pool
        self._index = {layer: index for index, layer in enumerate(moe_layers)}
        self._pages = host.pages
        self._f = host.pages.f
        # Plain experts need no tiles: all columns of a table are theirs.
        self._tiles = list(host.pages.layer_tiles) if any(host.pages.layers) else [None] * len(host.pages.layers)
        self._policy = ResolvePolicy(decay=decay)
        experts, pages = host.num_experts, residency.pages_per_expert
        # The ranking that every step begins with, where what routers choose is not to count.
        self._lasting = None if live else residency.tables.scores.clone()
        self._plan = FetchPlan.create(experts, pages, experts, device, scratch.rows)
        # Small steps that are streamed route through the same kernel as others: tables in which nothing is missing take its decisions.
        self._idle_plan = FetchPlan.create(experts, pages, experts, device)
        everything = torch.arange(experts, dtype=torch.int32, device=device).unsqueeze(1).repeat(1, pages)
        self._idle_state = LayerResidency(
            entries=everything,
            scores=torch.zeros(experts, device=device),
            host=torch.zeros(experts, dtype=torch.int64, device=device),
            counters=torch.zeros_like(residency.tables.counters[0]),
        )
        self._workspace = MoeWorkspace(max_tokens, top_k, experts, self._f, host.pages.d, dtype, device)
        self._copies = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._stream: ExpertStream | None = None
        self._last_stream: ExpertStream | None = None
        self.on_demand = True
        # The device's counters as of the last step that the host waited for, and where the next step's go.
        totals = [torch.zeros_like(residency.tables.counters, device="cpu") for _ in range(2)]
        self._totals, self._next_totals = [t.pin_memory() for t in totals] if device.type == "cuda" else totals
        self._seen_uses, self._seen_hits = 0, 0
        self._step_rows = 0
        self.override: ReplayedRouting | None = None
        self.recorder: Recorder | None = None
        self.streamed_steps = 0
        self.timed = False
        self._service = HostService(host, pool, residency.tables) if host.mapped_bytes else None
        # A step that lacked an expert is undone, which knows nothing of guesses.
        guesses = prediction and self._service is None
        self._prediction = Prediction(residency, pool, host.num_layers, experts, self._policy) if guesses else None

    @property
    def needs_service(self) -> bool:
        """Whether there are experts that the device cannot read, which the host may have to bring."""
        return self._service is not None

    def lacked(self) -> bool:
        """Whether the step that was just queued lacked an expert, so that it has to be computed again, served by the host; waits for it
        where that is possible at all."""
        if self._service is None:
            return False
        if self._copies is not None:
            torch.cuda.current_stream().synchronize()
        return bool(self._totals[:, 3].any())

    def begin_on_demand(self, num_rows: int, *, serving: bool = False) -> None:
        """Prepare a step whose misses are fetched by the device; `serving`: those that it cannot read are brought by the host."""
        if self._service is not None:
            self._service.serving = serving
        self._step_rows = num_rows
        self.on_demand = True
        self._forget_choices()
        self._residency.push()
        self._residency.stale = True

    def begin_streamed(self, num_rows: int, buffers: StreamBuffers | None) -> None:
        """Prepare a step over all experts; `buffers` hold the absent ones, None if there are none."""
        self._step_rows = num_rows
        self.on_demand = False
        self._forget_choices()
        if self._residency.stale:  # the ranking is not needed here, and waiting for it would keep the device waiting as well
            self._residency.pull()
        self._residency.push()
        self._residency.counted = True
        if buffers is not None:
            self._stream = ExpertStream(
                self._host, self._residency, self._pool, buffers, self._copies, staging=self._staging, timed=self.timed
            )
            self.streamed_steps += 1

    def _forget_choices(self) -> None:
        if self._lasting is not None:
            self._residency.tables.scores.copy_(self._lasting)

    def end_step(self) -> None:
        """Finish the forward pass, also one that failed."""
        if self._service is not None:
            self._service.end()
        if self._stream is not None:
            self._stream.close()
            self._last_stream, self._stream = self._stream, None

    @property
    def stream_rate(self) -> float | None:
        """Bytes per second of the last streamed step's copies, if `timed`; the device must be done with it."""
        stream = self._last_stream
        return None if stream is None or stream.ended is None else stream.rate()

    def forward(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, d], topk_ids [T, k] ascending in each row, topk_weights [T, k] -> [T, d], all of model layer `layer`."""
        index = self._index[layer]
        if self.override is not None:
            topk_ids, topk_weights = self.override.layer(index)
        return self._compute(index, x, topk_ids, topk_weights, resolved=False)

    def forward_routed(
        self, layer: int, x: Tensor, residual: Tensor, *, norm: Tensor, eps: float, router: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RoutedExperts`."""
        index = self._index[layer]
        given = None if self.override is None else self.override.layer(index)
        if self._prediction is not None:
            self._prediction.learn(index, router, norm)
        if len(x) > ROUTED_ROWS:
            hidden, normed = add_rms_norm(x, residual, norm, eps)
            weights, ids = topk_gating(router_logits(normed, router), top_k, renormalize)
            ids, weights = (ids, weights) if given is None else given
            return hidden, normed, self._compute(index, normed, ids, weights, resolved=False)
        decide = self.on_demand and not self._serving
        if self._prediction is not None:
            self._prediction.before_decisions()
        state, plan = (self._residency.tables.layer(index), self._plan) if decide else (self._idle_state, self._idle_plan)
        hidden, normed, weights, ids = route(x, residual, norm, eps, router, top_k, renormalize, state, plan, self._policy, given=given)
        if self._prediction is not None:
            self._prediction.before_copies()
        out = self._compute(index, normed, ids, weights, resolved=decide)
        if self._prediction is not None and decide and len(x) == 1:
            self._prediction.guess(index, normed, top_k)
        return hidden, normed, out

    def _compute(self, index: int, x: Tensor, ids: Tensor, weights: Tensor, *, resolved: bool) -> Tensor:
        """Layer `index` of the MoE layers; `resolved`: `self._plan` holds the decisions for this routing."""
        if self.recorder is not None:
            self.recorder(index, ids.cpu(), weights.cpu())
        state = self._residency.tables.layer(index)
        if self.on_demand:
            brought = self._service.bring(index, ids) if self._serving and self._service is not None else None
            if not resolved:
                resolve(ids, weights, state, self._plan, self._policy)
            if brought is not None:
                state.counters[1] -= brought.sum().to(state.counters.device)  # the device took them for residents
            pool, entries = self._pool.data, self._plan.entries
            return self._products(index, x, ids, weights, pool, entries, arriving=self._plan)
        entries = state.entries if self._stream is None else self._stream.take(index)
        count(ids, weights, state, self._policy)
        out = self._products(index, x, ids, weights, self._pool.data, entries)
        if self._stream is not None:
            self._stream.done(index)
        return out

    def _products(
        self, index: int, x: Tensor, ids: Tensor, weights: Tensor, pool: Tensor, entries: Tensor, arriving: FetchPlan | None = None
    ) -> Tensor:
        pages = self._pages
        return paged_moe(
            x,
            ids,
            weights,
            pool,
            entries,
            self._f,
            workspace=self._workspace,
            arriving=arriving,
            formats=pages.layers[index],
            arriving_bytes=pages.page_bytes,
            tiles=self._tiles[index],
        )

    @property
    def uses(self) -> int:
        """Expert selections so far."""
        return self.counts()[0]

    @property
    def hits(self) -> int:
        """Selections whose expert was resident."""
        return self.counts()[1]

    @property
    def _serving(self) -> bool:
        """Whether the host looks after every layer of this step."""
        return self._service is not None and self._service.serving and self.on_demand

    @property
    def _staging(self) -> Staging | None:
        return None if self._service is None else self._service.staging

    def close(self) -> None:
        """End what helps along."""
        if self._service is not None:
            self._service.close()

    @property
    def row_hits(self) -> NDArray[np.int64]:
        """Hits of the last step, spread evenly over its rows (the device counts them per layer, not per row)."""
        (uses, hits), rows = self.counts(), max(1, self._step_rows)
        new_uses, new_hits = uses - self._seen_uses, hits - self._seen_hits
        self._seen_uses, self._seen_hits = uses, hits
        self._learn(self._step_rows, new_uses, new_hits)
        share, rest = divmod(new_hits, rows)
        return np.array([share + (row < rest) for row in range(self._step_rows)], dtype=np.int64)

    def send_counters(self) -> None:
        """Queue the copy of the counters to the host, behind a step; `take_counters` makes them the ones that are reported."""
        self._next_totals.copy_(self._residency.tables.counters, non_blocking=True)

    def take_counters(self) -> None:
        """Report what was sent last. They have arrived once the host has waited for anything queued behind them."""
        self._totals, self._next_totals = self._next_totals, self._totals

    @property
    def warm_ups(self) -> int:
        """Forward passes after which every kernel of a decode step has run: guesses need routers that the first one gets to know."""
        return 1 if self._prediction is None else 2

    def begin_forward(self) -> None:
        """The first thing of every forward pass, captured or not."""
        if self._prediction is not None:
            self._prediction.begin_forward()
        if self.override is not None:
            self.override.advance()

    def marks(self) -> list[tuple[Tensor, Tensor]]:
        """What a forward pass counts up, each with a copy, to `rewind` to if it turns out not to be wanted."""
        return [(t, t.clone()) for t in self._counting()]

    def rewind(self, marks: list[tuple[Tensor, Tensor]]) -> None:
        """Queue that nothing was counted since `marks`; which experts are resident may differ, which no result depends on."""
        for counting, mark in marks:
            counting.copy_(mark)

    def _counting(self) -> list[Tensor]:
        tables = self._residency.tables
        return [tables.counters, tables.scores, *([] if self.override is None else [self.override.at])]

    def counts(self) -> tuple[int, int]:
        """Expert selections, and those whose expert was resident, as of the last step that the host waited for."""
        assert not self._totals[:, 3].any(), "an expert had no place in the pool"
        return int(self._totals[:, 0].sum()), int(self._totals[:, 1].sum())

    @property
    def layer_counts(self) -> NDArray[np.int64]:
        """int64 [num_moe_layers, 2], as of `PooledExperts.layer_counts`; of the last step that the host waited for."""
        counts: NDArray[np.int64] = self._totals[:, :2].numpy()
        return counts

    @property
    def fetched(self) -> int:
        """Experts that the device itself copied so far."""
        return int(self._totals[:, 2].sum())

    @property
    def fetched_bytes(self) -> int:
        """Their bytes."""
        return int((self._totals[:, 2] * torch.tensor(self._host.layer_bytes)).sum())
