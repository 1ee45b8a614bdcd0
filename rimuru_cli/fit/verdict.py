"""The answer of `rimuru fit`: does a model run on a machine, what lies where, and about how fast it will be."""

from __future__ import annotations

from typing import Any, Literal

from rimuru_cli.engine.config import KVPrecision
from rimuru_cli.fit.locality import MANY_EXPERTS
from rimuru_cli.fit.machine import Machine, this_machine
from rimuru_cli.fit.placement import Placement, Refusal, place
from rimuru_cli.fit.shape import ModelShape, shape_of
from rimuru_cli.fit.speed import GUESSED_DISK_GB_PER_S, Range, decode_range, prompt_range
from rimuru_cli.hub.fit import FitVerdict
from rimuru_models.config import ModelConfig
from rimuru_models.index import CheckpointIndex
from rimuru_models.layout import num_parameters
from rimuru_models.quantization.precision import notices

CONTEXTS = (0, 8192, 32768, 131072)
PROMPTS = (512, 4096)
_LITTLE_LOCALITY = 0.5
"""A model whose tokens use more than this share of a layer's experts has little to gain from locality; the recording says little of it."""


def check_fit(
    name: str, config: ModelConfig, index: CheckpointIndex | None = None, *, machine: Machine | None = None, kv: KVPrecision = "auto"
) -> FitVerdict:
    """Whether a model runs, and about how fast; see `hub.fit.FitCheck`.

    Args:
        name: what to call the model.
        config: its configuration.
        index: headers of all shards, from the disk or from afar; None: only the configuration is known.
        machine: where; the one this runs on by default.
        kv: what keys and values are to be stored as.

    Raises:
        CheckpointError: `index` and `config` contradict each other.
    """
    machine = machine or this_machine()
    shape = shape_of(config, index)
    placement, passed_over = place(shape, machine, kv)
    report: dict[str, Any] = {
        "model": name,
        "architecture": config.architecture,
        "parameters": num_parameters(config),
        "precision": shape.precision.experts,
        "dense_precision": shape.precision.dense,
        "stored_bytes": shape.stored_bytes,
        "model_context": config.max_positions,
        "notices": list(notices(shape.formats)),
        "machine": _machine_facts(machine),
    }
    if isinstance(placement, Refusal):
        problem = placement.problem if passed_over is None else f"{placement.problem} No GPU is used: {passed_over}."
        report |= {
            "runs": False,
            "device": None,
            "gpu_not_used": passed_over,
            "problem": problem,
            "hint": placement.hint,
            "memory": None,
            "places": [],
            "largest_context": 0,
            "contexts": [],
            "prompts": [],
            "assumptions": _assumptions(shape, machine),
        }
        return FitVerdict(False, None, f"does not run here: {_first_sentence(placement.problem)}", problem, placement.hint, report)
    headline = _headline(placement, machine)
    report |= {
        "runs": True,
        "device": placement.device,
        "gpu_not_used": passed_over,
        "problem": None,
        "hint": None,
        "memory": _memory_facts(placement) | {"kv_precision": placement.computing.name if kv == "auto" else kv},
        "places": _places(placement),
        "largest_context": placement.plan.context,
        "contexts": [_context_row(placement, machine, context) for context in CONTEXTS],
        "prompts": [{"tokens": tokens, **_rates(prompt_range(placement, machine, tokens))} for tokens in PROMPTS],
        "assumptions": _assumptions(shape, machine, placement),
    }
    return FitVerdict(True, placement.device, headline, None, None, report)


def _machine_facts(machine: Machine) -> dict[str, Any]:
    gpu = machine.gpu
    return {
        "gpu": None
        if gpu is None
        else {
            "name": gpu.name,
            "vram_bytes": gpu.total_bytes,
            "vram_used_bytes": gpu.used_bytes,
            "vram_cap_bytes": gpu.cap_bytes,
            "memory_gb_per_s": round(gpu.memory_gb_per_s, 1),
            "tflops": round(gpu.tflops, 1),
            "link_gb_per_s": round(gpu.link_gb_per_s, 2),
        },
        "why_no_gpu": machine.why_no_gpu,
        "ram_bytes": machine.ram_bytes,
        "ram_free_bytes": machine.ram_free_bytes,
        "ram_gb_per_s": round(machine.ram_gb_per_s, 1),
        "processors": machine.processors,
    }


def _memory_facts(placement: Placement) -> dict[str, Any]:
    """The engine's division of memory, in bytes."""
    plan = placement.plan
    return {
        "ceiling_bytes": plan.ceiling,
        "minimum_bytes": plan.minimum,
        "program_bytes": plan.program,
        "dense_bytes": plan.dense,
        "workspace_bytes": plan.workspace,
        "pool_bytes": plan.pool,
        "expert_bytes": placement.expert_bytes,
        "kv_bytes_per_token": placement.kv_token_bytes,
        "block_tokens": plan.block_tokens,
        "page_bytes": plan.geometry.expert_page_bytes,
        "huge_page_bytes": plan.geometry.huge_page_bytes,
        "floor_experts_per_layer": plan.floor,
    }


