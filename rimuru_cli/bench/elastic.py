"""One conversation that grows until it fills most of the pool: speed and the pool's composition on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rimuru_cli.bench.tokens import SyntheticModel
from rimuru_cli.engine.config import Progress
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import SamplingParams

_ROOM = 64  # tokens of the context that stay free of the prompt at the last stage, for the answer


def run_elastic_bench(
    shape: str, *, ceiling: int | None, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> dict[str, Any]:
    """Grow one conversation of a shape with random weights to the longest context that the ceiling allows.

    Args:
        shape: a key of `synthetic.SHAPES`.
        ceiling: of the device's memory in bytes; None: no cap.

    Returns:
        JSON-able: "rows" as `grow_conversation` gives them.
    """
    report = progress or (lambda stage, done, total: None)
    model = SyntheticModel(shape, device, report, dtype=dtype)
    engine, _ = model.engine(ceiling)
    try:
        with engine:
            limit = engine.info.context_limit
            stages = [*(limit // part for part in (16, 8, 4, 2)), limit - _ROOM]
            rows = grow_conversation(engine, stages, each=lambda row: report("conversation", row["context"], limit))
    finally:
        model.host.shared = False
        model.host.close()
    return {"bench": "elastic", "model": shape, "vram_cap": ceiling, "context_limit": limit, "rows": rows}


def grow_conversation(
    engine: Engine, stages: Sequence[int], *, generate: int = 32, each: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Turns that bring one conversation to each of `stages` tokens; every turn reuses all turns before it.

    Returns:
        A row per stage: context tokens, tokens computed and reused, prompt and generation rates, residents, hit rate, bytes by kind.
    """
    vocab = engine.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = []
    rows = []
    for stage in (s for s in stages if s + generate < engine.info.context_limit):
        tokens += torch.randint(0, vocab, (stage - len(tokens),), generator=generator).tolist()
        before = engine.snapshot()
        request = engine.submit(tokens, SamplingParams(temperature=0.0, max_tokens=generate, ignore_eos=True))
        started = time.perf_counter()
        while request.finish_reason is None:
            engine.step()
        timings, after = request.timings, engine.snapshot()
        tokens += request.output_ids
        row = {
            "context": len(tokens),
            "computed": timings.computed_tokens,
            "reused": timings.cached_tokens,
            "prompt t/s": round((stage - timings.cached_tokens) / timings.prompt_seconds, 1),
            "generation t/s": round((timings.generated_tokens - 1) / timings.generation_seconds, 2),
            "seconds": round(time.perf_counter() - started, 2),
            "resident_experts": after.resident_experts,
            "hit_rate": round((after.expert_hits - before.expert_hits) / max(1, after.expert_uses - before.expert_uses), 4),
            "bytes_by_kind": after.bytes_by_kind,
            "preemptions": after.preemptions,
        }
        rows.append(row)
        if each is not None:
            each(row)
    return rows
