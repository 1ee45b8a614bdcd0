"""Memory that changes hands while a model runs: a conversation that grows until it fills most of the pool, and a ceiling that is lowered
and raised in the middle of an answer."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rimuru_cli.bench.synthetic import SMALL_SHAPE
from rimuru_cli.bench.tokens import SyntheticModel, reclaim
from rimuru_cli.engine.config import EngineConfig, Progress
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.request import Request, SamplingParams
from rimuru_cli.engine.stats import Snapshot

GIB = 1 << 30
LOWERED_BYTES = 4 * GIB

_ROOM = 64  # tokens of the context that stay free of the prompt at the last stage, for the answer
_FIRST_STAGE = 8192
_ANSWER = 96
_PROMPT = 4096


def run_elastic_bench(
    shape: str,
    *,
    ceiling: int | None,
    device: torch.device,
    dtype: torch.dtype,
    lowered: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Both runs, on a shape with random weights.

    Args:
        shape: a key of `synthetic.SHAPES`.
        ceiling: of the device's memory in bytes; None: no cap, but for a shape that fits anywhere the least that allows the longest
            context, so that there is something to see.
        lowered: by how many bytes the ceiling is lowered; None: 4 GiB, or two thirds of a smaller pool, as far as the answer allows.

    Returns:
        JSON-able: "rows" as `grow_conversation` gives them, "ceiling" as `move_ceiling` does.
    """
    report = progress or (lambda stage, done, total: None)
    model = SyntheticModel(shape, device, report, dtype=dtype)
    try:
        if ceiling is None and shape == SMALL_SHAPE:
            ceiling = _tight_ceiling(model)
        with model.engine(ceiling)[0] as engine:
            limit = engine.info.context_limit
            rows = grow_conversation(engine, stages_to(limit), each=lambda row: report("conversation", row["context"], limit))
            report("conversation", limit, limit)
        del engine
        reclaim()
        engine, parts = model.engine(ceiling)
        with engine:
            moved = move_ceiling(engine, parts, lowered, each=lambda done: report("ceiling", done, 2 * _ANSWER))
        del engine, parts
        reclaim()
    finally:
        model.host.shared = False
        model.host.close()
    return {"bench": "elastic", "model": shape, "vram_cap": ceiling, "context_limit": limit, "rows": rows, "ceiling": moved}


