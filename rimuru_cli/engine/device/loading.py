"""From a checkpoint to the parts of an engine on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import torch

from rimuru_cli.engine.config import EngineConfig, Progress
from rimuru_cli.engine.describe import engine_info
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
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import ExpertView, KVView
from rimuru_cli.engine.parts import Parts
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
    _fill(residency, host, report)
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
    reason = torch.cuda.get_device_name(device) if device.type == "cuda" else "reference ops"
    info = engine_info(name, shape, dtype, plan, config, device=str(device), reason=reason)
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


def _fill(residency: DeviceResidency, host: PinnedHost, report: Progress) -> None:
    wanted = residency.first_choice(spare_pages=AdjusterConstants().high_free + residency.pages_per_expert)
    for index, (layer, expert) in enumerate(wanted):
        residency.fill(layer, expert)
        report("experts", (index + 1) * host.expert_bytes, len(wanted) * host.expert_bytes)
    residency.push()
    host.bytes_read = 0
