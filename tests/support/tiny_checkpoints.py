"""Random checkpoints of every supported family, small enough for tests and written exactly as the hub stores them.

The weights are random but lively: matrices are scaled so that logits spread over several units, and every 1-D parameter (norms, biases)
is moved away from its default, because a forgotten norm weight or bias is invisible while it is 1 or 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_hybrids import Weights, hybrid_config, hybrid_tensors

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
HYBRIDS = ("qwen3_next", "qwen3_5_moe", "granitemoehybrid")
"""Families with recurrent layers; `tiny_hybrids.py` has what is theirs."""


def tiny_config(family: str, *, vocab_size: int = 128, num_layers: int = 4, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model as a dict (hub style: `rope_theta` at the top level). An override of None is written as null."""
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if family == "mixtral":
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "head_dim": 24,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
        }
    elif family == "qwen2_moe":
        config |= {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "intermediate_size": 80,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 72,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "qkv_bias": True,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 21,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        }
    elif family == "qwen3_moe":
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": 32,
            "intermediate_size": 80,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 48,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        }
    elif family == "olmoe":
        config |= {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "attention_bias": False,
            "clip_qkv": None,
            "rope_scaling": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        }
    elif family in HYBRIDS:
        return hybrid_config(family, config, overrides)
    else:
        raise ValueError(f"unknown family {family!r}; one of {', '.join((*FAMILIES, *HYBRIDS))}")
    config |= overrides
    return config


def _is_sparse(config: dict[str, Any], layer: int) -> bool:
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _attention(weights: Weights, config: dict[str, Any], family: str, prefix: str) -> None:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        weights.matrix(f"{prefix}.{name}.weight", rows * head_dim, hidden, gain=1.5)
    weights.matrix(f"{prefix}.o_proj.weight", hidden, heads * head_dim)
    qkv_bias = config.get("qkv_bias", True) if family == "qwen2_moe" else config.get("attention_bias", False)
    if qkv_bias and family != "mixtral":
        for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            weights.vector(f"{prefix}.{name}.bias", rows * head_dim, 0.0)
        if family != "qwen2_moe":
            weights.vector(f"{prefix}.o_proj.bias", hidden, 0.0)
    if family == "qwen3_moe":
        weights.vector(f"{prefix}.q_norm.weight", head_dim, 1.0)
        weights.vector(f"{prefix}.k_norm.weight", head_dim, 1.0)
    elif family == "olmoe":
        weights.vector(f"{prefix}.q_norm.weight", heads * head_dim, 1.0)
        weights.vector(f"{prefix}.k_norm.weight", kv_heads * head_dim, 1.0)


def _mlp(weights: Weights, prefix: str, hidden: int, width: int) -> None:
    weights.matrix(f"{prefix}.gate_proj.weight", width, hidden)
    weights.matrix(f"{prefix}.up_proj.weight", width, hidden)
    weights.matrix(f"{prefix}.down_proj.weight", hidden, width)


def _experts(weights: Weights, config: dict[str, Any], family: str, layer: int, layout: str) -> None:
    hidden = config["hidden_size"]
    count = config["num_local_experts"] if family == "mixtral" else config["num_experts"]
    width = config["moe_intermediate_size"] if family.startswith("qwen") else config["intermediate_size"]
    block = "block_sparse_moe" if family == "mixtral" and layout == "per_expert" else "mlp"
    prefix = f"model.layers.{layer}.{block}"
    weights.matrix(f"{prefix}.gate.weight", count, hidden, gain=2.0)
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gate_up, down = [], []
    for expert in range(count):
        parts = weights.random(width, hidden), weights.random(width, hidden), weights.random(hidden, width)
        gate_up.append(torch.cat(parts[:2]))
        down.append(parts[2])
        if layout == "per_expert":
            for name, tensor in zip(names, parts, strict=True):
                weights.tensors[f"{prefix}.experts.{expert}.{name}.weight"] = tensor
    if layout == "fused":
        weights.tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        weights.tensors[f"{prefix}.experts.down_proj"] = torch.stack(down)
    if family == "qwen2_moe":
        _mlp(weights, f"{prefix}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        weights.matrix(f"{prefix}.shared_expert_gate.weight", 1, hidden)


def tiny_tensors(
    config: dict[str, Any], family: str, *, seed: int = 0, layout: str = "per_expert", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by their name on disk."""
    if layout not in ("per_expert", "fused"):
        raise ValueError(f"unknown layout {layout!r}; per_expert or fused")
    if family in HYBRIDS:
        return hybrid_tensors(config, family, seed=seed, layout=layout, dtype=dtype)
    weights = Weights(seed, dtype)
    hidden = config["hidden_size"]
    weights.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=hidden**0.5 * 0.5)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights.vector(f"{prefix}.input_layernorm.weight", hidden, 1.0)
        _attention(weights, config, family, f"{prefix}.self_attn")
        weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden, 1.0)
        if _is_sparse(config, layer):
            _experts(weights, config, family, layer, layout)
        else:
            _mlp(weights, f"{prefix}.mlp", hidden, config["intermediate_size"])
    weights.vector("model.norm.weight", hidden, 1.0)
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    return weights.tensors


def write_tiny_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    layout: str = "per_expert",
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 128,
    num_layers: int = 4,
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Write config.json and random safetensors weights into `folder` (made if absent) and return it.

    Args:
        family: a member of FAMILIES or HYBRIDS.
        layout: "per_expert" (one tensor a projection and expert) or "fused" (`gate_up_proj` [E, 2f, d], `down_proj` [E, d, f]); Granite has
            fused experts only.
        dtype: dtype of every tensor on disk.
        shards: number of safetensors files; more than one adds model.safetensors.index.json.
        config_overrides: keys of config.json to set, e.g. `num_experts=12` or `sliding_window=16`; tensor shapes follow.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, vocab_size=vocab_size, num_layers=num_layers, **config_overrides)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = tiny_tensors(config, family, seed=seed, layout=layout, dtype=dtype)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