def _tight_ceiling(model: SyntheticModel) -> int:
    """The least that allows the longest context."""
    engine, parts = model.engine(None)
    with engine:
        plan = parts.plan
        pages = parts.blocks.blocks_for(plan.context) * parts.blocks.num_layers
        huge = plan.geometry.huge_page_bytes
        sizes = range(0, plan.pool // huge + 1)
        return parts.replan(_of_pool(bisect_left(sizes, pages, key=lambda n: parts.replan(_of_pool(n * huge)).kv_pages) * huge)).ceiling


def _of_pool(pool_bytes: int) -> EngineConfig:
    return EngineConfig(pool_bytes=pool_bytes)


def stages_to(limit: int) -> list[int]:
    """Context lengths on the way to the longest: 8192 and its doubles, or fractions of a shorter context."""
    if limit < 4 * _FIRST_STAGE:
        return [*(limit // part for part in (16, 8, 4, 2)), limit - _ROOM]
    stages: list[int] = []
    while (stage := _FIRST_STAGE << len(stages)) < limit - _ROOM:
        stages.append(stage)
    return [*stages, limit - _ROOM]


def grow_conversation(
    engine: Engine, stages: Sequence[int], *, generate: int = 32, each: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Turns that bring one conversation to each of `stages` tokens; every turn reuses all turns before it.

    Returns:
        A row per stage: context tokens, tokens computed and reused, prompt and generation rates, residents, hit rate, bytes by kind; bytes
        that changed hands between experts and the conversation, the milliseconds that steps waited for that, and both as ms per GiB;
        device memory in use by anybody.
    """
    vocab = engine.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = []
    rows = []
    for stage in (s for s in stages if s + generate <= engine.info.context_limit):
        tokens += torch.randint(0, vocab, (stage - len(tokens),), generator=generator).tolist()
        before = engine.snapshot()
        request = engine.submit(tokens, SamplingParams(temperature=0.0, max_tokens=generate, ignore_eos=True))
        started = time.perf_counter()
        while request.finish_reason is None:
            engine.step()
        timings, after = request.timings, engine.snapshot()
        tokens += request.output_ids
        handed_over = after.elastic_bytes - before.elastic_bytes
        waited = 1e3 * (after.elastic_seconds - before.elastic_seconds)
        row = {
            "context": len(tokens),
            "computed": timings.computed_tokens,
            "reused": timings.cached_tokens,
            "prompt t/s": round((stage - timings.cached_tokens) / timings.prompt_seconds, 1),
            "generation t/s": round((timings.generated_tokens - 1) / timings.generation_seconds, 2),
            "seconds": round(time.perf_counter() - started, 2),
            "resident_experts": after.resident_experts,
            "hit_rate": _hit_rate(before, after),
            "bytes_by_kind": after.bytes_by_kind,
            "free_bytes": after.free_bytes,
            "handed_over_bytes": handed_over,
            "waited_ms": round(waited, 2),
            "ms_per_gib": round(waited / (handed_over / GIB), 2) if handed_over else None,
            "vram_used": used_bytes(),
            "preemptions": after.preemptions,
        }
        rows.append(row)
        if each is not None:
            each(row)
    return rows


def move_ceiling(
    engine: Engine, parts_of: Parts, lowered: int | None = None, *, each: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """One answer undisturbed, and again with the ceiling lowered after a third of it and raised after another.

    Args:
        parts_of: the engine.
        lowered: by so many bytes, as far as what runs allows it; None: 4 GiB, or two thirds of a smaller pool.
        each: told how many tokens of both answers have come.

    Returns:
        JSON-able: "same_text"; "first_difference" (index of the first token that differs, or None); "tokens" of each answer; "parts" with
        the rate and hit rate of the undisturbed answer and of each third; "lowered" and "raised" (MemoryChange, with device memory in use
        before and after by anybody, and ms per GiB).
    """
    prompt = torch.randint(
        0, engine.vocab_size, (min(_PROMPT, engine.info.context_limit // 4),), generator=torch.Generator().manual_seed(1)
    ).tolist()
    ceiling = engine.info.memory_bytes
    part = _ANSWER // 3
    parts: list[dict[str, Any]] = []
    changes: dict[str, dict[str, Any]] = {}

    def answer(*moves: tuple[str, Callable[[], int]], name: str) -> list[int]:
        engine.forget()
        request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True))
        parts.append(_generate(engine, request, part, name))
        for label, wanted in moves:
            changes[label] = _set_memory(engine, wanted())
            parts.append(_generate(engine, request, part, f"after it was {label}"))
        parts.append(_generate(engine, request, _ANSWER, "to the end"))
        if each is not None:
            each(_ANSWER * (2 if moves else 1))
        return list(request.output_ids)

    def target() -> int:
        plan = parts_of.plan
        wish = min(LOWERED_BYTES, 2 * plan.pool // 3) if lowered is None else lowered
        # Of a ceiling that nothing fills the unused part does not count.
        return max(min(ceiling, plan.program + plan.dense + plan.workspace + plan.pool) - wish, engine.least_memory)

    plain = answer(name="undisturbed, first third")
    moved = answer(("lowered", target), ("raised", lambda: ceiling), name="before the ceiling moved")
    differing = [i for i, (a, b) in enumerate(zip(plain, moved, strict=True)) if a != b]
    return {
        "prompt_tokens": len(prompt),
        "tokens": len(plain),
        "same_text": plain == moved,
        "first_difference": differing[0] if differing else None,
        "parts": [row for row in parts if row["tokens"]],
        **changes,
    }


def _generate(engine: Engine, request: Request, tokens: int, name: str) -> dict[str, Any]:
    """Up to `tokens` more of an answer; how fast."""
    before, done = engine.snapshot(), len(request.output_ids)
    while not request.output_ids:
        engine.step()
    started, first = time.perf_counter(), len(request.output_ids)
    while request.finish_reason is None and len(request.output_ids) - done < tokens:
        engine.step()
    seconds, after = time.perf_counter() - started, engine.snapshot()
    count = len(request.output_ids) - first
    return {
        "part": name,
        "tokens": count,
        "generation t/s": round(count / seconds, 2) if count else None,
        "hit_rate": _hit_rate(before, after),
        "resident_experts": after.resident_experts,
        "pool_bytes": after.pool_bytes,
    }


def _set_memory(engine: Engine, ceiling: int) -> dict[str, Any]:
    before = used_bytes()
    change = engine.set_memory(ceiling)
    moved = max(change.returned_bytes, change.taken_bytes) or abs(change.pool_bytes - change.pool_before)
    return {
        **change.to_dict(),
        "vram_used_before": before,
        "vram_used_after": used_bytes(),
        "ms_per_gib": round(1e3 * change.seconds / (moved / GIB), 2) if moved else None,
    }


def _hit_rate(before: Snapshot, after: Snapshot) -> float:
    return round((after.expert_hits - before.expert_hits) / max(1, after.expert_uses - before.expert_uses), 4)


def used_bytes() -> int | None:
    """Bytes of the GPU in use by anybody, as the driver counts them; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
