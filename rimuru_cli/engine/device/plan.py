"""Dividing a device's memory: program, dense weights, workspace, pool. The same questions as `engine.config`, other answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rimuru_cli.engine.config import EngineConfig, page_geometry
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_kernels.fused_moe import workspace_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.layout import dense_bytes

MIB = 1 << 20

# Captured graphs, kernels, library workspaces and the allocator's rounding.
_LIBRARIES = 448 * MIB
_LEAST_CONTEXT = 512
_DEFAULT_SHARE = 0.92


def device_floor(num_experts: int, top_k: int, offload_limit: int | None) -> int:
    """Experts of a layer that stay resident: twice top_k, but not over half of the layer, and never under top_k.

    A step of one token needs pages for all its top_k experts in every layer; with twice as many, those of the token before may stay.
    """
    floor = min(num_experts, max(top_k, min(2 * top_k, -(-num_experts // 2))))
    return floor if offload_limit is None else max(floor, num_experts - offload_limit)


@dataclass(frozen=True)
class DevicePlan:
    """Division of the ceiling, in bytes; see `engine.config.MemoryPlan`.

    Attributes:
        kv_pages: most KV pages that there may be: with more, the loading buffers of a streamed step would not fit.
        max_batch_tokens: tokens of a step that the workspace is made for.
    """

    geometry: PoolGeometry
    block_tokens: int
    ceiling: int
    program: int
    dense: int
    workspace: int
    pool: int
    floor: int
    kv_pages: int
    context: int
    minimum: int
    max_batch_tokens: int


def plan_device_memory(
    model: ModelConfig, dtype: torch.dtype, config: EngineConfig, *, program: int, free: int, max_batch_tokens: int
) -> DevicePlan:
    """Divide the ceiling (or most of what is free).

    Args:
        dtype: of weights, activations and the KV cache.
        program: bytes of the device that are in use before loading.
        free: bytes that are free.

    Raises:
        DoesNotFitError: the ceiling is too small; says the minimum.
    """
    size = dtype.itemsize
    geometry, block_tokens = page_geometry(model, size, config)
    layers, pages = len(model.moe_layers), geometry.pages_per_expert
    floor = device_floor(model.num_experts, model.top_k, config.expert_offload_limit)
    context = min(model.max_positions, config.context or model.max_positions)
    dense = dense_bytes(model, size)
    tokens = min(max_batch_tokens, context)
    workspace = _workspace(model, size, tokens, config.max_sequences, context, block_tokens) + _LIBRARIES
    fixed = program + dense + workspace
    per_huge = geometry.pages_per_huge(PageKind.EXPERT)
    # The loading buffers of a streamed step hold all experts of two layers that are not at their floor.
    base = (layers * floor + 2 * (model.num_experts - floor)) * pages

    def pool_of(context: int) -> int:
        kv_pages = -(-context // block_tokens) * model.num_layers
        count = base + -(-kv_pages // geometry.layout(PageKind.KV).per_parent)
        return -(-count // per_huge) * geometry.huge_page_bytes

    minimum = fixed + pool_of(min(context, _LEAST_CONTEXT))
    ceiling = config.memory_bytes
    if ceiling is None and config.pool_bytes is not None:
        ceiling = max(minimum, fixed + config.pool_bytes)
    elif ceiling is None and config.resident_share is not None:
        experts = round(config.resident_share * layers * model.num_experts)
        ceiling = max(minimum, fixed + experts * pages * geometry.expert_page_bytes)
    elif ceiling is None:
        ceiling = program + int(_DEFAULT_SHARE * free)
    if ceiling < minimum:
        raise DoesNotFitError(
            f"The model needs at least {minimum / MIB:,.0f} MiB of device memory, but the ceiling is {ceiling / MIB:,.0f} MiB.",
            hint=f"Give at least --memory {-(-minimum // MIB)}MiB.",
        )
    everything = layers * model.num_experts * pages
    most = (everything // per_huge + 64) * geometry.huge_page_bytes + pool_of(context * config.max_sequences) - pool_of(0)
    pool = min((ceiling - fixed) // geometry.huge_page_bytes * geometry.huge_page_bytes, most)
    spare = pool // geometry.huge_page_bytes * per_huge - base
    kv_pages = spare * geometry.layout(PageKind.KV).per_parent
    return DevicePlan(
        geometry=geometry,
        block_tokens=block_tokens,
        ceiling=ceiling,
        program=program,
        dense=dense,
        workspace=workspace,
        pool=pool,
        floor=floor,
        kv_pages=kv_pages,
        context=min(context, kv_pages // model.num_layers * block_tokens),
        minimum=minimum,
        max_batch_tokens=tokens,
    )


def _workspace(model: ModelConfig, size: int, tokens: int, sequences: int, context: int, block_tokens: int) -> int:
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * max(model.dense_intermediate or 0, model.shared_intermediate or 0)
    activations = tokens * size * (8 * model.hidden_size + 5 * heads + widest) + tokens * 16 * model.num_experts
    moe = workspace_bytes(tokens, model.top_k, model.num_experts, model.expert_intermediate, model.hidden_size, size)
    logits = 4 * sequences * model.vocab_size * 4
    tables = model.num_layers * sequences * (-(-context // block_tokens) + 1) * 4
    return activations + moe + logits + tables
