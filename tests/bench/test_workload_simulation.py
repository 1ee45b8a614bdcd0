"""The simulated engine: real scheduling and real pages, times from a formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from simulations import SMALL

from rimuru_cli.bench.synthetic import SHAPES
from rimuru_cli.bench.workload.cost import H200, CostModel, StepLoad
from rimuru_cli.bench.workload.driver import SimulatedClock, run_workload
from rimuru_cli.bench.workload.policies import Policy, parse_policies
from rimuru_cli.bench.workload.requests import RequestSpec, generate_requests
from rimuru_cli.bench.workload.routing import FEW, TOPICS, SyntheticRouting, inclusion
from rimuru_cli.bench.workload.run import prompt_steps
from rimuru_cli.bench.workload.simulated import simulated_engine
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device.choice import MAX_ON_DEMAND_ROWS
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.fit.locality import recorded_hits
from rimuru_cli.fit.placement import CUDA_PROGRAM_BYTES, place_on_gpu
from rimuru_cli.fit.shape import shape_of
from rimuru_cli.fit.speed import gpu_token_seconds
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError

GIB = 1 << 30


def small_model() -> ModelConfig:
    return ModelConfig.from_dict(SMALL, where="small")


def small_engine(policy: str, clock: SimulatedClock, spare_mib: int = 24, sequences: int = 64, **changes: Any) -> Engine:
    """32 experts of 1.5 MiB in each of 4 layers; all of them fit, and `spare_mib` beside them."""
    model = small_model()
    chosen = parse_policies(policy)[0]
    config = EngineConfig(max_sequences=sequences, context=512, device_batch_tokens=256, **changes)
    everything = chosen.configure(replace(config, pool_bytes=4 * 32 * 3 * (512 * 512 * 2) + spare_mib * (1 << 20)), model)
    return simulated_engine("small", model, everything, H200, clock, profiled=chosen.profiled)


def specs(count: int = 24) -> list[RequestSpec]:
    return generate_requests(count, longest=200, seed=1)


@pytest.mark.parametrize("policy", ["static", "fixed:25%", "elastic", "paced", "elastic:no-profile:no-live:no-hysteresis:eol=20"])
def test_pages_and_tables_agree_after_every_step(policy: str) -> None:
    clock = SimulatedClock()
    with small_engine(policy, clock) as engine:
        for spec in specs(12):
            engine.submit([i % 1000 for i in range(spec.prompt_tokens)], SamplingParams(temperature=0.0, max_tokens=spec.answer_tokens))
        while engine.has_work:
            before = clock.now()
            engine.step()
            engine.check_integrity()
            assert clock.now() > before, "a step takes time"
        assert engine.snapshot().running == 0


@pytest.mark.parametrize("policy", ["static", "fixed:25%", "elastic", "paced"])
def test_every_request_gets_its_tokens_whatever_the_policy(policy: str) -> None:
    clock = SimulatedClock()
    with small_engine(policy, clock) as engine:
        run = run_workload(engine, specs(), clock)
    assert [len(r.token_times) for r in run.records] == [r.spec.answer_tokens for r in run.records]
    assert all(a <= b for r in run.records for a, b in zip(r.token_times, r.token_times[1:], strict=False))
    uses = sum(step.uses for step in run.steps)
    assert uses == sum(step.prefill_rows + step.decode_rows for step in run.steps) * 4 * 4
    assert 0 < sum(step.hits for step in run.steps) <= uses


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        clock = SimulatedClock()
        with small_engine("elastic", clock) as engine:
            runs.append(run_workload(engine, specs(), clock))
    assert runs[0].steps == runs[1].steps


@pytest.mark.parametrize(("policy", "residents"), [("static", 4 * 32), ("fixed:25%", 4 * 24)])
def test_static_and_fixed_never_move(policy: str, residents: int) -> None:
    clock = SimulatedClock()
    with small_engine(policy, clock) as engine:
        run = run_workload(engine, specs(), clock)
    assert {step.resident for step in run.steps} == {residents}
    assert (sum(step.link_bytes for step in run.steps) == 0) == (policy == "static")


def test_elastic_serves_more_at_once_in_fewer_steps_and_gives_experts_back() -> None:
    peaks, steps, resident = {}, {}, {}
    for policy in ("static", "fixed:25%", "elastic"):
        clock = SimulatedClock()
        with small_engine(policy, clock, spare_mib=16) as engine:
            run = run_workload(engine, specs(40), clock)
        peaks[policy], steps[policy] = max(s.running for s in run.steps), len(run.steps)
        resident[policy] = [s.resident for s in run.steps]
    assert peaks["static"] < peaks["fixed:25%"] <= peaks["elastic"]
    assert steps["static"] > steps["fixed:25%"] >= steps["elastic"]
    assert min(resident["elastic"]) < resident["elastic"][-1], "experts come back when the load is over"


def test_paced_leaves_experts_where_they_are_when_they_are_worth_more() -> None:
    seconds, least = {}, {}
    for policy in ("static:paced", "elastic", "paced"):
        clock = SimulatedClock()
        with small_engine(policy, clock, spare_mib=16) as engine:
            run = run_workload(engine, specs(150), clock)
        seconds[policy], least[policy] = run.steps[-1].end, min(step.resident for step in run.steps)
    assert seconds["paced"] < 0.6 * seconds["elastic"]
    assert seconds["paced"] <= 1.02 * seconds["static:paced"]
    assert least["paced"] >= 0.9 * least["static:paced"] > least["elastic"], "what it lets in does not make the next one worth it"


def test_paced_stays_within_captured_steps_unless_wide_ones_are_faster() -> None:
    """With all experts beside 100 sequences a step takes as long as its launches; with few, as long as their copies."""
    many = [RequestSpec(0.0, 20, 60)] * 100
    peaks = {}
    for policy, spare in (("static", 200), ("static:paced", 200), ("paced", 200), ("paced", -40)):
        clock = SimulatedClock()
        with small_engine(policy, clock, spare_mib=spare, sequences=100) as engine:
            peaks[policy, spare] = max(step.running for step in run_workload(engine, many, clock).steps)
    assert peaks["static", 200] == 100
    assert peaks["static:paced", 200] == peaks["paced", 200] == MAX_ON_DEMAND_ROWS
    assert peaks["paced", -40] > MAX_ON_DEMAND_ROWS


def test_paced_reads_fewer_prompts_at_a_time_and_more_of_them_together() -> None:
    """Where everybody waits while a prompt is read, newcomers come in groups."""
    prompts, seconds = {}, {}
    for policy in ("static", "static:paced"):
        clock = SimulatedClock()
        with small_engine(policy, clock, spare_mib=24) as engine:
            run = run_workload(engine, specs(150), clock)
        prompts[policy], seconds[policy] = sum(step.prefill_rows > 0 for step in run.steps), run.steps[-1].end
    assert prompts["static:paced"] < 0.9 * prompts["static"]
    assert seconds["static:paced"] < seconds["static"]


def test_a_request_that_the_memory_left_cannot_hold_is_refused_before_anything_runs() -> None:
    model = ModelConfig.from_dict(SHAPES["qwen1.5-moe-a2.7b"], where="shape")
    config = EngineConfig(context=4096, expert_offload_limit=0)
    format_, limit = shape_of(model, None).computing, config.device_batch_tokens
    plan = plan_device_memory(model, format_, config, program=CUDA_PROGRAM_BYTES, free=80 * GIB, max_batch_tokens=limit)
    clock = SimulatedClock()
    with simulated_engine("shape", model, replace(config, memory_bytes=plan.minimum), H200, clock) as engine:
        with pytest.raises(DoesNotFitError, match="3000"):
            run_workload(engine, [RequestSpec(0.0, 10, 3), RequestSpec(0.0, 1000, 3000)], clock)
        assert not engine.has_work


def test_requests_that_come_later_are_not_served_earlier() -> None:
    clock = SimulatedClock()
    late = [RequestSpec(5.0, 20, 3), RequestSpec(0.0, 20, 3)]
    with small_engine("paced", clock) as engine:
        run = run_workload(engine, late, clock)
    first, second = run.records
    assert first.token_times[-1] < 5.0 <= second.token_times[0]


def test_chances_are_those_of_the_first_of_exponential_clocks() -> None:
    random = np.random.default_rng(0)
    weights = np.exp(random.normal(0, 1, 12))
    rings = random.exponential(1 / weights, (20_000, 12)).argsort(1)[:, :3]
    counted = np.bincount(rings.reshape(-1), minlength=12) / 20_000
    chances = inclusion(weights, 3)
    assert chances.sum() == pytest.approx(3.0)
    assert np.abs(chances - counted).max() < 0.06  # equal times for all in the place of the third ring
    assert np.array_equal(inclusion(weights, 12), np.ones(12))


def test_sums_and_single_tokens_are_drawn_from_the_same_routers() -> None:
    routing = SyntheticRouting(3, 40, 4, seed=1)
    tokens = np.zeros(TOPICS, dtype=np.float32)
    tokens[2] = 400
    sums = routing.draw_sums(tokens).uses
    each = np.zeros_like(sums)
    for request in range(400):
        each += routing.draw_each({request: 2}).uses
    assert sums.sum() == pytest.approx(400 * 3 * 4, rel=1e-3) and each.sum() == 400 * 3 * 4
    assert np.corrcoef(sums.reshape(-1), each.reshape(-1))[0, 1] > 0.97


@pytest.mark.parametrize("share", [0.216, 0.364, 0.512])
def test_hits_of_one_conversation_are_near_the_recorded_ones(share: float) -> None:
    """A layer's cache of a fixed size, as the recording was replayed through (`fit.locality`)."""
    routing = SyntheticRouting(12, 128, 6, seed=0)
    size, scores = round(share * 128), np.zeros((12, 128))
    resident = np.zeros((12, 128), dtype=bool)
    resident[:, :size] = True
    hits = uses = 0.0
    for token in range(156):
        drawn = routing.draw_each({1: 3})
        scores = scores * 0.95 + drawn.uses / 6
        if token >= 28:
            hits, uses = hits + drawn.uses[resident].sum(), uses + drawn.uses.sum()
        for layer in range(12):
            missed = np.flatnonzero(drawn.touched[layer] & ~resident[layer])
            spare = np.flatnonzero(resident[layer] & ~drawn.touched[layer])
            spare = spare[scores[layer, spare].argsort()][: len(missed)]
            resident[layer, spare], resident[layer, missed] = False, True
    assert hits / uses == pytest.approx(recorded_hits(share), abs=0.05)


