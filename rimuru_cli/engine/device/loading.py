"""From a checkpoint to the parts of an engine on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import torch

from rimuru_cli.engine.config import EngineConfig, Progress
from rimuru_cli.engine.device.experts import DeviceExperts, NoBuffers
from rimuru_cli.engine.device.kv_cache import DeviceKVCache
from rimuru_cli.engine.device.pinned_host import ExpertSource, PinnedHost
from rimuru_cli.engine.device.plan import DevicePlan, plan_device_memory
from rimuru_cli.engine.device.residency import DeviceResidency, DeviceTables
from rimuru_cli.engine.device.runner import DeviceRunner
from rimuru_cli.engine.experts.adjuster import AdjusterConstants
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.limits import context_notices, context_reason
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import ExpertView, KVView
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.stats import EngineInfo
from rimuru_cli.engine.tokenizer import config_eos_ids
from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_models import load_model
from rimuru_models.errors import DoesNotFitError
from rimuru_models.interfaces import CausalLM
from rimuru_models.layout import expert_bytes
from rimuru_models.weights import CheckpointReader

MOST_OF_MEMORY = 0.85
"""Share of the free main memory that page-locked experts may take."""


def load_on_device(
    reader: CheckpointReader,
    model_dir: Path,
    config: EngineConfig,
    ranking: ExpertRanking,
    device: torch.device,
    reason: str,
    report: Progress,
) -> Parts:
    """Open a checkpoint on a device; see `engine.loading.load_parts`."""
    shape, dtype = reader.config, reader.expert_dtype
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (psutil.virtual_memory().available, 0)
    program = total - free if device.type == "cuda" else 0
    plan = plan_device_memory(shape, dtype, config, program=program, free=free, max_batch_tokens=config.device_batch_tokens)
    experts, memory = len(shape.moe_layers) * shape.num_experts * expert_bytes(shape, dtype.itemsize), psutil.virtual_memory().available
    if experts > MOST_OF_MEMORY * memory:
        raise DoesNotFitError(
            f"All experts ({experts / 2**30:.1f} GiB) have to be page-locked in main memory, and {memory / 2**30:.1f} GiB of it are free.",
            hint="Close other programs, or choose a smaller model.",
        )
    model = load_model(reader, dtype, lambda done, total: report("dense weights", done, total), device)
    host = PinnedHost(reader, device, lambda done, total: report("experts into page-locked memory", done, total))
    parts = build_device_parts(
        reader,
        host,
        model,
        ranking,
        config,
        plan,
        device,
        report,
        name=model_dir.resolve().name,
        eos_ids=frozenset(config_eos_ids(model_dir)),
    )
    parts.info = replace(parts.info, backend_reason=reason)
    return parts


def build_device_parts(
    source: ExpertSource,
    host: PinnedHost,
    model: CausalLM,
    ranking: ExpertRanking,
    config: EngineConfig,
    plan: DevicePlan,
    device: torch.device,
    report: Progress,
    *,
    name: str,
    eos_ids: frozenset[int] = frozenset(),
    graphs: bool = True,
) -> Parts:
    """Make the pool, fill it with the best-ranked experts, and put the parts together."""
    shape = model.config
    dtype = source.expert_dtype
    pool = PagePool(plan.geometry, plan.pool, device, poison=config.poison)
    view = ExpertView(pool, shape.expert_intermediate, shape.hidden_size, dtype)
    kv_view = KVView(pool, shape.num_kv_heads, shape.head_dim, plan.block_tokens, dtype)
    pages = plan.geometry.pages_per_expert
    loader = Loader()
    tables = DeviceTables(host, ranking, pages, device)
    residency = DeviceResidency(pool, view, host, ranking, loader, tables, floor=plan.floor, pages_per_expert=pages)
    _fill(residency, pool, ranking, host, report)
    blocks = KVBlocks(pool, kv_view, shape.num_layers)
    layout = KVLayout(plan.block_tokens, shape.num_kv_heads, shape.head_dim)
    cache = DeviceKVCache(
        blocks, pool.data, layout, max_sequences=config.max_sequences, max_tokens=plan.max_batch_tokens, context=plan.context
    )
    experts = DeviceExperts(
        host=host,
        residency=residency,
        pool=pool,
        moe_layers=shape.moe_layers,
        top_k=shape.top_k,
        max_tokens=plan.max_batch_tokens,
        decay=config.decay,
        dtype=dtype,
    )
    runner = DeviceRunner(model, cache, experts, residency, blocks, pool, graphs=graphs)
    info = EngineInfo(
        model=name,
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        num_moe_layers=host.num_layers,
        num_experts=host.num_experts,
        top_k=shape.top_k,
        context_limit=plan.context,
        model_context=shape.max_positions,
        context_reason=context_reason(plan.context, config, shape.max_positions),
        notices=context_notices(plan.context, config, shape.max_positions),
        device=str(device),
        backend_reason=torch.cuda.get_device_name(device) if device.type == "cuda" else "reference ops",
        weight_dtype={torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype],
        memory_bytes=plan.ceiling,
        pool_bytes=plan.pool,
        dense_bytes=plan.dense,
        workspace_bytes=plan.workspace,
        page_bytes=plan.geometry.expert_page_bytes,
        expert_bytes=host.expert_bytes,
        block_tokens=plan.block_tokens,
        profile=str(config.profile) if config.profile is not None else None,
    )
    return Parts(
        info=info,
        plan=plan,
        reader=source,
        model=model,
        pool=pool,
        blocks=blocks,
        host=host,
        residency=residency,
        buffers=NoBuffers(),
        loader=loader,
        experts=experts,
        runner=runner,
        eos_ids=eos_ids,
    )


def _fill(residency: DeviceResidency, pool: PagePool, ranking: ExpertRanking, host: PinnedHost, report: Progress) -> None:
    wanted = [(layer, expert) for layer in range(host.num_layers) for expert in ranking.order(layer)[: residency.floor]]
    pages = residency.pages_per_expert
    spare = AdjusterConstants().high_free + pages
    room = max(0, pool.allocator.available(PageKind.EXPERT) - len(wanted) * pages - spare) // pages
    chosen = set(wanted)
    wanted += [pair for pair in residency.ranked_absent() if pair not in chosen][:room]
    for index, (layer, expert) in enumerate(wanted):
        residency.fill(layer, expert)
        report("experts", (index + 1) * host.expert_bytes, len(wanted) * host.expert_bytes)
    residency.push()
    host.bytes_read = 0
