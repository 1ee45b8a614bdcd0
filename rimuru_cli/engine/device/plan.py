"""Dividing a device's memory: program, dense weights, workspace, pool. The same questions as `engine.config`, other answers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rimuru_cli.engine.config import DEFAULT_STATES, EngineConfig, expert_pages, page_division, page_geometry
from rimuru_cli.engine.device.hybrid_plan import mixer_bytes, undo_bytes
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.memory.division import Division
from rimuru_cli.engine.memory.geometry import CHUNK_BYTES, GUARD_BYTES, SMALL_POOL, PageKind, PoolGeometry
from rimuru_kernels.sizes import moe_workspace_bytes, packed_linear_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.layout import dense_bytes
from rimuru_models.quantization.formats import WeightFormats

MIB = 1 << 20
MOST_OF_MEMORY = 0.85
"""Share of the free main memory that page-locked experts may take."""

# Captured graphs, kernels, library workspaces and the allocator's rounding.
_LIBRARIES = 448 * MIB
# Bytes of the next layer's experts that may arrive while a layer computes: some milliseconds, as long as a layer takes for 4096 tokens.
_AHEAD = 256 * MIB
_LEAST_CONTEXT = 512
DEVICE_SHARE = 0.92


def device_floor(num_experts: int, top_k: int, offload_limit: int | None) -> int:
    """Experts of a layer that stay resident: twice top_k, but not over half of the layer, and never under top_k.

    A step of one token needs pages for all its top_k experts in every layer; with twice as many, those of the token before may stay.
    """
    floor = min(num_experts, max(top_k, min(2 * top_k, -(-num_experts // 2))))
    return floor if offload_limit is None else max(floor, num_experts - offload_limit)


def buffer_experts(absent: int, expert_bytes: int) -> int:
    """Experts that the loading buffers of a streamed step hold: all absent ones of a layer, and as many as arrive while a layer computes.

    Args:
        absent: experts of the layer that lacks most.
    """
    return absent + min(absent, -(-_AHEAD // expert_bytes))


def least_buffer_experts(absent: int) -> int:
    """Experts that loading buffers hold where a long conversation leaves no more room: layers then wait for most of theirs."""
    return absent + min(absent, 4)


def backed_bytes(pool_bytes: int) -> int:
    """Memory that the driver has to give for a pool of so many bytes."""
    return pool_bytes if pool_bytes + GUARD_BYTES < SMALL_POOL else -(-(pool_bytes + GUARD_BYTES) // CHUNK_BYTES) * CHUNK_BYTES


class Sized(Protocol):
    """A number format, such as a torch.dtype, of which only the size of an element matters here."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...


@dataclass(frozen=True)
class DevicePlan:
    """Division of the ceiling, in bytes; see `engine.config.MemoryPlan`.

    Attributes:
        division, floor_pages: as of `MemoryPlan`; the buffers are those of a streamed step.
        kv_pages: most KV pages that there may be: with more, the loading buffers of a streamed step would not fit.
        max_batch_tokens: tokens of a step that the workspace is made for.
        longest: context in tokens that tables and workspace are made for, whatever the pool allows: the ceiling may be raised later.
        most_pool: a larger pool is of no use.
    """

    experts: ExpertPages
    geometry: PoolGeometry
    block_tokens: int
    ceiling: int
    program: int
    dense: int
    workspace: int
    pool: int
    floor: int
    division: Division
    floor_pages: int
    kv_pages: int
    context: int
    minimum: int
    max_batch_tokens: int
    longest: int
    most_pool: int


