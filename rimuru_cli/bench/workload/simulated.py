"""An engine whose model computes nothing: scheduler, pages, residents, ranking and adjuster are the real ones, only time is worked out.

`SimulatedRunner` stands where `DeviceRunner` does and takes its decisions with the same objects (`StepChoice`, `Lender`). What routers
choose comes from `SyntheticRouting`, what it costs from `CostModel`, and the clock moves by that much. Every sampled token is 0.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rimuru_cli.bench.workload.cost import CostModel
from rimuru_cli.bench.workload.driver import SimulatedClock
from rimuru_cli.bench.workload.routing import SyntheticRouting
from rimuru_cli.bench.workload.simulated_memory import SimulatedHost, SimulatedLoader, SimulatedResidency
from rimuru_cli.bench.workload.simulated_runner import SimulatedExperts, SimulatedRunner
from rimuru_cli.engine.bookmarks import Bookmarks
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.describe import engine_info
from rimuru_cli.engine.device.choice import MAX_ON_DEMAND_ROWS
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
from rimuru_cli.engine.state_blocks import StateBlocks
from rimuru_cli.fit.machine import Gpu
from rimuru_cli.fit.placement import CUDA_PROGRAM_BYTES
from rimuru_cli.fit.shape import shape_of
from rimuru_models.config import ModelConfig


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
        repeats=runner.repeat,
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
