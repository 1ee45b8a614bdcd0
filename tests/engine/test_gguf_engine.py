"""Engines over GGUF files: the text is that of the same weights in safetensors, wherever experts lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from engines import answer, assert_all_free, resident_tokens
from tiny_gguf import ARCHITECTURES, add_tokenizer, write_tiny_gguf
from tiny_tokenizer import SPECIALS, write_tiny_tokenizer

from rimuru_cli.chat.speech import ModelSpeech
from rimuru_cli.engine.config import EngineConfig, plan_memory
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.engine import Engine
from rimuru_models.readers import open_reader

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def engine_of(path: Path, share: float) -> Engine:
    """An engine with room for `share` of the experts above the floor."""
    config = EngineConfig(device="cpu", context=128)
    with open_reader(path) as reader:
        plan = plan_memory(reader.config, config, program=0, formats=reader.formats)
    pool = plan.least_pool + int(share * (plan.full_pool - plan.least_pool))
    return Engine.load(path, EngineConfig(device="cpu", context=128, pool_bytes=pool, poison=True))


def device_engine(path: Path, share: float) -> Engine:
    """The same on the device's path, computed by the CPU."""
    config = EngineConfig(device="emulated", context=128, device_batch_tokens=24, max_batch_tokens=24, pool_bytes=0)
    with open_reader(path) as reader:
        shape = reader.config
        plan = plan_device_memory(shape, reader.compute_dtype, config, program=0, free=0, max_batch_tokens=24, formats=reader.formats)
    experts = len(shape.moe_layers) * shape.num_experts * plan.geometry.pages_per_expert * plan.geometry.expert_page_bytes
    return Engine.load(path, replace(config, pool_bytes=plan.pool + int(share * experts), poison=True))


def mixed(name: str) -> str:
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    if "_exps" in name:
        return ("Q5_0" if layer % 2 else "Q8_0") if "down" in name else "Q4_0"
    return "Q8_0"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_text_is_that_of_the_same_weights_in_safetensors(family: str, tmp_path: Path) -> None:
    width = "intermediate_size" if family in ("mixtral", "olmoe", "granitemoehybrid") else "moe_intermediate_size"
    path, meant = write_tiny_gguf(tmp_path, family, mixed, **{width: 64}, parts=2)
    expected = resident_tokens(meant, PROMPT, 20)
    for share in (0.0, 0.4, 1.0):
        engine = engine_of(path, share)
        assert engine.info.architecture.endswith("ForCausalLM")
        assert answer(engine, PROMPT).output_ids == expected
        assert_all_free(engine)
        engine.close()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_5_moe"])
def test_on_a_device_the_text_does_not_depend_on_where_experts_lie(family: str, tmp_path: Path) -> None:
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    path, _ = write_tiny_gguf(tmp_path, family, mixed, **{width: 64})
    said = []
    for share in (0.0, 0.4, 1.5):
        engine = device_engine(path, share)
        said.append(answer(engine, PROMPT).output_ids)
        assert_all_free(engine)
        engine.close()
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("kinds", [("Q4_0", "F16"), ("BF16", "BF16"), ("F32", "Q8_0")])
def test_layers_that_are_no_blocks_throughout(kinds: tuple[str, str], tmp_path: Path) -> None:
    def kind_of(name: str) -> str:
        return kinds["down" in name] if "_exps" in name else "F16"

    path, meant = write_tiny_gguf(tmp_path, "qwen3_moe", kind_of, moe_intermediate_size=64)
    expected = resident_tokens(meant, PROMPT, 20)
    engine = engine_of(path, 0.3)
    assert answer(engine, PROMPT).output_ids == expected
    engine.close()


def test_a_file_is_enough_to_chat(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path / "t")
    described = json.loads((tmp_path / "t" / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"] |= SPECIALS | {"Hi": 259}
    described["model"]["merges"] = [["H", "i"]]
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: add_tokenizer(writer, tmp_path / "t", "gpt-2", rows=264)  # noqa: E731
    path, meant = write_tiny_gguf(tmp_path, "qwen3_moe", mixed, moe_intermediate_size=64, vocab_size=264, more=more)
    shutil.copytree(tmp_path / "t", meant, dirs_exist_ok=True)
    ours, theirs = ModelSpeech(path, "gguf"), ModelSpeech(meant, "plain")
    messages = [{"role": "user", "content": "Hi é"}]
    prompt = theirs.render(messages, think=None)
    assert ours.render(messages, think=None) == prompt
    assert ours.encode(prompt) == theirs.encode(prompt) and 259 in ours.encode(prompt)
    assert ours.tokenizer.eos_ids >= theirs.tokenizer.eos_ids
    engine = engine_of(path, 0.5)
    assert engine.eos_ids >= theirs.tokenizer.eos_ids
    assert answer(engine, theirs.encode(prompt)).output_ids == resident_tokens(meant, theirs.encode(prompt), 20)
    engine.close()
