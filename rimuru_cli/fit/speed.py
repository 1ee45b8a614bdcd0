"""How long a token and a prompt take, from bytes that must be moved and arithmetic that must be done. Seconds and decimal GB.

Decode on a card: every weight that the token needs is read from the card's memory once, each layer costs a fixed time for its launches, and
the experts that are missing are fetched over the link while nothing else runs. Prompts on a card: all absent experts pass over the link
once for each piece of the prompt, beside the arithmetic. The constants are those of an H200 (docs/results: qwen3-30b-a3b,
attention-and-fetch); `tests/fit/test_fit_speed.py` compares with what was measured there.
"""

from __future__ import annotations

from dataclasses import dataclass

from rimuru_cli.engine.device.hybrid_plan import state_bytes
from rimuru_cli.engine.device.plan import buffer_experts
from rimuru_cli.fit.locality import likely_hits, uniform_hits
from rimuru_cli.fit.machine import Gpu, Machine
from rimuru_cli.fit.placement import Placement

GIGA = 1e9
# A decode step of 48 layers over 5.2 GB of resident weights takes 2.92 ms (docs/results: qwen3-30b-a3b); at 4.0 TB/s 34 us a layer remain.
GPU_LAYER_SECONDS = 34e-6
# A piece of a prompt is launched operation by operation. Assumed; what was measured is the floor below.
GPU_PROMPT_LAYER_SECONDS = 150e-6
# Nor does a piece take less than the host's part of it, however short: with all experts resident 512 tokens of 48 layers take 30 to 33 ms,
# and pieces of 8 layers beside some 30 sequences 14 ms (docs/results: qwen3-30b-a3b, elasticity).
GPU_PIECE_SECONDS = 10.8e-3
GPU_PIECE_LAYER_SECONDS = 0.42e-3
# Recurrent layers have more launches (docs/results: qwen3.5-35b-a3b): a token takes 3.55 ms with all experts of 40 layers resident, 30 of
# them recurrent, of which 1.5 ms are 6.1 GB at 4.0 TB/s; and a piece of 512 tokens takes 72 ms, one of 4096 tokens 70 ms.
GPU_RECURRENT_LAYER_SECONDS = 56e-6
GPU_RECURRENT_PIECE_SECONDS = (71e-3 - GPU_PIECE_SECONDS - 10 * GPU_PIECE_LAYER_SECONDS) / 30
# Kernels that read page-locked memory themselves reach 51.2 GB/s where the copy engine reaches 54.4.
FETCH_OF_LINK = 0.94
# 4096 tokens, 34 tera-operations, take 61 ms with all experts resident (docs/results: qwen3-30b-a3b): 0.70 of an H200's peak. Other cards
# have been measured less.
PRODUCTS_OF_PEAK = 0.6
# On a CPU (docs/results: cpu-decode): matrix-vector products reach this share of the plain read rate, a layer's small steps take this long,
# an expert that is missing is converted at this rate, and a processor makes so many products and sums a second in long prompts.
_CPU_READ_SHARE = 0.6
_CPU_LAYER_SECONDS = 0.45e-3
_CPU_CONVERT_GB_PER_S = 2.8
_CPU_GFLOPS_PER_PROCESSOR = 15.0
# How far off a machine may be that was not measured: others use it too, its clock is lower, its memory slower.
_CPU_SLOWER = 0.6
GUESSED_DISK_GB_PER_S = 1.5
# What is not page-locked passes through the processor on its way to the card, and the step that lacked it is computed again. The rate is
# that of pageable memory on an H200's host.
_PAGEABLE_GB_PER_S = 6.5


@dataclass(frozen=True)
class Range:
    """Tokens per second: `low` in the worst case, `high` in the likely one."""

    low: float
    high: float


