"""Engines over quantised checkpoints as their libraries write them: the text is that of the plain checkpoint that a library makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import adversary
from engines import answer, assert_all_free, resident_tokens
from quantised import KINDS, foreign_imports, write_quantised_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
NAMES = ["fp8-bf16", "gptq-asymmetric", "awq", "int4", "int8", "int8-groups", "fp8-channel", "nvfp4", "mxfp4", "mxfp8"]
DEVICES = [
    "cpu",
    "emulated",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_the_plain_checkpoint(name: str, device: str, tmp_path: Path) -> None:
    with foreign_imports():
        quantised, plain = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS[name], moe_intermediate_size=64)
    expected = resident_tokens(plain, PROMPT, 16)
    config = EngineConfig(device=device, context=96, poison=True)
    for share, seed in ((1.0, 1), (0.4, 2)):
        engine = Engine.load(quantised, replace(config, resident_share=share, adjuster=adversary(seed)))
        assert engine.info.weight_dtype != "f32" and "f32" not in engine.info.weight_dtype
        assert answer(engine, PROMPT).output_ids[:16] == expected
        assert_all_free(engine)
