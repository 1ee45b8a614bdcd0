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
from rimuru_cli.engine.engine import Engine, TokenOutput
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
    single: bool = False,
) -> Run:
    """Serve all requests; every one generates exactly its answer's tokens.

    Args:
        specs: in any order. A request longer than the engine's context is refused before anything runs.
        seed: of the prompts' token ids; prompts have nothing in common, so none is answered from the cache of another.
        each: told (requests ended, requests in all) about each that ended.
        single: take every step by itself, also where the engine can take several in one go; what comes out is the same.

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
    return _Server(engine, specs, clock, np.random.default_rng(seed), each or (lambda ended, total: None)).serve(single=single)


class _Server:
    """One run of `run_workload`."""

    def __init__(
        self, engine: Engine, specs: Sequence[RequestSpec], clock: Clock, random: np.random.Generator, each: Callable[[int, int], None]
    ) -> None:
        self._engine, self._clock, self._random, self._each = engine, clock, random, each
        self._records = sorted((RequestRecord(spec) for spec in specs), key=lambda record: record.spec.arrival)
        self._coming = deque(self._records)
        self._served: dict[int, RequestRecord] = {}
        self._steps: list[StepRecord] = []
        self._ended = 0
        self._before = engine.tally()
        self._expert_bytes = engine.info.expert_bytes

    def serve(self, *, single: bool) -> Run:
        """See `run_workload`."""
        engine, clock, coming = self._engine, self._clock, self._coming
        preemptions = self._before.preemptions
        while coming or engine.has_work:
            now = clock.now()
            while coming and coming[0].spec.arrival <= now:
                record = coming.popleft()
                self._served[_submit(engine, record.spec, self._random).id] = record
            if not engine.has_work:
                clock.sleep_until(coming[0].spec.arrival)
                continue
            outputs = engine.step()
            now = clock.now()
            for output in outputs:
                if output.token_id is not None:
                    self._served[output.request.id].token_times.append(now)
                if output.finish_reason is not None:
                    self._end(output.request)
            self._note(now, len(outputs))
            if not single and not (coming and coming[0].spec.arrival <= now):
                self._steps_alike()
        return Run(self._records, self._steps, self._before.preemptions - preemptions)

    def _steps_alike(self) -> None:
        """Take all steps that the engine can take in one go before the next request comes."""
        clock, times, coming = self._clock, [], self._coming
        running = self._before.running

        def told(ended: list[TokenOutput]) -> bool:
            nonlocal running
            now = clock.now()
            times.append(now)
            self._note(now, running)
            running -= len(ended)
            for output in ended:
                self._served[output.request.id].token_times.extend(times)
                self._end(output.request)
            return not coming or coming[0].spec.arrival > now

        for request in self._engine.steps_alike(told):
            self._served[request.id].token_times.extend(times)

    def _end(self, request: Request) -> None:
        del self._served[request.id]
        self._ended += 1
        self._each(self._ended, len(self._records))

    def _note(self, now: float, answers: int) -> None:
        before, after = self._before, self._engine.tally()
        self._before = after
        self._steps.append(
            StepRecord(
                end=now,
                prefill_rows=after.prefill_rows - before.prefill_rows,
                decode_rows=after.decode_rows - before.decode_rows,
                answers=answers,
                running=after.running,
                waiting=after.waiting,
                bytes_by_kind={
                    "expert": after.resident * self._expert_bytes,
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


def _submit(engine: Engine, spec: RequestSpec, random: np.random.Generator) -> Request:
    prompt = random.integers(0, engine.vocab_size, spec.prompt_tokens).tolist()
    return engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=spec.answer_tokens, ignore_eos=True))
