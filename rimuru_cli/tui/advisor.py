"""What is wrong with a run and what to do about it: a pure function of a few facts. It is silent as long as nothing is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rimuru_cli.tui import words
from rimuru_cli.tui.state import PoolState

Topic = Literal["not responding", "pinned refused", "preempted", "context full", "floor reached", "thrashing"]

CONTEXT_SHARE: Final = 0.9
THRASH_HITS: Final = 0.75
THRASH_SECONDS: Final = 30.0
THRASH_SWAPS: Final = 0.1
LINK_SHARE: Final = 0.8
_FREE_BLOCKS: Final = 3


@dataclass(frozen=True)
class Facts:
    """What advice depends on.

    Attributes:
        device: where the model computes; host_tier: where absent experts lie.
        can_control: whether `+` does something.
        responding: whether the engine still moves.
        hit_rate: of the last `THRASH_SECONDS`; None without selections.
        swaps: experts exchanged in that time; selections: of an expert by a token.
        resident_experts, floor_experts: now, and the least that is ever left, over all layers.
        link_rate, link_ceiling: bytes a second.
        free_blocks: free bytes of the pool in expert pages.
        context_used, context_possible, context_limit, model_context: tokens; limit: for this ceiling, possible: at this moment.
        preemptions: of the last minute.
        running: sequences that are scheduled.
    """

    device: str
    host_tier: str
    can_control: bool
    responding: bool
    hit_rate: float | None
    swaps: int
    selections: int
    resident_experts: int
    total_experts: int
    floor_experts: int
    link_rate: float
    link_ceiling: float | None
    free_blocks: int
    context_used: int
    context_possible: int
    context_limit: int
    model_context: int
    preemptions: int
    running: int


@dataclass(frozen=True)
class Advice:
    """What is wrong, and what to do."""

    topic: Topic
    what: str
    do: str


def facts_of(pool: PoolState) -> Facts | None:
    """The facts of the newest frame; None before the first, and once its engine is gone."""
    frame = pool.frame
    if frame is None or pool.gone:
        return None
    engine, now, history = frame.engine, frame.counters, pool.history
    entry = next((entry for entry in pool.engines if entry.engine_id == engine.engine_id), None)
    return Facts(
        device=engine.device,
        host_tier=engine.host_tier,
        can_control=pool.status.can_control,
        responding=entry is None or entry.responding,
        hit_rate=history.hit_rate(THRASH_SECONDS),
        swaps=history.swaps(THRASH_SECONDS),
        selections=history.selections(THRASH_SECONDS),
        resident_experts=now.resident_experts,
        total_experts=now.total_experts,
        floor_experts=engine.floor * engine.num_moe_layers,
        link_rate=now.link_rate,
        link_ceiling=engine.link_ceiling,
        free_blocks=now.free_bytes // max(1, engine.expert_page_bytes),
        context_used=now.context_used,
        context_possible=now.context_possible,
        context_limit=engine.context_limit,
        model_context=engine.model_context,
        preemptions=history.preemptions(60.0),
        running=now.running,
    )


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Everything that is wrong, the worst first; empty when nothing is."""
    found = [
        _not_responding(facts),
        _pinned_refused(facts),
        _preempted(facts),
        _context_full(facts),
        _floor_reached(facts),
        _thrashing(facts),
    ]
    return tuple(advice for advice in found if advice is not None)


def _more_memory(facts: Facts) -> str:
    return "press + for a higher ceiling" if facts.can_control else "start it with a higher --memory"


def _not_responding(facts: Facts) -> Advice | None:
    if facts.responding:
        return None
    return Advice(
        "not responding", "The engine has not moved for some seconds.", "Is it stopped (Ctrl-Z: type fg), or is the machine swapping?"
    )


def _pinned_refused(facts: Facts) -> Advice | None:
    if facts.device == "cpu" or facts.host_tier != "mapped":
        return None
    return Advice(
        "pinned refused",
        "The system refused page-locked memory, so absent experts are read from mapped files, several times slower.",
        "`rimuru doctor` shows how much it allows and how to raise it.",
    )


def _preempted(facts: Facts) -> Advice | None:
    if facts.preemptions == 0:
        return None
    times = "once" if facts.preemptions == 1 else f"{facts.preemptions} times"
    return Advice(
        "preempted",
        f"A sequence had to give up its pages {times} in the last minute and is computed again.",
        f"Run fewer sequences at once, or {_more_memory(facts)}.",
    )


def _context_full(facts: Facts) -> Advice | None:
    if facts.context_possible <= 0 or facts.context_used < CONTEXT_SHARE * facts.context_possible:
        return None
    what = f"The context is close to its limit: {facts.context_used:,} of {facts.context_possible:,} tokens."
    if facts.context_possible >= facts.model_context:
        return Advice("context full", what, "The model itself holds no more: /clear starts anew.")
    if facts.context_possible < facts.context_limit and facts.running > 1:
        return Advice("context full", what, f"Other sequences hold the rest: wait for them, or {_more_memory(facts)}.")
    return Advice("context full", what, f"/clear starts anew; for more, {_more_memory(facts)}.")


def _floor_reached(facts: Facts) -> Advice | None:
    at_floor = facts.resident_experts <= facts.floor_experts < facts.total_experts
    if not at_floor or facts.free_blocks > _FREE_BLOCKS or facts.running == 0:
        return None
    return Advice(
        "floor reached",
        f"Experts are at their floor ({facts.floor_experts:,} resident): no more can make room for the conversation.",
        f"/clear or a shorter conversation brings them back; else {_more_memory(facts)}.",
    )


def _thrashing(facts: Facts) -> Advice | None:
    if facts.hit_rate is None or facts.hit_rate >= THRASH_HITS:
        return None
    # Misses alone need not hurt: on the CPU they are read where they lie. What hurts is that every other expert is moved.
    exchanged = facts.swaps >= max(1.0, THRASH_SWAPS * facts.selections)
    link_full = facts.link_ceiling is not None and facts.link_rate >= LINK_SHARE * facts.link_ceiling
    if not exchanged and not link_full:
        return None
    how = "the link is full" if link_full else f"{facts.swaps:,} experts were exchanged in {THRASH_SECONDS:.0f} s"
    return Advice(
        "thrashing",
        f"The cache thrashes: only {words.percent(facts.hit_rate)} hits, and {how}.",
        f"{_more_memory(facts).capitalize()}, or record what you do with `rimuru profile-hotset`.",
    )
