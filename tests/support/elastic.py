"""Conversations that make sequences and experts compete, and an adjuster that moves things at random at every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from engines import GREEDY, run_all

from rimuru_cli.engine.ceiling import MemoryChange
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.adjuster import AdjusterStats, Decision
from rimuru_models.errors import DoesNotFitError

LENGTHS = ((70, 40), (9, 60), (33, 12))
# Just enough for the longest conversation, so that in the small pools sequences and experts really compete.
CONTEXT = 144


def prompts_of(seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(128) for _ in range(length)] for length, _ in LENGTHS]


def converse(engine: Engine, seed: int = 1, each_step: Callable[[], None] | None = None) -> list[list[int]]:
    """Three conversations that begin and end at different times, then a second turn of the first."""
    prompts = prompts_of(seed)
    requests = []

    def join() -> None:
        if len(requests) < len(prompts) and (not requests or len(requests[-1].output_ids) >= 5):
            index = len(requests)
            requests.append(engine.submit(prompts[index], replace(GREEDY, max_tokens=LENGTHS[index][1])))
        if each_step is not None:
            each_step()

    join()
    run_all(engine, join)
    second = engine.submit([*prompts[0], *requests[0].output_ids, 5, 6, 7], GREEDY)
    run_all(engine, each_step)
    return [list(r.output_ids) for r in (*requests, second)]


def adversary(seed: int) -> Callable[[AdjusterStats], Decision]:
    """Shrinks and expands at random, at every step, as far as the engine lets it."""
    generator = random.Random(seed)

    def decide(stats: AdjusterStats) -> Decision:
        if generator.random() < 0.5:
            return Decision(generator.randint(0, 6), 0, "sequences need pages")
        return Decision(0, generator.randint(0, 6), "free blocks to spare")

    return decide


class CeilingMover:
    """Moves the memory ceiling at random between the steps of an engine, up and down, sometimes to where it cannot go.

    Attributes:
        changes: what the moves changed.
        refused: moves that were refused.
    """

    def __init__(self, engine: Engine, seed: int, *, highest: int, share: float = 0.5) -> None:
        self._engine, self._random, self._highest, self._share = engine, random.Random(seed), highest, share
        self.changes: list[MemoryChange] = []
        self.refused = 0

    def __call__(self) -> None:
        """Called after a step: perhaps a move, and a look at everything."""
        engine, dice = self._engine, self._random
        if dice.random() > self._share:
            return
        least = engine.least_memory
        choice = dice.random()
        if choice < 0.15:
            before = self._everything()
            with pytest.raises(DoesNotFitError, match=r"at least [\d,]+ MiB"):
                engine.set_memory(least - 1 - dice.randrange(least // 2))
            assert self._everything() == before, "a refused move changed something"
            self.refused += 1
            return
        ceiling = least if choice < 0.4 else dice.randint(least, self._highest)
        change = engine.set_memory(ceiling)
        engine.check_integrity()
        snapshot = engine.snapshot()
        assert change.memory_bytes == snapshot.memory_bytes == engine.info.memory_bytes == ceiling
        owned = sum(snapshot.bytes_by_kind.values())
        assert snapshot.pool_bytes == change.pool_bytes == snapshot.free_bytes + owned + snapshot.tail_bytes
        assert engine._parts.pool.committed_bytes == change.pool_bytes or engine._parts.pool.data.is_cuda
        self.changes.append(change)

    def _everything(self) -> tuple[object, ...]:
        """What nobody but a move may change between two steps; bytes are read in the background."""
        snapshot = replace(self._engine.snapshot(), expert_bytes_read=0)
        return snapshot, self._engine.info, list(self._engine._allocator.regions())
