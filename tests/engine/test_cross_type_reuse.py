"""The same bytes of the pool hold experts, then keys and values, then states, then experts again, and each owner finds what it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, assert_all_free, load_engine, resident_tokens
from hybrids import write_hybrid

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine

KINDS = ("expert", "kv", "ssm", "conv")
PROMPTS = [[(seed * 31 + 7 * i) % 128 for i in range(12)] for seed in range(6)]


class Witness:
    """What each huge page has held, one kind after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.history: dict[int, list[str]] = {}

    def look(self) -> None:
        engine, huge = self._engine, self._engine._parts.pool.geometry.huge_page_bytes
        engine.check_integrity()
        for region in engine._allocator.regions():
            if region.state in KINDS:
                seen = self.history.setdefault(region.offset_bytes // huge, [])
                if not seen or seen[-1] != region.state:
                    seen.append(region.state)
        self.check_experts()

    def check_experts(self) -> None:
        """Every resident expert is, byte for byte, the one of the checkpoint."""
        parts = self._engine._parts
        parts.residency.commit(wait=True)
        for layer, count in enumerate(parts.residency.counts):
            found = 0
            for expert in range(parts.host.num_experts):
                tiles = parts.residency.tiles(layer, expert)
                if tiles is not None:
                    found += 1
                    source = parts.host.expert(layer, expert)
                    for own, matrix in zip(tiles, (source.gate, source.up, source.down), strict=True):
                        assert torch.equal(torch.cat(own), matrix.to(own[0].dtype))
            assert found == count


def went_through(history: list[str], kinds: tuple[str, ...]) -> bool:
    rest = iter(history)
    return all(kind in rest for kind in kinds)


@pytest.mark.parametrize("name", ["1:1", "2:3", "granitemoehybrid"])
def test_a_page_that_held_experts_holds_keys_then_a_state_then_experts_again(name: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, name)
    engine = load_engine(folder, 0.7, EngineConfig(max_batch_tokens=256, context=400))
    witness = Witness(engine)
    witness.look()
    told = {}
    for _ in range(3):
        # A long text takes pages from experts for its keys and values; many short ones take them for their states.
        long = [(11 * i + 5) % 128 for i in range(engine.info.context_limit - 6)]
        requests = [(long, engine.submit(long, replace(GREEDY, max_tokens=5)))]
        run(engine, witness)
        engine._forget_kept()
        requests += [(prompt, engine.submit(prompt, replace(GREEDY, max_tokens=8))) for prompt in PROMPTS]
        run(engine, witness)
        engine._forget_kept()
        # While somebody thinks, experts come back.
        requests.append((PROMPTS[0], engine.submit(PROMPTS[0], replace(GREEDY, max_tokens=40))))
        run(engine, witness)
        for prompt, request in requests:
            told[tuple(prompt), len(request.output_ids)] = request.output_ids
    for (prompt, count), said in told.items():
        assert said == resident_tokens(folder, list(prompt), count)
    ways = [("expert", "kv", "ssm", "expert"), ("expert", "ssm", "expert"), ("ssm", "kv"), ("expert", "conv", "expert")]
    for way in ways:
        assert any(went_through(history, way) for history in witness.history.values()), f"no page went the way {way}"
    assert_all_free(engine)


def run(engine: Engine, witness: Witness) -> None:
    while engine.has_work:
        engine.step()
        witness.look()