def _places(placement: Placement) -> list[dict[str, Any]]:
    """Which part lies where before a conversation begins: part, place, bytes."""
    shape, plan = placement.shape, placement.plan
    residents = placement.residents(0) or 0
    fast = "VRAM" if placement.device == "gpu" else "RAM"
    rows = [
        ("driver and other programs" if placement.device == "gpu" else "rimuru itself", fast, plan.program),
        ("attention, embeddings, routers, shared experts", fast, plan.dense),
        ("workspace", fast, plan.workspace),
        (f"{residents:,} of {shape.num_experts:,} experts (pool)", fast, residents * placement.expert_bytes),
        ("conversation and reserve (pool)", fast, plan.pool - residents * placement.expert_bytes),
    ]
    uncached = placement.uncached_share
    files = "RAM (file cache)" if uncached == 0 else "disk" if uncached == 1 else "RAM (file cache), disk"
    if placement.device == "gpu":
        pinned = placement.pinned_experts
        rows.append((f"{pinned:,} experts for the card to read, page-locked", "RAM", pinned * placement.expert_bytes))
        if pinned < shape.num_experts:
            left = shape.num_experts - pinned
            rows.append((f"{left:,} experts that main memory has no room for", files, left * placement.expert_bytes))
    else:
        rows.append(("the files, all experts in them", files, shape.stored_bytes))
    return [{"part": part, "place": where, "bytes": num_bytes} for part, where, num_bytes in rows]


def _context_row(placement: Placement, machine: Machine, context: int) -> dict[str, Any]:
    residents = placement.residents(context)
    fits = residents is not None
    limit: Literal["model", "memory"] | None = None
    if not fits:
        limit = "model" if context > placement.shape.config.max_positions else "memory"
    return {
        "context": context,
        "fits": fits,
        "limit": limit,
        "resident_experts": residents,
        "resident_share": None if residents is None else round(residents / placement.shape.num_experts, 4),
        "conversation_bytes": placement.conversation_bytes(context) if fits else None,
        **_rates(decode_range(placement, machine, context), "decode_"),
    }


def _rates(rates: Range | None, prefix: str = "") -> dict[str, float | None]:
    low, high = (None, None) if rates is None else (_three(rates.low), _three(rates.high))
    return {f"{prefix}tokens_per_s_low": low, f"{prefix}tokens_per_s_high": high}


def _three(rate: float) -> float:
    """Three significant digits: more would promise too much."""
    return float(f"{rate:.3g}")


def _headline(placement: Placement, machine: Machine) -> str:
    rates = decode_range(placement, machine, 0)
    residents = placement.residents(0)
    assert rates is not None and residents is not None, "an empty conversation fits wherever the model does"
    share = f"{100 * residents / placement.shape.num_experts:.0f} % of its experts stay"
    if placement.device == "gpu":
        assert machine.gpu is not None
        where = f"runs on the GPU ({machine.gpu.name}): {share} on the card"
    else:
        where = f"runs on the CPU: {share} in memory"
    low, high = f"{rates.low:.2g}", f"{rates.high:.2g}"
    low, high = (f"{float(text):g}" for text in (low, high))
    return f"{where}, about {low if low == high else f'{low} to {high}'} tokens/s"


def _assumptions(shape: ModelShape, machine: Machine, placement: Placement | None = None) -> list[str]:
    recorded = "a conversation recorded on Qwen3-30B-A3B (top 6 of 128 experts a layer)"
    if shape.config.num_experts >= MANY_EXPERTS:
        recorded = f"a routing made up for 256 experts a layer, with the habits of {recorded}"
    lines = [f"low: every expert is equally likely at every token; high: as many hits as in {recorded}"]
    used = shape.config.top_k / shape.config.num_experts
    if used > _LITTLE_LOCALITY:
        lines.append(f"a token of this model uses {100 * used:.0f} % of a layer's experts, far more than there: expect the lower part")
    if placement is not None and placement.device == "gpu":
        lines.append("prompts: low when copies and arithmetic wait for each other, high when they overlap")
    elif placement is not None:
        lines.append("on a CPU, low also stands for a machine that other programs keep busy")
    if placement is not None and placement.uncached_share > 0:
        lines.append(f"what main memory has no room for is read from the disk at {GUESSED_DISK_GB_PER_S:g} GB/s, as an ordinary SSD does")
    if not shape.from_headers:
        lines.append("only config.json was read: the weights are taken to be bfloat16")
    return [*lines, *machine.assumptions]


def _first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, without it."""
    return text.split(". ")[0].removesuffix(".")
