"""How a model's pages would lie in the pool: the engine's own geometry, asked before anything is loaded."""

from __future__ import annotations

from typing import Any

from rimuru_cli.engine.config import EngineConfig, expert_pages, kv_bytes, page_geometry
from rimuru_cli.engine.device.hybrid_plan import state_bytes
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.fit.shape import IN_MEMORY_ON_CPU
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.headers import DTYPE_BITS
from rimuru_models.quantization.formats import WeightFormats


def page_facts(config: ModelConfig, formats: WeightFormats) -> dict[str, Any]:
    """Page sizes on a GPU, where pages hold the files' own format, and on a CPU, where plain numbers are float32; JSON-able, in bytes.

    Args:
        formats: what every weight is stored as.

    Returns:
        "gpu" and "cpu"; None for one where no page geometry holds this model.
    """
    return {
        "gpu": _facts(config, DTYPE_BITS[formats.computing] // 8, formats),
        "cpu": _facts(config, IN_MEMORY_ON_CPU.itemsize, formats, cpu=True),
    }


def _facts(config: ModelConfig, itemsize: int, formats: WeightFormats, *, cpu: bool = False) -> dict[str, Any] | None:
    try:
        geometry, block_tokens = page_geometry(config, itemsize, EngineConfig(), formats, cpu=cpu)
        experts = expert_pages(config, itemsize, EngineConfig(), formats, cpu=cpu)
    except DoesNotFitError:
        return None
    recurrent = config.recurrent
    return {
        "itemsize": itemsize,
        "P_e": geometry.expert_page_bytes,
        "P_s": None if recurrent is None else recurrent.state_bytes,
        "P_h": geometry.huge_page_bytes,
        "tiles_per_projection": geometry.tiles,
        "layer_tiles": [{"gate": wide, "up": wide, "down": down} for wide, down in experts.layer_tiles] if not experts.alike else None,
        "expert_pages_per_huge_page": geometry.pages_per_huge(PageKind.EXPERT),
        "expert_bytes": experts.expert_bytes,
        "kv_page_bytes": geometry.kv_page_bytes,
        "block_tokens": block_tokens,
        "kv_bytes_per_token": geometry.kv_page_bytes * len(config.attention_layers) // block_tokens,
        "kv_precision": "F32" if itemsize == 4 else formats.compute_dtype,
        "kv_q8_bytes_per_token": kv_bytes(config, itemsize, EngineConfig(kv="q8")) * len(config.attention_layers),
        "conv_row_bytes": None if recurrent is None else recurrent.conv_row_bytes(itemsize),
        "state_bytes_per_sequence": state_bytes(config, itemsize),
    }
