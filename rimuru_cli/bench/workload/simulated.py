"""An engine whose model computes nothing: scheduler, pages, residents, ranking and adjuster are the real ones, only time is worked out.

`SimulatedRunner` stands where `DeviceRunner` does and takes its decisions with the same objects (`StepChoice`, `Lender`). What routers
choose comes from `SyntheticRouting`, what it costs from `CostModel`, and the clock moves by that much. Every sampled token is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.bench.workload.cost import CostModel, StepLoad
from rimuru_cli.bench.workload.driver import SimulatedClock
from rimuru_cli.bench.workload.routing import FEW, TOPICS, Drawn, SyntheticRouting
from rimuru_cli.bench.workload.simulated_memory import SimulatedHost, SimulatedLoader, SimulatedResidency
from rimuru_cli.engine.bookmarks import Bookmarks
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.describe import engine_info
from rimuru_cli.engine.device.choice import MAX_ON_DEMAND_ROWS, StepChoice
from rimuru_cli.engine.device.lending import Lender
from rimuru_cli.engine.device.link import LinkRates
from rimuru_cli.engine.device.plan import DevicePlan, plan_device_memory
from rimuru_cli.engine.device.streaming import ScratchPages
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.adjuster import AdjusterConstants
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import ConvView, ExpertView, KVView, SSMView
from rimuru_cli.engine.parts import Parts, Recurrent
from rimuru_cli.engine.room import Room
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_cli.engine.state_blocks import StateBlocks
from rimuru_cli.fit.machine import Gpu
from rimuru_cli.fit.placement import CUDA_PROGRAM_BYTES
from rimuru_cli.fit.shape import shape_of
from rimuru_models.config import ModelConfig


class SimulatedExperts(StepChoice):
    """Counts selections, and decides as `DeviceExperts` does."""

    recorder = None
    fetched_bytes = 0

    def __init__(self, **choice: Any) -> None:
        super().__init__(**choice)
        self.uses = self.hits = 0
        self.row_hits: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def count(self, rows: int, uses: int, hits: int) -> None:
        """A step of so many rows selected `uses` experts, `hits` of them resident."""
        self.uses += uses
        self.hits += hits
        self._learn(rows, uses, hits)
        self.row_hits = np.full(rows, hits // rows, dtype=np.int64)
        self.row_hits[: hits % rows] += 1

    def close(self) -> None:
        """Nothing to end."""


class SimulatedRunner:
    """Takes a step's decisions, works out its time and lets it pass."""

    def __init__(
        self,
        *,
        experts: SimulatedExperts,
        residency: SimulatedResidency,
        ranking: ExpertRanking,
        host: SimulatedHost,
        loader: SimulatedLoader,
        lender: Lender,
        routing: SyntheticRouting,
        cost: CostModel,
        clock: SimulatedClock,
        top_k: int,
        live: bool,
    ) -> None:
        self._experts, self._residency, self._ranking = experts, residency, ranking
        self._host, self._loader, self._lender = host, loader, lender
        self._routing, self._cost, self._clock = routing, cost, clock
        self._uses_per_row = host.num_layers * top_k
        self._live = live
        self._topics: dict[int, int] = {}

    def forward(self, plan: Sequence[ScheduledRows]) -> Tensor | None:
        """Zeros float32 [number of sampling rows, 1], or None if no row is sampled from."""
        counts = np.array([item.count for item in plan])
        computed = np.array([item.sequence.computed for item in plan])
        rows, sampled = int(counts.sum()), sum(item.samples for item in plan)
        visible, held = int((counts * computed + counts * (counts + 1) // 2).sum()), int(computed.sum()) + rows
        on_demand = self._experts.prefers_on_demand(rows)
        buffers = self._lender.lend(rows, on_demand=on_demand)
        drawn = self._draw(plan, rows)
        hits = self._count(drawn, rows)
        captured = on_demand and rows == len(plan) == sampled
        compute = self._cost.compute(StepLoad(rows, len(plan), visible, held, drawn.touched.sum(1), captured))
        if on_demand:
            missed = self._residency.exchange(drawn)
            busy = missed * self._cost.expert_bytes / self._cost.fetch
            seconds = self._cost.on_demand(compute, missed)
        else:
            absent = self._host.num_experts - self._residency.resident.sum(1)
            missed = int(absent.sum())
            busy = missed * self._cost.expert_bytes / self._cost.copy
            slots = 0 if buffers is None else len(buffers.slots)
            seconds = self._cost.streamed(compute, absent, slots)
        self._host.bytes_read += missed * self._host.expert_bytes
        self._experts.count(rows, rows * self._uses_per_row, hits)
        self._clock.advance(seconds)
        self._loader.use(max(0.0, seconds - busy))
        return torch.zeros(sampled, 1) if sampled else None

    def launch_ahead(self, likeliest: Tensor, arriving: Tensor) -> None:
        """Nothing can be ahead of a clock that stands still meanwhile."""

    def _draw(self, plan: Sequence[ScheduledRows], rows: int) -> Drawn:
        requests = [item.sequence.request.id for item in plan]
        topics = [self._topic(request) for request in requests]
        if rows == len(plan) <= FEW:
            return self._routing.draw_each(dict(zip(requests, topics, strict=True)))
        counts = np.bincount(topics, weights=[item.count for item in plan], minlength=TOPICS)
        return self._routing.draw_sums(counts.astype(np.float32))

    def _topic(self, request: int) -> int:
        topic = self._topics.get(request)
        if topic is None:
            topic = self._topics[request] = self._routing.topic_of(request)
        return topic

    def _count(self, drawn: Drawn, rows: int) -> int:
        """Take the step into the ranking; returns selections that found their expert resident."""
        total = float(drawn.uses.sum())
        share = float(drawn.uses[self._residency.resident].sum()) / total
        if self._live:
            self._ranking.begin_step(rows)
            self._ranking.add_counts(drawn.uses * (rows * self._host.num_layers / total), rows)
        return round(share * rows * self._uses_per_row)


def simulated_engine(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    gpu: Gpu,
    clock: SimulatedClock,
    *,
    profiled: bool = True,
    seed: int = 0,
    uniform: bool = False,
) -> Engine:
    """An engine over nothing but numbers.

    Args:
        model: its shape; weights are taken to be bfloat16, and all experts to be page-locked.
        gpu: the card whose rates decide.
        profiled: whether a hotset profile seeds the ranking.
        seed: of the routing.
        uniform: the routers choose as those of random weights do.

    Raises:
        DoesNotFitError: `config`'s ceiling is too small for the shape.
    """
    shape = shape_of(model, None)
    free = gpu.total_bytes - CUDA_PROGRAM_BYTES
    limit = config.device_batch_tokens
    plan = plan_device_memory(model, shape.computing, config, program=CUDA_PROGRAM_BYTES, free=free, max_batch_tokens=limit)
    layers, pages = len(model.moe_layers), plan.geometry.pages_per_expert
    cost = CostModel(shape, gpu)
    routing = SyntheticRouting(layers, model.num_experts, model.top_k, seed, uniform=uniform)
    ranking = ExpertRanking(layers, model.num_experts, config.decay)
    if profiled:
        ranking.seed(routing.profile)
    pool = PagePool(plan.geometry, plan.pool, "meta")
    view = ExpertView(pool, model.expert_intermediate, model.hidden_size, torch.bfloat16)
    host = SimulatedHost(layers, model.num_experts, cost.expert_bytes)
    loader = SimulatedLoader(clock, cost.expert_bytes / cost.copy)
    residency = SimulatedResidency(pool, view, host, ranking, loader, floor=plan.floor, pages_per_expert=pages)
    for layer, expert in residency.first_choice(AdjusterConstants().high_free + pages, floor_only=config.fixed_residents):
        residency.fill(layer, expert)
    host.bytes_read = 0
    scratch = ScratchPages(pool, model.num_experts, pages)
    kv_view = KVView(pool, model.num_kv_heads, model.head_dim, plan.block_tokens, torch.bfloat16)
    blocks = KVBlocks(pool, kv_view, len(model.attention_layers))
    recurrent = _recurrent(model, plan, pool, blocks, residency, scratch)
    experts = SimulatedExperts(
        num_experts=model.num_experts,
        expert_bytes=cost.expert_bytes,
        top_k=model.top_k,
        decay=config.decay,
        residency=residency,
        rates=LinkRates(cost.fetch, cost.copy),
        miss_rate=1.0 - residency.num_resident / residency.total,
    )
    runner = SimulatedRunner(
        experts=experts,
        residency=residency,
        ranking=ranking,
        host=host,
        loader=loader,
        lender=Lender(pool, residency, blocks, experts, scratch, None if recurrent is None else recurrent.room.for_experts),
        routing=routing,
        cost=cost,
        clock=clock,
        top_k=model.top_k,
        live=config.live_ranking,
    )
    parts = Parts(
        info=engine_info(name, model, torch.bfloat16, plan, config, device="simulated", reason=gpu.name),
        plan=plan,
        reader=_closing(),
        model=SimpleNamespace(config=model),
        pool=pool,
        blocks=blocks,
        host=host,  # type: ignore[arg-type]
        residency=residency,
        buffers=scratch,
        loader=loader,
        experts=experts,  # type: ignore[arg-type]
        runner=runner,  # type: ignore[arg-type]
        recurrent=recurrent,
        eos_ids=frozenset(),
        replan=lambda wish: plan_device_memory(
            model, shape.computing, wish, program=CUDA_PROGRAM_BYTES, free=0, max_batch_tokens=plan.max_batch_tokens
        ),
        link_rate=cost.copy,
        captured_rows=MAX_ON_DEMAND_ROWS,
        clock=clock.now,
    )
    return Engine(parts, config)


def _recurrent(
    model: ModelConfig, plan: DevicePlan, pool: PagePool, blocks: KVBlocks, residency: SimulatedResidency, scratch: ScratchPages
) -> Recurrent | None:
    """Who owns the states of recurrent layers, as `device.hybrid_loading` makes it; None for a model without such layers."""
    mixer, layout = model.recurrent, plan.division.states
    if mixer is None or layout is None:
        return None
    ssm, conv = SSMView(pool, mixer.state_shape), ConvView(pool, mixer.channels, mixer.conv_rows, torch.bfloat16)
    states = StateBlocks(pool, model.recurrent_layers, ssm, conv, layout)
    bookmarks = Bookmarks(states, blocks)
    return Recurrent(states, bookmarks, Room(plan.division, pool, blocks, states, bookmarks, residency, scratch, plan.floor_pages))


def _closing() -> Any:
    return SimpleNamespace(close=lambda: None)
