"""Several people at once who go on, edit, ask again and leave, while experts come and go and the ceiling moves: all read what is right.

Each answer, whole or cut short, is compared with the model in plain memory, and all tables are checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from elastic import CeilingMover, adversary
from engines import GREEDY, assert_all_free, load_engine, resident_tokens
from hybrids import assert_merged, write_hybrid
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import Request
from rimuru_models.errors import DoesNotFitError

PLAIN = "qwen3_moe"
LONGEST = 24
STEPS = 100


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Callable[..., list[int]]]]:
    """Name -> a checkpoint, and what it answers to a prompt in plain memory."""

    @cache
    def made(name: str) -> tuple[Path, Callable[..., list[int]]]:
        folder = tmp_path_factory.mktemp("users") / "model"
        (write_tiny_checkpoint if name == PLAIN else write_hybrid)(folder, name)
        known: dict[tuple[int, ...], list[int]] = {}

        def answer(prompt: list[int], count: int) -> list[int]:
            have = known.get(tuple(prompt), [])
            if len(have) < count:
                have = known[tuple(prompt)] = resident_tokens(folder, prompt, count)
            return have[:count]

        return folder, answer

    return made


class Users:
    """People who talk with one engine, at random."""

    def __init__(self, engine: Engine, seed: int, answer: Callable[..., list[int]]) -> None:
        self._engine, self._dice, self._answer = engine, random.Random(seed), answer
        self._texts = [self._words(1, 60) for _ in range(3)]
        self._asked: list[tuple[Request, list[int]]] = []
        self.checked = self.reused = 0

    def _words(self, least: int, most: int) -> list[int]:
        return [self._dice.randrange(128) for _ in range(self._dice.randint(least, most))]

    def act(self) -> None:
        """Perhaps ask something, perhaps stop an answer."""
        dice = self._dice
        if len(self._asked) < 4 and dice.random() < 0.2:
            text, mode = dice.choice(self._texts), dice.random()
            if mode < 0.3:
                prompt = list(text)
            elif mode < 0.6:
                prompt = [*text[: dice.randint(0, len(text))], *self._words(1, 30)]
            else:
                prompt = [*text, *self._words(1, 20)]
            count = dice.randint(1, LONGEST)
            prompt = prompt[: max(1, self._engine.info.context_limit - count - 1)]
            with suppress(DoesNotFitError):  # the ceiling allows a shorter context now
                self._asked.append((self._engine.submit(prompt, replace(GREEDY, max_tokens=count)), prompt))
        if self._asked and dice.random() < 0.06:
            self._engine.cancel(dice.choice(self._asked)[0])

    def read(self) -> None:
        """Compare what has ended."""
        for request, prompt in [asked for asked in self._asked if asked[0].finish_reason is not None]:
            self._asked.remove((request, prompt))
            out = list(request.output_ids)
            assert out == self._answer(prompt, len(out))
            assert request.finish_reason == "cancelled" or out
            self.checked += 1
            self.reused += request.timings.cached_tokens
            self._texts = [*self._texts, [*prompt, *out]][-8:]


def scenario(name: str, device: str, seed: int) -> Any:
    return pytest.param(name, device, seed, id=f"{name}-{device}-{seed}")


@pytest.mark.parametrize(
    ("name", "device", "seed"),
    [
        scenario(PLAIN, "emulated", 1),
        scenario("1:1", "emulated", 2),
        scenario("37:48", "cpu", 5),
        scenario("37:48", "cpu", 10),
        scenario("qwen3_next", "emulated", 3),
        scenario("granitemoehybrid", "emulated", 4),
    ],
)
def test_everybody_reads_what_the_model_says(name: str, device: str, seed: int, said: Any) -> None:
    folder, answer = said(name)
    dice = random.Random(seed)
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        context=dice.choice([96, 144]),
        max_batch_tokens=24,
        device_batch_tokens=16,
        adjuster=adversary(seed),
    )
    engine = load_engine(folder, dice.choice([0.1, 0.3]), config)
    if name != PLAIN:
        engine._scheduler.interval = dice.choice([16, 48])  # type: ignore[attr-defined]
    users = Users(engine, seed, answer)
    mover = CeilingMover(engine, seed=seed, highest=engine.info.memory_bytes + engine.info.pool_bytes // 2, share=0.1)
    steps = 0
    while steps < STEPS or engine.has_work:
        steps += 1
        if steps < STEPS:
            users.act()
        engine.step()
        engine.check_integrity()
        if seed % 2:
            mover()
        users.read()
    assert users.checked >= 10
    if name != "37:48":  # states of which take up most of such a pool
        assert users.reused > 0
    (assert_all_free if name == PLAIN else assert_merged)(engine)
