"""Models with recurrent layers: whoever is let in at the experts' cost is worth it, and states kept to resume from cost none."""

from __future__ import annotations

import pytest
from simulations import engine_of

from rimuru_cli.bench.workload.driver import Run, SimulatedClock, run_workload
from rimuru_cli.bench.workload.requests import RequestSpec, generate_requests
from rimuru_cli.engine.admission import PACED_FROM
from rimuru_cli.engine.request import SamplingParams

EXPERTS = 4 * 32


def served(policy: str, spare_mib: int, specs: list[RequestSpec]) -> Run:
    clock = SimulatedClock()
    with engine_of("hybrid", policy, clock, spare_mib) as engine:
        run = run_workload(engine, specs, clock)
        engine.check_integrity()
    return run


def test_paced_leaves_experts_where_they_are_when_they_are_worth_more() -> None:
    specs = generate_requests(150, longest=200, seed=1)
    runs = {policy: served(policy, 90, specs) for policy in ("static", "static:paced", "elastic", "paced")}
    seconds = {policy: run.steps[-1].end for policy, run in runs.items()}
    least = {policy: min(step.resident for step in run.steps) for policy, run in runs.items()}
    assert seconds["paced"] < 0.8 * seconds["elastic"]
    assert seconds["paced"] <= 1.05 * seconds["static:paced"] <= 1.05 * 1.05 * seconds["static"]
    assert least["paced"] > 0.9 * EXPERTS > least["elastic"], "states of newcomers and bookmarks displace few"


def test_few_never_wait_for_that() -> None:
    """Who waits for an answer counts more while few run."""
    clock = SimulatedClock()
    with engine_of("hybrid", "paced", clock, -150) as engine:
        for place in range(PACED_FROM - 1):
            engine.submit([7 * place + i for i in range(30)], SamplingParams(temperature=0.0, max_tokens=40))
        engine.step()
        assert engine.tally().running == PACED_FROM - 1
        while engine.has_work:
            engine.step()
        engine.check_integrity()


@pytest.mark.parametrize("worth", [True, False])
def test_who_is_not_worth_experts_gets_what_is_kept_for_reuse_and_no_more(worth: bool) -> None:
    clock = SimulatedClock()
    with engine_of("hybrid", "elastic", clock, 40) as engine:
        for place in range(6):  # each leaves a bookmark
            engine.submit([13 * place + i for i in range(60)], SamplingParams(temperature=0.0, max_tokens=4))
            while engine.has_work:
                engine.step()
        parts = engine._parts
        assert parts.recurrent is not None and len(parts.recurrent.bookmarks) > 0
        residents, kept, room = parts.residency.num_resident, len(parts.recurrent.bookmarks), parts.recurrent.room
        free = 0
        while room.make(2, free + 1, worth=lambda: worth):
            free += 1
        engine.check_integrity()
        assert (parts.residency.num_resident < residents) is worth
        assert worth or len(parts.recurrent.bookmarks) < kept


@pytest.mark.parametrize("shape", ["small", "hybrid"])
def test_wide_steps_are_expected_to_bring_what_those_displace_who_come(shape: str) -> None:
    seconds, reachable = {}, {}
    for spare in (10, 2000):
        clock = SimulatedClock()
        with engine_of(shape, "static:paced", clock, spare) as static, engine_of(shape, "paced", clock, spare) as engine:
            for one in (static, engine):
                for place in range(80):
                    one.submit([7 * place + i for i in range(30)], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
                for _ in range(4):
                    one.step()
            reachable[spare], seconds[spare] = engine._worth._reachable(60, 1.0)
            beside = static._worth._reachable(60, 1e-9)
            assert beside[1] == 1e-9 and beside[0] <= reachable[spare], "who displaces nobody changes nothing"
    assert seconds[2000] == 1.0 < seconds[10] < 1.1
    assert reachable[10] <= reachable[2000] == 64
