"""Mixture-of-Experts model families of rimuru.

Names below load on first use: `import rimuru_models.headers` (or config, index, layout, errors) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ == "models":
    raise ImportError("this folder is imported as rimuru_models (install the project first: ./install.sh --dev)")

if TYPE_CHECKING:
    from rimuru_models.config import ModelConfig as ModelConfig
    from rimuru_models.interfaces import CausalLM as CausalLM
    from rimuru_models.interfaces import ExpertProvider as ExpertProvider
    from rimuru_models.interfaces import ForwardContext as ForwardContext
    from rimuru_models.interfaces import KVCache as KVCache
    from rimuru_models.interfaces import RecurrentState as RecurrentState
    from rimuru_models.layout import dense_bytes as dense_bytes
    from rimuru_models.layout import expert_bytes as expert_bytes
    from rimuru_models.loader import load_model as load_model
    from rimuru_models.resident import ResidentExperts as ResidentExperts
    from rimuru_models.resident import ResidentKVCache as ResidentKVCache
    from rimuru_models.resident import ResidentStates as ResidentStates
    from rimuru_models.weights import CheckpointReader as CheckpointReader

# architecture (config.json) -> module that defines a class of that name
ARCHITECTURES = {
    "MixtralForCausalLM": "rimuru_models.mixtral",
    "Qwen2MoeForCausalLM": "rimuru_models.qwen2_moe",
    "Qwen3MoeForCausalLM": "rimuru_models.qwen3_moe",
    "OlmoeForCausalLM": "rimuru_models.olmoe",
    "Qwen3NextForCausalLM": "rimuru_models.qwen3_next",
    "Qwen3_5MoeForCausalLM": "rimuru_models.qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "rimuru_models.qwen3_5_moe",
    "GraniteMoeHybridForCausalLM": "rimuru_models.granite_hybrid",
}

_HOMES = {
    "ModelConfig": "config",
    "CausalLM": "interfaces",
    "ExpertProvider": "interfaces",
    "ForwardContext": "interfaces",
    "KVCache": "interfaces",
    "RecurrentState": "interfaces",
    "dense_bytes": "layout",
    "expert_bytes": "layout",
    "load_model": "loader",
    "ResidentExperts": "resident",
    "ResidentKVCache": "resident",
    "ResidentStates": "resident",
    "CheckpointReader": "weights",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
