"""The host tier of a CPU: what of it lies in memory before anybody asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, answer, assert_all_free, resident_tokens
from quantised import KINDS, foreign_imports, write_quantised_checkpoint
from tiny_checkpoints import write_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.experts.host_store import HostStore
from rimuru_models.errors import CheckpointError
from rimuru_models.readers import open_reader

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def mixed_by_expert(folder: Path, *, plain: set[str]) -> tuple[Path, Path]:
    """A quantised checkpoint of which some experts stayed plain, and what its library makes of it."""
    with foreign_imports():
        return write_quantised_checkpoint(
            folder, "qwen3_moe", KINDS["int4"], num_layers=2, moe_intermediate_size=64, keep=lambda name: any(one in name for one in plain)
        )


# Which experts stayed plain: the first one of a layer says nothing about the others.
PLAIN = {
    "all but one": {f".layers.0.mlp.experts.{expert}." for expert in range(8) if expert != 5},
    "the first": {".layers.0.mlp.experts.0."},
    "one projection of the last": {".layers.0.mlp.experts.7.down_proj"},
    "a whole layer": {".layers.0.mlp.experts."},
}


@pytest.mark.parametrize("plain", PLAIN.values(), ids=PLAIN)
def test_experts_that_have_to_be_converted_are_not_held(plain: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = mixed_by_expert(tmp_path, plain=plain)
    with open_reader(quantised) as reader:
        made: list[Any] = []
        whole, extents = reader.expert, reader.expert_extents

        def watched(layer: int, expert: int) -> Any:
            if extents(layer, expert) is None:
                made.append((layer, expert))
            return whole(layer, expert)

        monkeypatch.setattr(reader, "expert", watched)
        store = HostStore(reader)
        assert not made, "numbers were made of experts that nobody had asked for, and would stay in memory"
        for expert in (0, 5, 7):
            for ours, wanted in zip(store.expert(0, expert), whole(0, expert), strict=True):
                assert torch.equal(ours, wanted)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("plain", PLAIN.values(), ids=PLAIN)
def test_the_text_is_that_of_the_plain_checkpoint(plain: set[str], device: Any, tmp_path: Path) -> None:
    quantised, meant = mixed_by_expert(tmp_path, plain=plain)
    expected = resident_tokens(meant, PROMPT, 12)
    for share in (1.0, 0.3):
        engine = Engine.load(quantised, EngineConfig(device=device, context=64, poison=True, resident_share=share))
        assert answer(engine, PROMPT).output_ids[:12] == expected
        assert_all_free(engine)


@pytest.mark.parametrize("kind", ["plain", "quantised", "GGUF"])
def test_a_file_that_shrinks_while_the_model_is_used_is_said_to(kind: str, tmp_path: Path) -> None:
    """Touching what is gone would kill the process. What is put back is used again."""
    if kind == "GGUF":
        path, _ = write_tiny_gguf(tmp_path, "qwen3_moe", lambda name: "Q4_0", moe_intermediate_size=64, num_layers=2)
        model = path
    elif kind == "plain":
        model = write_tiny_checkpoint(tmp_path, "qwen3_moe", num_layers=2)
        path = model / "model.safetensors"
    else:
        model, _ = mixed_by_expert(tmp_path, plain=set())
        path = model / "model.safetensors"
    engine = Engine.load(model, EngineConfig(device="cpu", context=64, resident_share=0.3))
    expected = answer(engine, PROMPT).output_ids
    whole = path.read_bytes()
    request = engine.submit([*PROMPT, 9], GREEDY)
    engine.step()
    with path.open("r+b") as file:
        file.truncate(len(whole) // 3)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{path.name} shrank from {len(whole)} to {len(whole) // 3} bytes") as caught:
            engine.step()
        assert "load the model again" in str(caught.value.hint)
    engine.cancel(request)
    engine.check_integrity()
    path.write_bytes(whole)
    assert answer(engine, PROMPT).output_ids == expected
    assert_all_free(engine)
