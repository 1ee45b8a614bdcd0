"""From a checkpoint folder to the parts of an engine: memory plan, pool, model, resident experts."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

from rimuru_cli.engine.bookmarks import Bookmarks
from rimuru_cli.engine.ceiling import reserve_for
from rimuru_cli.engine.config import EngineConfig, MemoryPlan, Progress, plan_memory, program_bytes
from rimuru_cli.engine.describe import engine_info
from rimuru_cli.engine.device.expert_files import formats_of
from rimuru_cli.engine.experts.adjuster import AdjusterConstants
from rimuru_cli.engine.experts.executor import PooledExperts, TransferCosts
from rimuru_cli.engine.experts.host_store import HostStore
from rimuru_cli.engine.experts.hotset import load_profile
from rimuru_cli.engine.experts.packed_executor import PackedExperts
from rimuru_cli.engine.experts.packed_view import view_of
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.residency import Residency
from rimuru_cli.engine.experts.streaming import LoadingBuffers
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.quantized_kv import kv_view
from rimuru_cli.engine.memory.views import ConvView, SSMView
from rimuru_cli.engine.model_runner import ModelRunner
from rimuru_cli.engine.parts import Parts, Recurrent
from rimuru_cli.engine.room import Room
from rimuru_cli.engine.state_blocks import StateBlocks
from rimuru_cli.engine.tokenizer import config_eos_ids
from rimuru_kernels.backend import select_backend
from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_models import load_model
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.index import model_identity
from rimuru_models.readers import Reader, notices_of, open_reader


def load_parts(model_dir: Path, config: EngineConfig, progress: Progress | None) -> Parts:
    """Open the checkpoint, divide the memory, load dense weights and the best-ranked experts.

    Raises:
        CheckpointError, NotFoundError: the folder holds no usable checkpoint.
        DoesNotFitError: the memory ceiling is too small.
        UsageError: the hotset profile is not for this model.
    """
    report = progress or (lambda stage, done, total: None)
    program = program_bytes()
    reader = open_reader(model_dir)
    try:
        return _build(reader, model_dir, config, program, report)
    except BaseException:
        reader.close()
        raise


def _build(reader: Reader, model_dir: Path, config: EngineConfig, program: int, report: Progress) -> Parts:
    model_config = reader.config
    ranking = ExpertRanking(len(model_config.moe_layers), model_config.num_experts, config.decay)
    if config.profile is not None:
        num_layers, num_experts = ranking.scores.shape
        profile = load_profile(config.profile, identity=model_identity(model_dir), num_layers=num_layers, num_experts=num_experts)
        ranking.seed(profile.probabilities)
    backend = select_backend()
    why_cpu = backend.reason if backend.name == "torch" else "the CPU was asked for"
    wants_device = config.device in ("cuda", "emulated")
    if wants_device or (config.device == "auto" and backend.name == "triton"):
        from rimuru_cli.engine.device.loading import load_on_device

        emulated = config.device == "emulated"
        device = torch.device("cpu" if emulated else "cuda")
        reason = "emulated" if emulated else backend.reason
        try:
            return load_on_device(reader, model_dir, config, ranking, device, reason, report)
        except DoesNotFitError as error:
            # Who named a device or a ceiling wants to know; otherwise the CPU still can, and the banner says why it does.
            if config.device != "auto" or config.memory_bytes is not None:
                raise
            why_cpu = f"the GPU is not used: {error.what}"
    formats = formats_of(reader)
    plan = plan_memory(model_config, config, program, formats=formats)
    host = HostStore(reader, plan.experts)
    model = load_model(reader, torch.float32, lambda done, total: report("dense weights", done, total))
    reserve = reserve_for(plan, psutil.virtual_memory().total)
    pool = PagePool(plan.geometry, plan.pool, poison=config.poison, reserve_bytes=reserve)
    f, d = model_config.expert_intermediate, model_config.hidden_size
    expert_view = view_of(pool, plan.experts, torch.float32)
    layout = KVLayout(plan.block_tokens, model_config.num_kv_heads, model_config.head_dim, quantized=config.kv == "q8")
    keys_values = kv_view(pool, layout, torch.float32)
    pages_per_expert = plan.geometry.pages_per_expert
    loader = Loader()
    buffers = LoadingBuffers(pool, expert_view, capacity=plan.buffer_experts, pages_per_expert=pages_per_expert)
    layer_pages = plan.experts.layer_pages
    residency = Residency(
        pool, expert_view, host, ranking, loader, floor=plan.floor, pages_per_expert=pages_per_expert, layer_pages=layer_pages
    )
    costs = _fill(residency, host, report, floor_only=config.fixed_residents)
    kind = partial(PackedExperts, pages=plan.experts) if plan.experts.packed else PooledExperts
    experts = kind(
        host=host,
        residency=residency,
        ranking=ranking,
        buffers=buffers,
        loader=loader,
        costs=costs,
        moe_layers=model_config.moe_layers,
        top_k=model_config.top_k,
        expert_shape=(f, d),
        mode=config.moe_mode,
    )
    host.bytes_read = 0
    blocks = KVBlocks(pool, keys_values, len(model_config.attention_layers))
    recurrent = None
    states = _states(pool, model_config, plan)
    if states is not None:
        bookmarks = Bookmarks(states, blocks)
        recurrent = Recurrent(states, bookmarks, Room(plan.division, pool, blocks, states, bookmarks, residency, buffers, plan.floor_pages))
    info = engine_info(
        model_dir.resolve().name, model_config, reader.expert_dtype, plan, config, device="cpu", reason=why_cpu, formats=formats
    )
    info = replace(info, notices=(*info.notices, *notices_of(reader)))
    runner = ModelRunner(model, experts, blocks, states)
    return Parts(
        info=info,
        plan=plan,
        reader=reader,
        model=model,
        pool=pool,
        blocks=blocks,
        host=host,
        residency=residency,
        buffers=buffers,
        loader=loader,
        experts=experts,
        runner=runner,
        recurrent=recurrent,
        eos_ids=frozenset(config_eos_ids(model_dir)),
        replan=lambda wish: plan_memory(model_config, wish, program, formats=formats),
    )


def _states(pool: PagePool, model: ModelConfig, plan: MemoryPlan) -> StateBlocks | None:
    """Who takes the pages of sequences' states; None for a model without recurrent layers."""
    mixer, layout = model.recurrent, plan.division.states
    if mixer is None or layout is None:
        return None
    ssm, conv = SSMView(pool, mixer.state_shape), ConvView(pool, mixer.channels, mixer.conv_rows, torch.float32)
    return StateBlocks(pool, model.recurrent_layers, ssm, conv, layout)


def _fill(residency: Residency, host: HostStore, report: Progress, *, floor_only: bool) -> TransferCosts:
    """Load the experts to begin with, and measure the host tier on the way."""
    wanted = residency.first_choice(AdjusterConstants().high_free + residency.pages_per_expert, floor_only=floor_only)
    total = len(wanted) * host.expert_bytes
    first_reads = []
    for index, (layer, expert) in enumerate(wanted):
        started = time.perf_counter()
        residency.fill(layer, expert)
        first_reads.append(time.perf_counter() - started)
        report("experts", (index + 1) * host.expert_bytes, total)
    # The median ignores start-up effects; the second number is the same copy once the bytes are in memory.
    first_reads.sort()
    started = time.perf_counter()
    residency.refill(*wanted[0])
    return TransferCosts(first_reads[len(first_reads) // 2], time.perf_counter() - started)
