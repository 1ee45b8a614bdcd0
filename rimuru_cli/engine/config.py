"""What the engine is told, and how it divides the memory it was given. No torch: `rimuru fit` asks the same before a download."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import psutil

from rimuru_cli.engine.admission import AdmissionPolicy, paced
from rimuru_cli.engine.experts.adjuster import AdjusterConstants, AdjusterPolicy, decide
from rimuru_cli.engine.experts.defaults import DEFAULT_DECAY
from rimuru_cli.engine.experts.pages import ExpertPages, block_bytes
from rimuru_cli.engine.memory.division import Division
from rimuru_cli.engine.memory.geometry import MAX_KV_TAIL, MAX_PAGE_BYTES, PoolGeometry, choose_block_tokens
from rimuru_cli.engine.memory.state_layout import StateLayout
from rimuru_kernels.sizes import MAX_SCORES, kv_token_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError, UsageError
from rimuru_models.layout import dense_bytes
from rimuru_models.quantization.formats import WeightFormats

if TYPE_CHECKING:
    from rimuru_cli.engine.experts.executor import MoeMode

MIB = 1 << 20

# A loading buffer holds this many experts or this many bytes, whichever is less (but at least one expert).
_BUFFER_EXPERTS = 8
_BUFFER_BYTES = 64 * MIB
# Context that must fit beside the experts' floor, and context that the default size makes room for, in tokens.
_LEAST_CONTEXT = 512
_DEFAULT_CONTEXT = 8192
DEFAULT_STATES = 5
"""Sequences' states that the default size makes room for: one that runs, and those that are kept to resume from."""
_TAIL_OF_CUT_PAGES = Fraction(4, 100)
# Share of the free memory of the machine that is taken when no ceiling is given.
DEFAULT_SHARE = 0.7

Progress = Callable[[str, int, int], None]
Device = Literal["auto", "cpu", "cuda", "emulated"]
KVPrecision = Literal["auto", "q8"]


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model.

    Attributes:
        memory_bytes: ceiling for the whole process in bytes (program, dense weights, workspace, pool); None: as the model wants and
            the machine has.
        resident_share: size the pool so that about this share of all experts is resident at the start; only without `memory_bytes`.
        pool_bytes: size the pool itself, at least the smallest that works; only without `memory_bytes`.
        context: longest context in tokens; None: the model's own.
        block_tokens: upper bound for the tokens of a KV page; the geometry may choose fewer.
        max_batch_tokens: most tokens computed in one step (prefill chunk) on the CPU; `device_batch_tokens`: on a device, where a step
            streams all absent experts and so should be worth it.
        max_sequences: most sequences that run at once.
        moe_mode: how missing experts are reached in steps of several tokens; "auto" decides by measured cost.
        expert_offload_limit: most absent experts per layer (EOL); None: only the floor counts.
        fixed_residents: every layer keeps just its floor of experts, whatever is free; with `experts.adjuster.hold` nothing ever moves.
        decay: of the live ranking, per token.
        prediction: guess the next layer's experts and bring the likeliest early, on a device, one sequence at a time; None: as measured,
            which is off so far (docs/results says why).
        live_ranking: whether what routers choose counts; otherwise the profile alone ranks experts (where a device computes).
        profile: hotset profile that seeds the ranking; None: none.
        adjuster: decides when pages change hands.
        admission: decides whether a sequence is worth the experts that leave for it; `admission.eager` is the paper's way.
        max_page_bytes: projections larger than this are tiled.
        poison: fill the pool with NaN bytes first, so that reading what was never written shows.
        kv: what keys and values are stored as: "auto", what the device computes in; "q8", 8-bit codes with a scale a head and token.
        pinned_bytes: most main memory to page-lock for experts where a device computes; None: as much as is free and the driver allows.
        device: where to compute; "auto" takes a GPU if there is a usable one. "emulated" is the way of a GPU on the CPU, for tests.
    """

    memory_bytes: int | None = None
    resident_share: float | None = None
    pool_bytes: int | None = None
    context: int | None = None
    block_tokens: int = 16
    max_batch_tokens: int = 512
    device_batch_tokens: int = 4096
    max_sequences: int = 8
    moe_mode: MoeMode = "auto"
    expert_offload_limit: int | None = None
    fixed_residents: bool = False
    decay: float = DEFAULT_DECAY
    prediction: bool | None = None
    live_ranking: bool = True
    profile: Path | None = None
    adjuster: AdjusterPolicy = decide
    admission: AdmissionPolicy = paced
    max_page_bytes: int = MAX_PAGE_BYTES
    poison: bool = False
    kv: KVPrecision = "auto"
    pinned_bytes: int | None = None
    device: Device = "auto"

    def __post_init__(self) -> None:
        least = {
            "context": 1,
            "block_tokens": 1,
            "max_batch_tokens": 1,
            "device_batch_tokens": 1,
            "max_sequences": 1,
            "expert_offload_limit": 0,
            "max_page_bytes": 1,
            "pinned_bytes": 0,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name} must be at least {low}, not {value}.")
        if self.resident_share is not None and not 0.0 <= self.resident_share <= 1.0:
            raise UsageError(f"resident_share must lie between 0 and 1, not {self.resident_share:g}.")
        if self.kv not in get_args(KVPrecision):
            raise UsageError(f"kv must be one of {', '.join(get_args(KVPrecision))}, not {self.kv}.")
        if not 0.0 < self.decay < 1.0:
            raise UsageError(f"decay must lie between 0 and 1, not {self.decay:g}.")


@dataclass(frozen=True)
class MemoryPlan:
    """Division of the ceiling, in bytes; decided before anything is allocated.

    Attributes:
        experts: how experts lie in pages.
        program: the process as it was before loading.
        floor: experts of each MoE layer that are never retired.
        buffer_experts: experts that each of the two loading buffers holds.
        division: sums over the page sizes; in a model with recurrent layers it knows the states of a sequence.
        floor_pages: expert pages of the floor of all layers and of the loading buffers.
        kv_pages: most KV pages that there may be, with experts at their floor and the states of one sequence.
        context: longest context in tokens that model, settings and pool allow.
        minimum: least ceiling with which this model runs; `least_pool` is the pool in it, `full_pool` one that holds every expert
            and a long chat; `most_pool` one beyond which more is of no use.
        max_batch_tokens: most tokens of a step.
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
    buffer_experts: int
    division: Division
    floor_pages: int
    kv_pages: int
    context: int
    minimum: int
    least_pool: int
    full_pool: int
    most_pool: int
    max_batch_tokens: int


