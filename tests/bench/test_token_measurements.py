"""Measurements one after the other with one engine: none may start where another stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rimuru_cli.bench.tokens as tokens
from rimuru_cli.engine.device.replay import ReplayedRouting
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.parts import Parts


class Watched(ReplayedRouting):
    """Knows which steps were replayed."""

    seen: list[int]

    def advance(self) -> None:
        self.seen = [*getattr(self, "seen", []), int(self.at)]
        super().advance()


@pytest.fixture
def tiny() -> Iterator[tuple[Engine, Parts]]:
    model = tokens.SyntheticModel("tiny-hybrid", torch.device("cpu"), lambda *_: None, dtype=torch.float32)
    engine, parts = model.engine(None)
    with engine:
        yield engine, parts
    model.host.shared = False
    model.host.close()


def test_each_generation_replays_its_routing_from_the_start(tiny: tuple[Engine, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, parts = tiny
    made: list[Watched] = []

    def watched(ids: torch.Tensor, weights: torch.Tensor, device: torch.device) -> Watched:
        made.append(Watched(ids, weights, device))
        return made[-1]

    monkeypatch.setattr(tokens, "ReplayedRouting", watched)
    config = parts.model.config
    for sequences in (1, 2, 1):
        routing = tokens.Routing.drawn(20, len(config.moe_layers), config.num_experts, config.top_k, sequences)
        tokens.measure_generation(engine, parts, routing, 9, sequences)
    # A step that was launched ahead for the run before is no step of this one.
    assert [routing.seen[:6] for routing in made] == [[0, 1, 2, 3, 4, 5]] * 3


def test_prompts_may_follow_a_generation(tiny: tuple[Engine, Parts]) -> None:
    engine, parts = tiny
    config = parts.model.config
    routing = tokens.Routing.uniform(36, len(config.moe_layers), config.num_experts, config.top_k)
    tokens.measure_generation(engine, parts, routing, 8)
    assert tokens.measure_prompt(engine, parts, 40, repeats=1).tokens_per_second > 0
