"""Feed a list of requests to an engine as they arrive and write down what happens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rimuru_cli.bench.workload.metrics import RequestRecord, StepRecord
from rimuru_cli.bench.workload.requests import RequestSpec
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import Request, SamplingParams
from rimuru_models.errors import DoesNotFitError


class Clock(Protocol):
    """Time as the run has it."""

    def now(self) -> float:
        """Seconds from the start of the run."""
        ...

    def sleep_until(self, moment: float) -> None:
        """Let time pass; nothing is to be computed before `moment`."""
        ...


class RealClock:
    """Time as the machine has it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """See `Clock.now`."""
        return time.perf_counter() - self._start

    def sleep_until(self, moment: float) -> None:
        """See `Clock.sleep_until`."""
        time.sleep(max(0.0, moment - self.now()))


class SimulatedClock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now += seconds

    def sleep_until(self, moment: float) -> None:
        """See `Clock.sleep_until`."""
        self._now = max(self._now, moment)


@dataclass(frozen=True)
class Run:
    """Everything that was written down."""

    records: list[RequestRecord]
    steps: list[StepRecord]
    preemptions: int


def run_workload(
    engine: Engine,
    specs: Sequence[RequestSpec],
    clock: Clock,
    *,
    seed: int = 0,
    each: Callable[[int, int], None] | None = None,
) -> Run:
    """Serve all requests; every one generates exactly its answer's tokens.

    Args:
        specs: in any order. A request longer than the engine's context is refused before anything runs.
        seed: of the prompts' token ids; prompts have nothing in common, so none is answered from the cache of another.
        each: told (requests ended, requests in all) after each step that ended one.

    Raises:
        DoesNotFitError: a request is longer than the context that the engine's memory allows.
    """
    limit = engine.info.context_limit
    for spec in specs:
        if spec.prompt_tokens + spec.answer_tokens > limit:
            raise DoesNotFitError(
                f"A request of {spec.prompt_tokens} + {spec.answer_tokens} tokens is longer than the context of {limit} tokens here.",
                hint="Give a larger ceiling, or limit the lengths with --longest.",
            )
    random = np.random.default_rng(seed)
    waiting = deque(sorted((RequestRecord(spec) for spec in specs), key=lambda record: record.spec.arrival))
    records, running = list(waiting), dict[int, RequestRecord]()
    steps: list[StepRecord] = []
    before = engine.tally()
    expert_bytes = engine.info.expert_bytes
    first_preemptions, ended = before.preemptions, 0
    while waiting or engine.has_work:
        now = clock.now()
        while waiting and waiting[0].spec.arrival <= now:
            record = waiting.popleft()
            running[_submit(engine, record.spec, random).id] = record
        if not engine.has_work:
            clock.sleep_until(waiting[0].spec.arrival)
            continue
        outputs = engine.step()
        now = clock.now()
        for output in outputs:
            record = running[output.request.id]
            if output.token_id is not None:
                record.token_times.append(now)
            if output.finish_reason is not None:
                del running[output.request.id]
                ended += 1
                if each is not None:
                    each(ended, len(records))
        after = engine.tally()
        steps.append(
            StepRecord(
                end=now,
                prefill_rows=after.prefill_rows - before.prefill_rows,
                decode_rows=after.decode_rows - before.decode_rows,
                answers=len(outputs),
                running=after.running,
                waiting=after.waiting,
                bytes_by_kind={
                    "expert": after.resident * expert_bytes,
                    "kv": after.kv_bytes,
                    "states": after.state_bytes,
                    "buffer": after.buffer_bytes,
                    "free": after.free_bytes,
                },
                resident=after.resident,
                uses=after.uses - before.uses,
                hits=after.hits - before.hits,
                link_bytes=after.link_bytes - before.link_bytes,
            )
        )
        before = after
    return Run(records, steps, before.preemptions - first_preemptions)


def _submit(engine: Engine, spec: RequestSpec, random: np.random.Generator) -> Request:
    prompt = random.integers(0, engine.vocab_size, spec.prompt_tokens).tolist()
    return engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=spec.answer_tokens, ignore_eos=True))