def plan_device_memory(
    model: ModelConfig,
    dtype: Sized,
    config: EngineConfig,
    *,
    program: int,
    free: int,
    max_batch_tokens: int,
    formats: WeightFormats | None = None,
) -> DevicePlan:
    """Divide the ceiling (or most of what is free).

    Args:
        dtype: of plain weights, activations and the KV cache.
        program: bytes of the device that are in use before loading.
        free: bytes that are free.
        formats: what the weights are stored as; None: plain numbers.

    Raises:
        DoesNotFitError: the ceiling is too small; says the minimum.
    """
    size = dtype.itemsize
    geometry, block_tokens = page_geometry(model, size, config, formats)
    lying = expert_pages(model, size, config, formats)
    layers, pages = len(model.moe_layers), geometry.pages_per_expert
    floor = device_floor(model.num_experts, model.top_k, config.expert_offload_limit)
    context = min(model.max_positions, config.context or model.max_positions)
    dense = dense_bytes(model, size, None if formats is None else formats.dense)
    tokens = min(max_batch_tokens, context)
    workspace = _workspace(model, size, tokens, config.max_sequences, context, block_tokens) + _LIBRARIES
    if formats is not None and formats.dense:
        workspace += packed_linear_bytes(max(model.hidden_size, model.num_heads * model.head_dim), size)
    fixed = program + dense + workspace
    per_huge = geometry.pages_per_huge(PageKind.EXPERT)
    division, kv_layers = page_division(model, geometry), len(model.attention_layers)
    base = lying.pages_of(layers * floor) + least_buffer_experts(model.num_experts - floor) * pages

    def pool_of(context: int, states: int = 1) -> int:
        kv_pages = -(-context // block_tokens) * kv_layers
        return division.huge_pages(base, kv_pages, states) * geometry.huge_page_bytes

    minimum = fixed + backed_bytes(pool_of(min(context, _LEAST_CONTEXT)))
    ceiling = config.memory_bytes
    if ceiling is None and config.pool_bytes is not None:
        ceiling = max(minimum, fixed + backed_bytes(config.pool_bytes))
    elif ceiling is None and config.resident_share is not None:
        experts = round(config.resident_share * layers * model.num_experts)
        ceiling = max(minimum, fixed + lying.pages_of(experts) * geometry.expert_page_bytes)
    elif ceiling is None:
        ceiling = program + int(DEVICE_SHARE * free)
    if ceiling < minimum:
        raise DoesNotFitError(
            f"The model needs at least {minimum / MIB:,.0f} MiB of device memory, but the ceiling is {ceiling / MIB:,.0f} MiB.",
            hint=f"Give at least --memory {-(-minimum // MIB)}MiB.",
        )
    everything = max(base, lying.pages_of(layers * model.num_experts))
    texts = pool_of(context * config.max_sequences, config.max_sequences * DEFAULT_STATES) - pool_of(0, 0)
    most = (everything // per_huge + 64) * geometry.huge_page_bytes + texts
    room = ceiling - fixed
    if room >= SMALL_POOL:
        room -= room % CHUNK_BYTES + GUARD_BYTES  # see backed_bytes
    pool = min(room // geometry.huge_page_bytes * geometry.huge_page_bytes, most)
    kv_pages = division.kv_pages(pool // geometry.huge_page_bytes, base, 1)
    return DevicePlan(
        experts=lying,
        geometry=geometry,
        block_tokens=block_tokens,
        ceiling=ceiling,
        program=program,
        dense=dense,
        workspace=workspace,
        pool=pool,
        floor=floor,
        division=division,
        floor_pages=base,
        kv_pages=kv_pages,
        context=min(context, kv_pages // kv_layers * block_tokens),
        minimum=minimum,
        max_batch_tokens=tokens,
        longest=context,
        most_pool=most,
    )


def pinned_budget(available: int) -> int:
    """Bytes of main memory to page-lock for experts, of so many that are free: what is left serves the files of the others."""
    return int(MOST_OF_MEMORY * available)


def _workspace(model: ModelConfig, size: int, tokens: int, sequences: int, context: int, block_tokens: int) -> int:
    heads = (model.num_heads * (2 if model.gated_attention else 1) + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * max(model.dense_intermediate or 0, model.shared_intermediate or 0)
    mixer = max(5 * heads * tokens * size, mixer_bytes(model, size, tokens, sequences))
    activations = tokens * size * (8 * model.hidden_size + widest) + mixer + tokens * 16 * model.num_experts
    moe = moe_workspace_bytes(tokens, model.top_k, model.num_experts, model.expert_intermediate, model.hidden_size, size)
    logits = 4 * sequences * model.vocab_size * 4
    tables = len(model.attention_layers) * sequences * (-(-context // block_tokens) + 1) * 4
    return activations + moe + logits + tables + undo_bytes(model, size, sequences)
