"""The advisor: silent as long as nothing is wrong, and for each thing that can be wrong one sentence and what to do."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tui_parts import entry_of, played, small_engine

from rimuru_cli.tui.advisor import Facts, advise, facts_of
from rimuru_cli.tui.messages import SourceStatus
from rimuru_cli.tui.state import PoolState

WELL = Facts(
    device="cuda:0",
    host_tier="pinned",
    can_control=True,
    responding=True,
    hit_rate=0.95,
    swaps=500,
    selections=20_000,
    resident_experts=2000,
    total_experts=6144,
    floor_experts=768,
    link_rate=5e9,
    link_ceiling=25e9,
    free_blocks=5,
    context_used=12_000,
    context_possible=32_000,
    context_limit=32_000,
    model_context=131_072,
    preemptions=0,
    running=1,
)
WRONG = {
    "not responding": replace(WELL, responding=False),
    "pinned refused": replace(WELL, host_tier="mapped"),
    "preempted": replace(WELL, preemptions=2),
    "context full": replace(WELL, context_used=29_000),
    "floor reached": replace(WELL, resident_experts=768, free_blocks=0),
    "thrashing": replace(WELL, hit_rate=0.4, swaps=2500),
}


@pytest.mark.parametrize(
    "facts",
    [
        WELL,
        replace(WELL, device="cpu", host_tier="mapped"),  # on the CPU that is how it should be
        replace(WELL, hit_rate=None, swaps=0, running=0, context_used=0),
        replace(WELL, hit_rate=0.44, swaps=359, selections=114_000, link_rate=1e9),  # many misses, but they hurt nobody
        replace(WELL, hit_rate=0.4, link_ceiling=None, link_rate=20e9, swaps=10),
        replace(WELL, resident_experts=768, free_blocks=0, running=0),  # nobody waits for anything
        replace(WELL, resident_experts=768, free_blocks=50),
        replace(WELL, resident_experts=6144, total_experts=6144, floor_experts=6144, free_blocks=0),  # everything is resident
        replace(WELL, context_used=0, context_possible=0),
        replace(WELL, context_used=28_799),
    ],
)
def test_it_is_silent_when_nothing_is_wrong(facts: Facts) -> None:
    assert advise(facts) == ()


@pytest.mark.parametrize("topic", WRONG)
def test_each_thing_has_its_advice(topic: str) -> None:
    (advice,) = advise(WRONG[topic])
    assert advice.topic == topic
    assert advice.what.endswith(".") and len(advice.what) < 120
    assert advice.do and advice.do != advice.what


def test_what_to_do_is_something_that_can_be_done() -> None:
    assert "rimuru doctor" in advise(WRONG["pinned refused"])[0].do
    assert "press +" in advise(WRONG["context full"])[0].do and "/clear" in advise(WRONG["context full"])[0].do
    assert "press +" in advise(WRONG["floor reached"])[0].do
    assert "Press +" in advise(WRONG["thrashing"])[0].do and "profile-hotset" in advise(WRONG["thrashing"])[0].do
    for topic in ("floor reached", "thrashing", "preempted", "context full"):
        do = advise(replace(WRONG[topic], can_control=False))[0].do
        assert "--memory" in do and " + " not in do, "a key that does nothing is no advice"


def test_the_context_is_full_for_different_reasons() -> None:
    own = advise(replace(WELL, context_used=120_000, context_possible=131_072, context_limit=131_072))[0]
    assert "model itself" in own.do and "+" not in own.do
    others = advise(replace(WELL, context_used=9_500, context_possible=10_000, running=2))[0]
    assert "Other sequences" in others.do
    assert "9,500 of 10,000" in others.what


def test_thrashing_by_a_full_link() -> None:
    advice = advise(replace(WELL, hit_rate=0.4, swaps=0, link_rate=24e9))[0]
    assert advice.topic == "thrashing" and "link is full" in advice.what


def test_the_worst_comes_first() -> None:
    everything = replace(
        WELL, responding=False, host_tier="mapped", preemptions=1, context_used=31_999, resident_experts=768, free_blocks=0, hit_rate=0.1
    )
    everything = replace(everything, swaps=10_000)
    assert [advice.topic for advice in advise(everything)] == list(WRONG)


@settings(max_examples=40)
@given(
    st.builds(
        Facts,
        device=st.sampled_from(["cpu", "cuda:0"]),
        host_tier=st.sampled_from(["pinned", "mapped"]),
        can_control=st.booleans(),
        responding=st.booleans(),
        hit_rate=st.one_of(st.none(), st.floats(0, 1)),
        link_rate=st.floats(0, 1e12),
        link_ceiling=st.one_of(st.none(), st.floats(1, 1e12)),
        **{field.name: st.integers(0, 10**7) for field in fields(Facts) if field.type == "int"},
    )
)
def test_it_copes_with_any_facts(facts: Facts) -> None:
    topics = [advice.topic for advice in advise(facts)]
    assert len(topics) == len(set(topics))


def test_facts_come_from_the_newest_frame() -> None:
    state = PoolState(clock=lambda: 0.0, status=SourceStatus("live", can_control=True))
    assert facts_of(state) is None
    for frame in played(small_engine(), ("long context", 3), ("decode", 20)):
        state.add(frame)
    facts = facts_of(state)
    assert facts is not None and facts.can_control and facts.responding
    assert facts.floor_experts == frame.engine.floor * frame.engine.num_moe_layers
    assert facts.context_used == frame.counters.context_used and facts.hit_rate is not None
    state.engines = (entry_of(frame, responding=False),)
    facts = facts_of(state)
    assert facts is not None and not facts.responding
    state.status = SourceStatus("waiting")
    assert facts_of(state) is None, "an engine that has ended needs no advice"
