"""Simulated steps that are taken together: what comes out is what single steps give, in every figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulations import engine_of

from rimuru_cli.bench.workload.driver import Run, SimulatedClock, run_workload
from rimuru_cli.bench.workload.requests import RequestSpec, generate_requests
from rimuru_cli.engine.engine import Engine, TokenOutput
from rimuru_cli.engine.request import Request, SamplingParams


def both(shape: str, policy: str, spare_mib: int, specs: list[RequestSpec]) -> tuple[Run, Run, list[float]]:
    """The same served by single steps and by steps together, and when each was over."""
    runs, ends = [], []
    for single in (True, False):
        clock = SimulatedClock()
        with engine_of(shape, policy, clock, spare_mib) as engine:
            runs.append(run_workload(engine, specs, clock, single=single))
            engine.check_integrity()
            ends.append(clock.now())
    return runs[0], runs[1], ends


POLICIES = ["static", "static:paced", "fixed:25%", "elastic", "paced", "elastic:no-profile:no-live:no-hysteresis", "paced:eol=8"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("shape", "spare"), [("small", 12), ("hybrid", 90)])
def test_steps_together_are_single_steps(shape: str, spare: int, policy: str) -> None:
    single, together, ends = both(shape, policy, spare, generate_requests(40, longest=200, seed=1))
    assert together.steps == single.steps and together.records == single.records and ends[0] == ends[1]
    assert together.preemptions == single.preemptions
    assert any(len(record.token_times) > 100 for record in together.records)


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_requests_that_come_meanwhile_are_served_in_time(arrivals: Any) -> None:
    specs = generate_requests(40, longest=200, seed=2, rate=150.0, arrivals=arrivals)
    single, together, _ = both("small", "paced", 12, specs)
    assert together.steps == single.steps and together.records == single.records
    assert len({step.running for step in single.steps}) > 5 and max(step.end for step in single.steps) > specs[-1].arrival


def test_where_pages_run_out_the_youngest_are_preempted_as_ever() -> None:
    specs = [RequestSpec(0.0, 40, 200)] * 24
    single, together, _ = both("small", "static", 12, specs)
    assert single.preemptions > 0
    assert together.steps == single.steps and together.preemptions == single.preemptions


def test_most_steps_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"single": 0}
    step = Engine.step

    def counted(self: Engine) -> list[TokenOutput]:
        taken["single"] += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    clock = SimulatedClock()
    with engine_of("small", "paced", clock, 12) as engine:
        run = run_workload(engine, generate_requests(40, longest=200, seed=1), clock)
    assert taken["single"] < len(run.steps) / 4


def served(engine: Engine, *, together: bool) -> list[Request]:
    """Requests of three lengths, served to their ends."""
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [
        engine.submit([7 * place + i for i in range(30)], replace(params, max_tokens=limit)) for place, limit in enumerate((3, 40, 90))
    ]
    while engine.has_work:
        engine.step()
        if together:
            engine.steps_alike(lambda ended: True)
    return requests


def test_what_a_request_knows_of_itself_is_the_same() -> None:
    found = []
    for together in (False, True):
        clock = SimulatedClock()
        with engine_of("small", "fixed:25%", clock, 12) as engine:
            found.append(
                [(r.output_ids, r.timings, r.expert_uses, r.expert_hits, r.finish_reason) for r in served(engine, together=together)]
            )
    assert found[0] == found[1]
    assert [len(row[0]) for row in found[0]] == [3, 40, 90] and all(row[2] > row[3] > 0 for row in found[0])


def test_whoever_is_told_may_stop_between_two_steps() -> None:
    clock = SimulatedClock()
    with engine_of("small", "paced", clock, 12) as engine:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=50)
        request = engine.submit(list(range(20)), params)
        engine.step()
        seen: list[int] = []

        def told(ended: list[TokenOutput]) -> bool:
            seen.append(len(ended))
            return len(seen) < 5

        assert engine.steps_alike(told) == [request]
        engine.check_integrity()
        assert seen == [0] * 5 and len(request.output_ids) == 6
        engine.cancel(request)
        assert engine.steps_alike(told) == [] and len(seen) == 5


@pytest.mark.parametrize("changes", [{"ignore_eos": False}, {"temperature": 1.0}])
def test_answers_that_somebody_looks_at_are_not_taken_together(changes: dict[str, Any]) -> None:
    clock = SimulatedClock()
    with engine_of("small", "paced", clock, 12) as engine:
        engine.submit(list(range(20)), SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 50, **changes}))
        engine.step()
        assert engine.steps_alike(lambda ended: True) == []