def program_bytes() -> int:
    """Private memory of this process right now: resident bytes that are not shared with files."""
    info = psutil.Process().memory_info()
    return int(getattr(info, "private", 0) or info.rss - getattr(info, "shared", 0))


def device_memory_bytes() -> int:
    """Memory of the device that "auto" computes on: the GPU's, or main memory."""
    # Imported here: dividing memory needs no torch, asking a GPU does.
    import torch

    from rimuru_kernels.backend import select_backend

    if select_backend().name == "triton":
        return int(torch.cuda.mem_get_info()[1])
    return int(psutil.virtual_memory().total)


def expert_floor(num_experts: int, top_k: int, offload_limit: int | None) -> int:
    """Experts of a layer that stay resident: min(2 * top_k, ceil(E / 8)), or more if `offload_limit` bounds the absent ones.

    Twice top_k lets a token's experts stay while the next token's arrive. The second term is for models that use most of their experts at
    every token: for them the first would make nearly everything resident and leave nothing to hand to a growing chat.
    """
    floor = min(2 * top_k, -(-num_experts // 8))
    return floor if offload_limit is None else max(floor, num_experts - offload_limit)


def page_geometry(
    model: ModelConfig, itemsize: int, config: EngineConfig, formats: WeightFormats | None = None, *, cpu: bool = False
) -> tuple[PoolGeometry, int]:
    """Page sizes of a pool whose cache, convolution states and plain experts have `itemsize` bytes a number, and the tokens of a KV page.

    Args:
        formats: of the weights; None: all experts are plain.
        cpu: see `ExpertPages`.
    """
    experts = expert_pages(model, itemsize, config, formats, cpu=cpu)
    page_bytes = experts.page_bytes
    token_bytes = kv_bytes(model, itemsize, config)
    state = model.recurrent.state_bytes if model.recurrent is not None else None
    # Pages that were cut so that experts waste least suit the cache less: blocks of few tokens would cost more than these tails.
    tail = MAX_KV_TAIL if experts.alike else _TAIL_OF_CUT_PAGES
    block_tokens = choose_block_tokens(token_bytes, page_bytes, state, requested=config.block_tokens, max_tail=tail)
    geometry = PoolGeometry.from_bytes(
        page_bytes,
        block_tokens * token_bytes,
        state,
        model.recurrent.conv_row_bytes(itemsize) if model.recurrent is not None else None,
        experts.tiles,
        experts.pages_per_expert if experts.pages_per_expert != 3 * experts.tiles else None,
    )
    return geometry, block_tokens


def kv_bytes(model: ModelConfig, itemsize: int, config: EngineConfig) -> int:
    """Bytes that keys and values of one token take in one layer, with `itemsize` bytes an element where they are not 8-bit codes."""
    return kv_token_bytes(model.num_kv_heads, model.head_dim, itemsize, quantized=config.kv == "q8")


def expert_pages(
    model: ModelConfig, itemsize: int, config: EngineConfig, formats: WeightFormats | None, *, cpu: bool = False
) -> ExpertPages:
    """How experts lie in pages, plain ones with `itemsize` bytes a weight; see `page_geometry`."""
    experts = None if formats is None else formats.experts
    return ExpertPages.build(model, itemsize, experts, config.max_page_bytes, cpu=cpu)


def page_division(model: ModelConfig, geometry: PoolGeometry) -> Division:
    """How the pages of a model add up."""
    if model.recurrent is None:
        return Division(geometry)
    return Division(geometry, StateLayout.build(geometry, len(model.recurrent_layers), model.recurrent.conv_rows))


def plan_memory(
    model: ModelConfig, config: EngineConfig, program: int, available: int | None = None, formats: WeightFormats | None = None
) -> MemoryPlan:
    """Divide the ceiling among program, dense weights, workspace and pool.

    Args:
        program: bytes of the process before loading.
        available: bytes of main memory that are free; None: as this machine has now.
        formats: what the weights are stored as; None: plain numbers. Packed experts stay packed; all else is float32.

    Raises:
        DoesNotFitError: the ceiling (or the machine) is too small; says the minimum.
    """
    geometry, block_tokens = page_geometry(model, 4, config, formats, cpu=True)
    lying = expert_pages(model, 4, config, formats, cpu=True)
    layers, pages_per_expert = len(model.moe_layers), geometry.pages_per_expert
    # Loading buffers hold experts of any layer, so that their places have the pages of the largest.
    floor = expert_floor(model.num_experts, model.top_k, config.expert_offload_limit)
    buffer_experts = max(1, min(model.num_experts - floor, _BUFFER_EXPERTS, _BUFFER_BYTES // lying.expert_bytes))
    wanted_context = min(model.max_positions, config.context or model.max_positions)
    dense = dense_bytes(model, 4)
    reserve = AdjusterConstants().high_free + pages_per_expert
    division, kv_layers = page_division(model, geometry), len(model.attention_layers)
    floor_pages = lying.pages_of(floor * layers) + 2 * buffer_experts * pages_per_expert

    def pool_bytes(experts: int, context: int, spare_pages: int = 0, states: int = 1) -> int:
        kv_pages = -(-context // block_tokens) * kv_layers
        pages = lying.pages_of(experts) + 2 * buffer_experts * pages_per_expert + spare_pages
        return division.huge_pages(pages, kv_pages, states) * geometry.huge_page_bytes

    def kv_pages_of(pool: int) -> int:
        """KV pages that a pool of so many bytes can give, with experts at their floor and one sequence."""
        return division.kv_pages(pool // geometry.huge_page_bytes, floor_pages, 1)

    def context_of(pool: int) -> int:
        """Tokens that one sequence can reach in a pool of so many bytes."""
        return min(wanted_context, kv_pages_of(pool) // kv_layers * block_tokens)

    def needed(pool: int) -> int:
        """The whole process with a pool of so many bytes; a longer context also takes more workspace."""
        return program + dense + _workspace_bytes(model, config, context_of(pool), lying) + pool

    least = pool_bytes(floor * layers, min(wanted_context, _LEAST_CONTEXT))
    minimum = needed(least)
    everything = layers * model.num_experts
    full = pool_bytes(everything, min(wanted_context, _DEFAULT_CONTEXT), reserve, DEFAULT_STATES)
    if config.memory_bytes is not None:
        ceiling = config.memory_bytes
    elif config.pool_bytes is not None:
        ceiling = needed(max(least, config.pool_bytes))
    elif config.resident_share is not None:
        experts = max(floor * layers, round(config.resident_share * everything))
        ceiling = needed(max(least, pool_bytes(experts, 0, reserve)))
    else:
        available = psutil.virtual_memory().available if available is None else available
        ceiling = min(needed(full), program + int(DEFAULT_SHARE * available))
    if ceiling < minimum:
        machine = config.memory_bytes is None
        given = f"this machine has {_mib(ceiling)} to give" if machine else f"the ceiling is {_mib(ceiling)}"
        raise DoesNotFitError(
            f"The model needs at least {-(-minimum // MIB):,} MiB of memory, but {given} (program {_mib(program)}, "
            f"dense weights {_mib(dense)}, workspace {_mib(minimum - program - dense - least)}, smallest pool {_mib(least)}).",
            hint="Close other programs, or choose a smaller model." if machine else f"Give at least --memory {-(-minimum // MIB)}MiB.",
        )
    # No pool is larger than all experts and the whole context of every sequence.
    most = pool_bytes(everything, wanted_context * config.max_sequences, reserve, config.max_sequences * DEFAULT_STATES)
    sizes = range(0, most + 1, geometry.huge_page_bytes)
    pool = sizes[bisect_right(sizes, ceiling, key=needed) - 1]
    return MemoryPlan(
        experts=lying,
        geometry=geometry,
        block_tokens=block_tokens,
        ceiling=ceiling,
        program=program,
        dense=dense,
        workspace=needed(pool) - program - dense - pool,
        pool=pool,
        floor=floor,
        buffer_experts=buffer_experts,
        division=division,
        floor_pages=floor_pages,
        kv_pages=kv_pages_of(pool),
        context=context_of(pool),
        minimum=minimum,
        least_pool=least,
        full_pool=full,
        most_pool=most,
        max_batch_tokens=config.max_batch_tokens,
    )


def _workspace_bytes(model: ModelConfig, config: EngineConfig, context: int, lying: ExpertPages) -> int:
    """Largest temporary tensors of a step: activations, attention scores, gathered keys and values, logits, expert workspace."""
    tokens = min(config.max_batch_tokens, context)
    heads = model.num_heads * model.head_dim
    widest = max(model.dense_intermediate or 0, model.shared_intermediate or 0)
    mixer = 0 if model.recurrent is None else 6 * model.recurrent.channels + 10 * model.recurrent.inner
    activations = tokens * 4 * (6 * model.hidden_size + max(6 * heads, mixer) + 3 * widest)
    scores = 3 * 4 * min(max(MAX_SCORES, model.num_heads * context), tokens * model.num_heads * context)
    gathered = 2 * 4 * context * model.num_kv_heads * model.head_dim
    if config.kv == "q8":
        gathered += context * kv_bytes(model, 4, config)  # the codes, before they are numbers again
    logits = 4 * 4 * min(config.max_sequences, tokens) * model.vocab_size
    experts = executor_bytes(model.top_k, model.expert_intermediate, model.hidden_size, tokens, lying)
    return activations + scores + gathered + logits + experts


def executor_bytes(top_k: int, f: int, d: int, max_tokens: int, lying: ExpertPages | None = None) -> int:
    """Bytes of the buffers of `experts.executor.PooledExperts` and of its largest temporary tensors in a layer of `max_tokens` tokens.

    Args:
        lying: how experts lie in pages; where some are packed, `experts.packed_executor.PackedExperts` has other buffers.
    """
    per_token = 4 * (top_k * d * 2 + 4 * f + 2 * d)
    if lying is not None and lying.packed:
        places = top_k * lying.pages_per_expert * lying.page_bytes
        plain = 0 if all(lying.layers) else 3 * f * d * 4
        scratch = block_bytes(max(f, d))
        if lying.rewritten:
            # The two threads that bring experts have scratch of their own.
            scratch += 2 * (block_bytes(max(f, d)) + lying.packed_at_once * lying.pages_per_expert * lying.packed_page_bytes)
        return places + plain + scratch + max_tokens * per_token
    return (top_k + 1) * 3 * f * d * 4 + max_tokens * per_token


def _mib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / MIB:,.0f} MiB"
