"""How a model's pages would lie in the pool: the engine's own geometry, asked before anything is loaded."""

from __future__ import annotations

from typing import Any

from rimuru_cli.engine.config import EngineConfig, page_geometry
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.fit.shape import IN_MEMORY_ON_CPU
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.headers import DTYPE_BITS


def page_facts(config: ModelConfig, precision: str) -> dict[str, Any]:
    """Page sizes on a GPU, where pages hold the files' own format, and on a CPU, where they hold float32; JSON-able, in bytes.

    Args:
        precision: safetensors name of the experts' format.

    Returns:
        "gpu" and "cpu"; None for one where no page geometry holds this model.
    """
    return {
        "gpu": _facts(config, DTYPE_BITS[precision] // 8),
        "cpu": _facts(config, IN_MEMORY_ON_CPU.itemsize),
    }


def _facts(config: ModelConfig, itemsize: int) -> dict[str, Any] | None:
    try:
        geometry, block_tokens = page_geometry(config, itemsize, EngineConfig())
    except DoesNotFitError:
        return None
    recurrent = config.recurrent
    return {
        "itemsize": itemsize,
        "P_e": geometry.expert_page_bytes,
        "P_s": None if recurrent is None else recurrent.state_bytes,
        "P_h": geometry.huge_page_bytes,
        "tiles_per_projection": geometry.tiles,
        "expert_pages_per_huge_page": geometry.pages_per_huge(PageKind.EXPERT),
        "expert_bytes": geometry.pages_per_expert * geometry.expert_page_bytes,
        "kv_page_bytes": geometry.kv_page_bytes,
        "block_tokens": block_tokens,
        "kv_bytes_per_token": geometry.kv_page_bytes * len(config.attention_layers) // block_tokens,
        "conv_row_bytes": None if recurrent is None else recurrent.conv_row_bytes(itemsize),
        "state_bytes_per_sequence": state_bytes(config, itemsize),
    }


def state_bytes(config: ModelConfig, itemsize: int) -> int:
    """Recurrent and convolution states of one sequence, over all layers that have them; 0 for a model of attention alone."""
    if config.recurrent is None:
        return 0
    per_layer = config.recurrent.state_bytes + config.recurrent.conv_rows * config.recurrent.conv_row_bytes(itemsize)
    return len(config.recurrent_layers) * per_layer
