"""Hybrid checkpoints for engine tests: each family, and geometries like those of released models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic import LENGTHS, prompts_of
from engines import assert_all_free, resident_tokens
from tiny_checkpoints import HYBRIDS, write_tiny_checkpoint

from rimuru_cli.engine.engine import Engine

# P_h = P_e = P_s; 2 P_e = 3 P_s; P_e = 2 P_s; and a common multiple far larger than either.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "1:1": {"linear_key_head_dim": 24, "linear_value_head_dim": 32},
    "2:3": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "1:2": {"linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "37:48": {"linear_key_head_dim": 31, "linear_value_head_dim": 19},
}
NAMES = (*HYBRIDS, *GEOMETRIES)


def write_hybrid(folder: Path, name: str) -> Path:
    """A checkpoint of a family or of a geometry."""
    if name in HYBRIDS:
        return write_tiny_checkpoint(folder, name)
    # Recurrent layers 0, 1, 3 and 4: no multiple of 3 states.
    return write_tiny_checkpoint(folder, "qwen3_5_moe", num_layers=5, full_attention_interval=3, **GEOMETRIES[name])


def said_by(folder: Path) -> list[list[int]]:
    """What a model says in `elastic.converse` when everything is in plain memory."""
    firsts = [resident_tokens(folder, prompt, count) for prompt, (_, count) in zip(prompts_of(), LENGTHS, strict=True)]
    return [*firsts, resident_tokens(folder, [*prompts_of()[0], *firsts[0], 5, 6, 7], 20)]


def assert_merged(engine: Engine) -> None:
    """Everything is free, and in whole huge pages again."""
    assert_all_free(engine)
    allocator, pool = engine._allocator, engine._parts.pool
    assert allocator.free_huge_pages == pool.num_bytes // pool.geometry.huge_page_bytes