def decode_range(placement: Placement, machine: Machine, context: int) -> Range | None:
    """Generated tokens per second of one conversation that has `context` tokens; None when so many do not fit.

    low: every expert is equally likely at every token. high: as many hits as a recorded conversation had, or one with its habits.
    """
    residents = placement.residents(context)
    if residents is None:
        return None
    share = residents / placement.shape.num_experts
    worst = uniform_hits(share)
    likely = max(worst, likely_hits(share, placement.shape.config.num_experts))
    if placement.device == "gpu":
        assert machine.gpu is not None
        return Range(
            1 / gpu_token_seconds(placement, machine.gpu, context, worst), 1 / gpu_token_seconds(placement, machine.gpu, context, likely)
        )
    return Range(
        _CPU_SLOWER / cpu_token_seconds(placement, machine, context, worst), 1 / cpu_token_seconds(placement, machine, context, likely)
    )


def prompt_range(placement: Placement, machine: Machine, tokens: int) -> Range | None:
    """Tokens per second of reading a prompt of `tokens` from an empty cache; None when so many do not fit.

    low: nothing overlaps. high: copies and arithmetic overlap completely.
    """
    if tokens > placement.plan.context:
        return None
    if placement.device == "gpu":
        assert machine.gpu is not None
        return gpu_prompt_range(placement, machine.gpu, tokens)
    seconds = _cpu_prompt_seconds(placement, machine, tokens)
    return Range(_CPU_SLOWER * tokens / seconds, tokens / seconds)


def gpu_token_seconds(placement: Placement, gpu: Gpu, context: int, hit_rate: float) -> float:
    """Seconds for one generated token after `context` others, when `hit_rate` of the experts it needs are resident."""
    shape = placement.shape
    used = shape.uses_per_token * placement.expert_bytes
    moved = placement.read_per_token + used + _visible_kv_bytes(placement, context)
    # States are read and written, and so they are when they are copied lest the step be computed in vain.
    moved += 4 * state_bytes(shape.config, placement.computing.itemsize)
    seconds = moved / (gpu.memory_gb_per_s * GIGA) + _by_layer(placement, GPU_LAYER_SECONDS, GPU_RECURRENT_LAYER_SECONDS)
    missed, unreadable = used * (1 - hit_rate), _unreadable_share(placement, context)
    # Computed again if it lacked an expert that the card cannot read; in part where that happens to some tokens only.
    seconds *= 1 + min(1.0, missed * unreadable / placement.expert_bytes)
    fetched = missed * (1 - unreadable) / (gpu.link_gb_per_s * FETCH_OF_LINK * GIGA)
    return seconds + fetched + missed * unreadable * _brought_seconds_per_byte(placement)


def _by_layer(placement: Placement, attention: float, recurrent: float) -> float:
    """Seconds of all layers, of which each takes so many, with attention or a recurrent mixer."""
    config = placement.shape.config
    return len(config.attention_layers) * attention + len(config.recurrent_layers) * recurrent


def _unreadable_share(placement: Placement, context: int) -> float:
    """Share of the absent experts that the card cannot read: those that are not page-locked, which are the worst-ranked ones."""
    absent = placement.shape.num_experts - (placement.residents(context) or 0)
    return min(1.0, (placement.shape.num_experts - placement.pinned_experts) / absent) if absent else 0.0


def _brought_seconds_per_byte(placement: Placement) -> float:
    """Seconds a byte takes that the host has to bring to the card, from the file cache or the disk."""
    return 1 / (_PAGEABLE_GB_PER_S * GIGA) + placement.uncached_share / (GUESSED_DISK_GB_PER_S * GIGA)


def gpu_prompt_range(placement: Placement, gpu: Gpu, tokens: int) -> Range:
    """Tokens per second of reading a prompt; see `prompt_range`."""
    overlapped = apart = 0.0
    step = placement.plan.max_batch_tokens
    residents = placement.residents(tokens) or 0
    for start in range(0, tokens, step):
        count = min(step, tokens - start)
        link = _streamed_seconds(placement, gpu, residents)
        compute = _gpu_compute_seconds(placement, gpu, count, start)
        launched = GPU_PIECE_SECONDS + _by_layer(placement, GPU_PIECE_LAYER_SECONDS, GPU_RECURRENT_PIECE_SECONDS)
        overlapped += max(link, compute, launched)
        apart += max(link + compute, launched)
    return Range(tokens / apart, tokens / overlapped)


