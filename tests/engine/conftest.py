"""Tiny checkpoints, written once for all engine tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from elastic import LENGTHS, prompts_of
from engines import resident_tokens
from hybrids import said_by, write_hybrid
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each family, float32."""
    root = tmp_path_factory.mktemp("engine-checkpoints")
    return {family: write_tiny_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def qwen3(checkpoints: dict[str, Path]) -> Path:
    """The family used where one is enough: 4 layers, 8 experts, top 3."""
    return checkpoints["qwen3_moe"]


@pytest.fixture(scope="session")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What each family says when everything is in plain memory."""
    texts = {}
    for family, folder in checkpoints.items():
        firsts = [resident_tokens(folder, prompt, count) for prompt, (_, count) in zip(prompts_of(), LENGTHS, strict=True)]
        texts[family] = [*firsts, resident_tokens(folder, [*prompts_of()[0], *firsts[0], 5, 6, 7], 20)]
    return texts


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """Name of a hybrid -> a checkpoint and what it says; made when first asked for."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def make(name: str) -> tuple[Path, list[list[int]]]:
        if name not in made:
            folder = write_hybrid(tmp_path_factory.mktemp("hybrid"), name)
            made[name] = folder, said_by(folder)
        return made[name]

    return make