def test_one_token_costs_what_fit_says() -> None:
    model = ModelConfig.from_dict(SHAPES["qwen1.5-moe-a2.7b"], where="shape")
    shape = shape_of(model, None)
    cost = CostModel(shape, H200)
    load = StepLoad(rows=1, sequences=1, visible=1001, held=1000, touched=np.full(24, 4), captured=True)
    expected = gpu_token_seconds(place_on_gpu(shape, H200, 64 * GIB), H200, 1000, 1.0)
    assert cost.on_demand(cost.compute(load), 0) == pytest.approx(expected, rel=1e-3)


def test_streaming_hides_behind_arithmetic_and_waits_where_it_does_not() -> None:
    cost = CostModel(shape_of(small_model(), None), H200)
    copy = cost.expert_bytes / cost.copy
    absent = np.array([2, 2, 2, 2])
    compute = np.full(4, 10 * copy)
    assert cost.streamed(compute, np.zeros(4, dtype=np.int64), 0) == pytest.approx(40 * copy)
    # Only the first layer's experts are waited for.
    assert cost.streamed(compute, absent, 4) == pytest.approx(42 * copy)
    # Arithmetic that takes no time: all copies, one after another.
    assert cost.streamed(np.zeros(4), absent, 4) == pytest.approx(8 * copy)
    # Places for one layer only: nothing is copied while it computes.
    assert cost.streamed(compute, absent, 2) == pytest.approx(48 * copy)