def _streamed_seconds(placement: Placement, gpu: Gpu, residents: int) -> float:
    """Seconds of copies for a piece of a prompt: all absent experts pass by, and those that made room for the loading buffers."""
    shape = placement.shape
    layers = len(shape.config.moe_layers)
    absent = shape.num_experts - residents
    buffers = buffer_experts(-(-absent // layers), placement.expert_bytes)
    absent += min(buffers, max(0, residents - placement.plan.floor * layers))
    unreadable = min(absent, shape.num_experts - placement.pinned_experts)
    copied = (absent - unreadable) * placement.expert_bytes / (gpu.link_gb_per_s * GIGA)
    return copied + unreadable * placement.expert_bytes * _brought_seconds_per_byte(placement)


def _gpu_compute_seconds(placement: Placement, gpu: Gpu, tokens: int, before: int) -> float:
    shape, config = placement.shape, placement.shape.config
    attention = 4 * config.num_heads * config.head_dim * len(config.attention_layers) * tokens * (before + tokens / 2)
    products = (2 * shape.active_parameters * tokens + attention) / (gpu.tflops * 1e12 * PRODUCTS_OF_PEAK)
    # A long piece touches every expert of every layer, so all weights are read.
    touched = 1 - (1 - config.top_k / config.num_experts) ** tokens
    weights = placement.read_per_token + touched * shape.num_experts * placement.expert_bytes
    return max(products, weights / (gpu.memory_gb_per_s * GIGA)) + config.num_layers * GPU_PROMPT_LAYER_SECONDS


def cpu_token_seconds(placement: Placement, machine: Machine, context: int, hit_rate: float) -> float:
    """Seconds for one generated token on the CPU after `context` others."""
    shape = placement.shape
    used = shape.uses_per_token * placement.expert_bytes
    moved = placement.read_per_token + used + _visible_kv_bytes(placement, context)
    moved += 2 * state_bytes(shape.config, placement.computing.itemsize)
    seconds = moved / (machine.ram_gb_per_s * _CPU_READ_SHARE * GIGA) + shape.config.num_layers * _CPU_LAYER_SECONDS
    missed = shape.uses_per_token * (1 - hit_rate) * shape.stored_expert_bytes
    return seconds + missed * _converted_seconds_per_byte(placement)


def _cpu_prompt_seconds(placement: Placement, machine: Machine, tokens: int) -> float:
    shape, config = placement.shape, placement.shape.config
    attention = 4 * config.num_heads * config.head_dim * len(config.attention_layers) * tokens * tokens / 2
    flops = 2 * shape.active_parameters * tokens + attention
    absent = shape.num_experts - (placement.residents(tokens) or 0)
    pieces = -(-tokens // placement.plan.max_batch_tokens)
    copies = pieces * absent * shape.stored_expert_bytes * _converted_seconds_per_byte(placement)
    return flops / (machine.processors * _CPU_GFLOPS_PER_PROCESSOR * GIGA) + copies


def _converted_seconds_per_byte(placement: Placement) -> float:
    """Seconds a stored byte of an absent expert takes on a CPU: converting it, and reading it from the disk where it is not cached."""
    return 1 / (_CPU_CONVERT_GB_PER_S * GIGA) + placement.uncached_share / (GUESSED_DISK_GB_PER_S * GIGA)


def _visible_kv_bytes(placement: Placement, context: int) -> int:
    """Bytes of keys and values that one token reads; layers with a window see no further than it reaches."""
    config = placement.shape.config
    per_layer = placement.kv_token_bytes // max(1, len(config.attention_layers))
    total = 0
    for layer in config.attention_layers:
        window = config.window(layer)
        total += per_layer * (context if window is None else min(window, context))
    return total
