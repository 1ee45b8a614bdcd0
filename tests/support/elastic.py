"""Conversations that make sequences and experts compete, and an adjuster that moves things at random at every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from engines import GREEDY, run_all

from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.adjuster import AdjusterStats, Decision

LENGTHS = ((70, 40), (9, 60), (33, 12))
# Just enough for the longest conversation, so that in the small pools sequences and experts really compete.
CONTEXT = 144


def prompts_of(seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(128) for _ in range(length)] for length, _ in LENGTHS]


def converse(engine: Engine, seed: int = 1) -> list[list[int]]:
    """Three conversations that begin and end at different times, then a second turn of the first."""
    prompts = prompts_of(seed)
    requests = []

    def join() -> None:
        if len(requests) < len(prompts) and (not requests or len(requests[-1].output_ids) >= 5):
            index = len(requests)
            requests.append(engine.submit(prompts[index], replace(GREEDY, max_tokens=LENGTHS[index][1])))

    join()
    run_all(engine, join)
    second = engine.submit([*prompts[0], *requests[0].output_ids, 5, 6, 7], GREEDY)
    run_all(engine)
    return [list(r.output_ids) for r in (*requests, second)]


def adversary(seed: int) -> Callable[[AdjusterStats], Decision]:
    """Shrinks and expands at random, at every step, as far as the engine lets it."""
    generator = random.Random(seed)

    def decide(stats: AdjusterStats) -> Decision:
        if generator.random() < 0.5:
            return Decision(generator.randint(0, 6), 0, "sequences need pages")
        return Decision(0, generator.randint(0, 6), "free blocks to spare")

    return decide
