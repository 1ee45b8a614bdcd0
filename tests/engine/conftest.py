"""Tiny checkpoints, written once for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
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
