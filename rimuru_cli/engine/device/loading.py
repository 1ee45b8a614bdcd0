"""From a checkpoint to the parts of an engine on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import torch

from rimuru_cli.engine.ceiling import reserve_for
from rimuru_cli.engine.config import EngineConfig, Progress
from rimuru_cli.engine.describe import engine_info
from rimuru_cli.engine.device.choice import MAX_ON_DEMAND_ROWS
from rimuru_cli.engine.device.expert_files import compute_dtype, formats_of
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.hybrid_loading import recurrent_parts
from rimuru_cli.engine.device.kv_cache import DeviceKVCache
from rimuru_cli.engine.device.link import measure_link
from rimuru_cli.engine.device.pinned_host import ExpertSource, PinnedHost
from rimuru_cli.engine.device.plan import DevicePlan, pinned_budget, plan_device_memory
from rimuru_cli.engine.device.residency import DeviceResidency, DeviceTables
from rimuru_cli.engine.device.runner import DeviceRunner
from rimuru_cli.engine.device.streaming import ScratchPages
from rimuru_cli.engine.experts.adjuster import AdjusterConstants
from rimuru_cli.engine.experts.packed_view import view_of
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.quantized_kv import kv_view
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.tokenizer import config_eos_ids
from rimuru_kernels.fused_moe import GROUP_STEP
from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_models import load_model
from rimuru_models.errors import DoesNotFitError
from rimuru_models.interfaces import CausalLM
from rimuru_models.quantization.formats import WeightFormats
from rimuru_models.readers import Reader, notices_of


def load_on_device(
    reader: Reader,
    model_dir: Path,
    config: EngineConfig,
    ranking: ExpertRanking,
    device: torch.device,
    reason: str,
    report: Progress,
) -> Parts:
    """Open a checkpoint on a device; see `engine.loading.load_parts`."""
    shape, dtype, formats = reader.config, compute_dtype(reader), formats_of(reader)
    _check_formats(formats)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (psutil.virtual_memory().available, 0)
    program = total - free if device.type == "cuda" else 0
    plan = plan_device_memory(
        shape, dtype, config, program=program, free=free, max_batch_tokens=config.device_batch_tokens, formats=formats
    )
    model = load_model(reader, dtype, lambda done, total: report("dense weights", done, total), device, packed=True)
    host = PinnedHost(
        reader,
        device,
        lambda done, total: report("experts into page-locked memory", done, total),
        pages=plan.experts,
        budget=pinned_budget(psutil.virtual_memory().available) if config.pinned_bytes is None else config.pinned_bytes,
        scores=ranking.scores,
    )
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
    parts.info = replace(parts.info, backend_reason=reason, notices=(*parts.info.notices, *notices_of(reader)))
    return parts


def _check_formats(formats: WeightFormats | None) -> None:
    """Raises DoesNotFitError where kernels cannot read some packed matrices."""
    if formats is None:
        return
    kept = [*formats.dense.values(), *(fmt for layer in formats.experts.values() if layer is not None for fmt in layer)]
    odd = next((fmt.group for fmt in kept if fmt.group % GROUP_STEP), None)
    if odd is not None:
        raise DoesNotFitError(
            f"Weights of this checkpoint share their scales in groups of {odd}; on a GPU such groups are multiples of {GROUP_STEP}.",
            hint="Without a ceiling for the GPU (--vram) it is computed on the CPU.",
        )


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
    dtype, formats = compute_dtype(source), formats_of(source)
    reserve = reserve_for(plan, _device_bytes(device))
    try:
        pool = PagePool(plan.geometry, plan.pool, device, poison=config.poison, reserve_bytes=reserve)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DoesNotFitError(
            f"The device gives no {plan.pool / 2**20:,.0f} MiB of memory for experts and conversation ({str(error).splitlines()[0]}).",
            hint="Close other programs that use the GPU, or give less --memory.",
        ) from error
    view = view_of(pool, plan.experts, dtype)
    layout = KVLayout(plan.block_tokens, shape.num_kv_heads, shape.head_dim, quantized=config.kv == "q8")
    pages = plan.geometry.pages_per_expert
    loader = Loader()
    tables = DeviceTables(host, ranking, pages, device)
    layer_pages = plan.experts.layer_pages
    residency = DeviceResidency(
        pool, view, host, ranking, loader, tables, floor=plan.floor, pages_per_expert=pages, layer_pages=layer_pages
    )
    rates = measure_link(pool, host, pages)
    _fill(residency, host, report, floor_only=config.fixed_residents)
    scratch = ScratchPages(pool, host.num_experts, pages)
    blocks = KVBlocks(pool, kv_view(pool, layout, dtype), len(shape.attention_layers))
    cache = DeviceKVCache(
        blocks,
        pool.data,
        layout,
        attention_layers=shape.attention_layers,
        max_sequences=config.max_sequences,
        max_tokens=plan.max_batch_tokens,
        context=plan.longest,
    )
    experts = DeviceExperts(
        host=host,
        residency=residency,
        pool=pool,
        scratch=scratch,
        moe_layers=shape.moe_layers,
        top_k=shape.top_k,
        max_tokens=plan.max_batch_tokens,
        decay=config.decay,
        dtype=dtype,
        rates=rates,
        prediction=bool(config.prediction),
        live=config.live_ranking,
    )
    recurrent, states = recurrent_parts(shape, plan, pool, blocks, residency, scratch, dtype, max_sequences=config.max_sequences)
    free_up = None if recurrent is None else recurrent.room.for_experts
    runner = DeviceRunner(model, cache, experts, residency, blocks, pool, scratch, graphs=graphs, states=states, free_up=free_up)
    reason = torch.cuda.get_device_name(device) if device.type == "cuda" else "reference ops"
    info = engine_info(name, shape, dtype, plan, config, device=str(device), reason=reason, formats=formats)
    info = replace(info, pinned_bytes=host.pinned_bytes, mapped_bytes=host.mapped_bytes, notices=(*info.notices, *host.notices))
    return Parts(
        info=info,
        plan=plan,
        reader=source,
        model=model,
        pool=pool,
        blocks=blocks,
        host=host,
        residency=residency,
        buffers=scratch,
        loader=loader,
        experts=experts,
        runner=runner,
        recurrent=recurrent,
        eos_ids=eos_ids,
        link_rate=rates.copy,
        captured_rows=MAX_ON_DEMAND_ROWS if graphs and device.type == "cuda" else None,
        replan=lambda wish: plan_device_memory(
            shape, dtype, wish, program=plan.program, free=0, max_batch_tokens=plan.max_batch_tokens, formats=formats
        ),
    )


def _device_bytes(device: torch.device) -> int:
    """Memory of the device in all."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else int(psutil.virtual_memory().total)


def _fill(residency: DeviceResidency, host: PinnedHost, report: Progress, *, floor_only: bool) -> None:
    wanted = residency.first_choice(AdjusterConstants().high_free + residency.pages_per_expert, floor_only=floor_only)
    for index, (layer, expert) in enumerate(wanted):
        residency.fill(layer, expert)
        report("experts", (index + 1) * host.expert_bytes, len(wanted) * host.expert_bytes)
    residency.push()
    host.bytes_read = 0