def test_names_of_policies_read_back() -> None:
    for policy in (
        Policy("static"),
        Policy("fixed", 0.25),
        Policy("elastic", live=False),
        Policy("paced", profiled=False, hysteresis=False, eol=3),
        Policy("static", admission=True),
        Policy("fixed", 0.5, live=False, admission=True),
    ):
        assert parse_policies(policy.name) == [policy]
    assert len(parse_policies("fixed")) > 3 and {p.kind for p in parse_policies("fixed")} == {"fixed"}


def test_loading_buffers_stay_lent_from_one_piece_of_a_prompt_to_the_next_and_go_back_when_words_come() -> None:
    clock = SimulatedClock()
    with small_engine("elastic", clock, spare_mib=-60) as engine:
        request = engine.submit([i % 1000 for i in range(500)], SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        first = engine.tally()
        engine.step()
        second = engine.tally()
        engine.check_integrity()
        assert request.output_ids and first.buffer_bytes > 0
        assert second.buffer_bytes == first.buffer_bytes
        assert 0 <= first.resident - second.resident <= 1, "nobody went and came in between, but for the adjuster's reserve"
        for _ in range(3):
            engine.step()
        engine.check_integrity()
        assert engine.tally().buffer_bytes == 0 and engine.tally().resident > first.resident


def test_text_kept_for_reuse_makes_room_for_experts_where_many_run_and_stays_where_few_do() -> None:
    kept = {}
    for later in (1, 10):
        clock = SimulatedClock()
        with small_engine("elastic", clock, spare_mib=4) as engine:
            prompts = [[(7 * i + 131 * p) % 1000 for i in range(200)] for p in range(10)]
            params = SamplingParams(temperature=0.0, max_tokens=40)
            for prompt in prompts:
                engine.submit(prompt, params)
            while engine.has_work:
                engine.step()
            for p in range(later):
                engine.submit([5 + p, *range(20)], params)
            while engine.has_work:
                engine.step()
            engine.check_integrity()
            kept[later] = engine.snapshot().cached_kv_bytes, engine.tally().resident
    assert kept[1][0] > kept[10][0] and kept[1][1] < kept[10][1]


@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_prompts_that_warm_up_come_to_every_size_of_a_step(tokens: int) -> None:
    longest = 70
    groups = prompt_steps([RequestSpec(0.0, longest, 5), RequestSpec(0.0, 3, 500)], tokens)
    sizes = [sum(spec.prompt_tokens for spec in group) for group in groups]
    assert sizes == sorted(set(sizes)) and max(sizes) == max(16, tokens) and {16, 15} <= set(sizes)
    assert all(later <= 2 * earlier + 1 for earlier, later in pairwise(sizes))
    assert all(spec.prompt_tokens <= longest and spec.answer_tokens == 1 for group in groups for spec in group)


def test_what_is_foreseen_is_what_is_drawn_and_no_more_than_that_is_used_up() -> None:
    tokens, few = np.bincount([1, 1, 5], minlength=TOPICS).astype(np.float32), dict.fromkeys(range(FEW), 2)
    one, other = SyntheticRouting(3, 40, 4, seed=1), SyntheticRouting(3, 40, 4, seed=1)
    foreseen, uses = one.foresee(tokens, 6)
    one.use(4)
    drawn = [other.draw_sums(tokens) for _ in range(4)]
    assert all(np.array_equal(a, b.touched) and np.array_equal(uses, b.uses) for a, b in zip(foreseen[:4], drawn, strict=True))
    assert np.array_equal(one.draw_each(few).uses, other.draw_each(few).uses)
    assert np.array_equal(one.draw_sums(tokens).touched, other.draw_sums(tokens).touched)


def test_costs_of_several_steps_are_those_of_each() -> None:
    cost = CostModel(shape_of(small_model(), None), H200)
    touched, held = np.array([[4, 9, 32, 1], [30, 2, 2, 7]]), np.array([[700], [5000]])
    together = cost.compute(StepLoad(20, 20, held, held, touched, True))
    for step in range(2):
        alone = cost.compute(StepLoad(20, 20, int(held[step, 0]), int(held[step, 0]), touched[step], True))
        assert np.array_equal(together[step], alone) and float(alone.sum()) == float(together.sum(1)[step])
