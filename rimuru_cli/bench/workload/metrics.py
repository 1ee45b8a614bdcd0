"""What serving a list of requests was like, in the terms of vLLM's serving benchmark.

TTFT  first token - arrival
TPOT  (last token - first token) / (tokens - 1) of one request with at least two tokens; statistics are over requests
ITL   time between neighbouring tokens of one request; statistics are over all gaps
throughput  tokens or requests that ended, per second from the first arrival to the last token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rimuru_cli.bench.workload.requests import RequestSpec


@dataclass
class RequestRecord:
    """One request as it was served; times in seconds from the start of the run."""

    spec: RequestSpec
    token_times: list[float] = field(default_factory=list)


class StepRecord(NamedTuple):
    """One forward step.

    Attributes:
        end: seconds from the start of the run to its end.
        prefill_rows, decode_rows: tokens computed; answers: tokens that came of them.
        running, waiting: requests after it.
        bytes_by_kind: bytes of the pool by kind of owner, and "free".
        resident: resident experts.
        uses, hits: expert selections of the step, and those whose expert was resident.
        link_bytes: bytes that crossed the link.
    """

    end: float
    prefill_rows: int
    decode_rows: int
    answers: int
    running: int
    waiting: int
    bytes_by_kind: dict[str, int]
    resident: int
    uses: int
    hits: int
    link_bytes: int


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (linear interpolation between neighbours); empty without values."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = np.percentile(array, (50, 95, 99))
    return {"mean": float(array.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def summarise(records: Sequence[RequestRecord], steps: Sequence[StepRecord], *, preemptions: int) -> dict[str, Any]:
    """All figures of one run, JSON-able. Times are in milliseconds, rates per second."""
    done = [r for r in records if len(r.token_times) >= r.spec.answer_tokens]
    first, last = min(r.spec.arrival for r in records), max((t for r in records for t in r.token_times), default=0.0)
    seconds = max(last - first, 1e-9)
    answers = sum(len(r.token_times) for r in records)
    prompts = sum(r.spec.prompt_tokens for r in records if r.token_times)
    gaps = [b - a for r in records for a, b in zip(r.token_times, r.token_times[1:], strict=False)]
    ttft = [r.token_times[0] - r.spec.arrival for r in records if r.token_times]
    tpot = [(r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1) for r in records if len(r.token_times) > 1]
    uses = sum(step.uses for step in steps)
    return {
        "requests": len(records),
        "completed": len(done),
        "seconds": seconds,
        "steps": len(steps),
        # In the last step somebody ran, too, though nobody does after it.
        "peak_concurrency": max((max(1, step.running) for step in steps), default=0),
        "mean_concurrency": float(np.mean([step.running for step in steps])) if steps else 0.0,
        "throughput": answers / seconds,
        "request_throughput": len(done) / seconds,
        "total_token_throughput": (answers + prompts) / seconds,
        "ttft_ms": {name: 1e3 * value for name, value in statistics(ttft).items()},
        "tpot_ms": {name: 1e3 * value for name, value in statistics(tpot).items()},
        "itl_ms": {name: 1e3 * value for name, value in statistics(gaps).items()},
        "preemptions": preemptions,
        "hit_rate": sum(step.hits for step in steps) / uses if uses else None,
        "link_bytes": sum(step.link_bytes for step in steps),
    }


def curves(steps: Sequence[StepRecord], points: int = 240) -> dict[str, list[float]]:
    """Concurrency, composition, residents and tokens so far, of at most `points` steps at even distances, both ends included."""
    if not steps:
        return {}
    indexes = sorted({round(i * (len(steps) - 1) / max(1, points - 1)) for i in range(points)})
    chosen = [steps[i] for i in indexes]
    tokens = np.cumsum([step.answers for step in steps])
    kinds = sorted({kind for step in chosen for kind in step.bytes_by_kind})
    series: dict[str, list[float]] = {
        "step": [i + 1 for i in indexes],
        "seconds": [step.end for step in chosen],
        "tokens": [int(tokens[i]) for i in indexes],
        "running": [step.running for step in chosen],
        "waiting": [step.waiting for step in chosen],
        "resident": [step.resident for step in chosen],
    }
    series |= {f"{kind}_bytes": [step.bytes_by_kind.get(kind, 0) for step in chosen] for kind in kinds}
    return series
