"""Random checkpoints of the families with recurrent layers, written exactly as the hub stores them. Use `tiny_checkpoints`.

Every 1-D parameter lies away from its default: norms centred on zero, plain norms, decays, biases and skips alike.
"""

from __future__ import annotations

from typing import Any

import torch

_QWEN: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 72,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "attention_bias": False,
    # Larger than in released models: a token whose query and key happen to be at right angles reads next to nothing, and a norm that blows
    # that up to full size blows up its rounding error too.
    "rms_norm_eps": 1e-3,
}


class Weights:
    """Collects random tensors; one generator, so that the same seed gives the same weights in both layouts and every dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def random(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        """A matrix [out, in] with standard deviation gain / sqrt(in)."""
        return (torch.randn(*shape, generator=self._generator) * (gain * shape[-1] ** -0.5)).to(self._dtype)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        self.tensors[name] = self.random(*shape, gain=gain)

    def vector(self, name: str, size: int, default: float, spread: float = 0.1) -> None:
        self.tensors[name] = (default + spread * torch.randn(size, generator=self._generator)).to(self._dtype)


def hybrid_config(family: str, base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """config.json of a hybrid family. Qwen3.5 nests the text model as the hub does; overrides reach into it. `nested=False`: text alone."""
    overrides = dict(overrides)
    nested = overrides.pop("nested", True)
    if family == "granitemoehybrid":
        layers = base["num_hidden_layers"]
        return (
            base
            | {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "model_type": family,
                "intermediate_size": 48,
                "shared_intermediate_size": 40,
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "layer_types": ["attention" if i % 4 == 2 else "mamba" for i in range(layers)],
                "position_embedding_type": "nope",
                "attention_bias": False,
                "attention_multiplier": 0.35,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.6,
                "logits_scaling": 0.7,
                "mamba_n_heads": 8,
                "mamba_d_head": 16,
                "mamba_d_state": 12,
                "mamba_n_groups": 1,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_chunk_size": 16,
                "mamba_conv_bias": True,
                "mamba_proj_bias": False,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "rope_scaling": None,
                "tie_word_embeddings": True,
            }
            | overrides
        )
    if family == "qwen3_next":
        own = {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": family,
            "intermediate_size": 80,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_scaling": None,
        }
        return base | _QWEN | own | overrides
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    tied = overrides.pop("tie_word_embeddings", base.pop("tie_word_embeddings"))
    text = base | _QWEN | {"model_type": "qwen3_5_moe_text", "rope_parameters": rope, "attn_output_gate": True} | overrides
    if not nested:
        return text | {"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": tied}
    vision = {"model_type": "qwen3_5_moe_vision", "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": tied,
    }


def hybrid_tensors(config: dict[str, Any], family: str, *, seed: int, layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by their name on disk."""
    weights = Weights(seed, dtype)
    text = config.get("text_config", config)
    granite, nested = family == "granitemoehybrid", "text_config" in config
    model = "model.language_model" if nested else "model"
    hidden, norm = text["hidden_size"], 1.0 if granite else 0.0
    weights.matrix(f"{model}.embed_tokens.weight", text["vocab_size"], hidden, gain=hidden**0.5 * 0.5)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"{model}.layers.{layer}"
        weights.vector(f"{prefix}.input_layernorm.weight", hidden, norm)
        if "layer_types" in text:
            recurrent = text["layer_types"][layer] in ("linear_attention", "mamba")
        else:
            recurrent = (layer + 1) % text["full_attention_interval"] != 0
        if not recurrent:
            _attention(weights, text, f"{prefix}.self_attn", gated=not granite)
        elif granite:
            _mamba(weights, text, f"{prefix}.mamba")
        else:
            _delta_net(weights, text, f"{prefix}.linear_attn", fused=family == "qwen3_next")
        weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden, norm)
        if granite:
            _granite_moe(weights, text, prefix)
        else:
            _qwen_moe(weights, text, layer, f"{prefix}.mlp", layout)
    weights.vector(f"{model}.norm.weight", hidden, norm)
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head.weight", text["vocab_size"], hidden, gain=2.0)
    if nested:
        # Parts that a text model has no use for; only their names matter.
        weights.matrix("model.visual.blocks.0.attn.qkv.weight", 96, 32)
        weights.vector("model.visual.blocks.0.attn.qkv.bias", 96, 0.0)
    if not granite:
        weights.matrix("mtp.fc.weight", hidden, 2 * hidden)
        weights.matrix("mtp.layers.0.mlp.experts.0.up_proj.weight", text["moe_intermediate_size"], hidden)
    return weights.tensors


def _attention(weights: Weights, config: dict[str, Any], prefix: str, *, gated: bool) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    head_dim = config.get("head_dim") or hidden // heads
    rows = {"q_proj": heads * head_dim * (2 if gated else 1), "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    for name, count in rows.items():
        weights.matrix(f"{prefix}.{name}.weight", count, hidden)
        if config["attention_bias"]:
            weights.vector(f"{prefix}.{name}.bias", count, 0.0, 0.3)
    weights.matrix(f"{prefix}.o_proj.weight", hidden, heads * head_dim)
    if config["attention_bias"]:
        weights.vector(f"{prefix}.o_proj.bias", hidden, 0.0)
    if gated:
        weights.vector(f"{prefix}.q_norm.weight", head_dim, 0.0)
        weights.vector(f"{prefix}.k_norm.weight", head_dim, 0.0)


def _delta_net(weights: Weights, config: dict[str, Any], prefix: str, *, fused: bool) -> None:
    hidden = config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values, channels = heads * dv, 2 * keys + heads * dv
    if fused:
        rows = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * heads}
    else:
        rows = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    for name, count in rows.items():
        weights.matrix(f"{prefix}.{name}.weight", count, hidden)
    weights.tensors[f"{prefix}.conv1d.weight"] = weights.random(channels, 1, config["linear_conv_kernel_dim"], gain=3.0)
    weights.vector(f"{prefix}.A_log", heads, -1.5, 1.0)
    weights.vector(f"{prefix}.dt_bias", heads, 0.0, 1.0)
    weights.vector(f"{prefix}.norm.weight", dv, 1.0)
    weights.matrix(f"{prefix}.out_proj.weight", hidden, values)


def _mamba(weights: Weights, config: dict[str, Any], prefix: str) -> None:
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config["mamba_expand"] * hidden
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    weights.matrix(f"{prefix}.in_proj.weight", inner + channels + heads, hidden)
    weights.matrix(f"{prefix}.out_proj.weight", hidden, inner)
    if config["mamba_proj_bias"]:
        weights.vector(f"{prefix}.in_proj.bias", inner + channels + heads, 0.0, 0.3)
        weights.vector(f"{prefix}.out_proj.bias", hidden, 0.0, 0.3)
    weights.tensors[f"{prefix}.conv1d.weight"] = weights.random(channels, 1, config["mamba_d_conv"], gain=1.5)
    if config["mamba_conv_bias"]:
        weights.vector(f"{prefix}.conv1d.bias", channels, 0.0, 0.3)
    weights.vector(f"{prefix}.A_log", heads, -1.0, 1.0)
    weights.vector(f"{prefix}.dt_bias", heads, 0.0, 1.0)
    weights.vector(f"{prefix}.D", heads, 1.0, 0.5)
    weights.vector(f"{prefix}.norm.weight", inner, 1.0)


def _granite_moe(weights: Weights, config: dict[str, Any], prefix: str) -> None:
    hidden, width, shared = config["hidden_size"], config["intermediate_size"], config["shared_intermediate_size"]
    count, block = config["num_local_experts"], f"{prefix}.block_sparse_moe"
    weights.matrix(f"{block}.router.layer.weight", count, hidden, gain=2.0)
    weights.matrix(f"{block}.input_linear.weight", count, 2 * width, hidden)
    weights.matrix(f"{block}.output_linear.weight", count, hidden, width)
    weights.matrix(f"{prefix}.shared_mlp.input_linear.weight", 2 * shared, hidden)
    weights.matrix(f"{prefix}.shared_mlp.output_linear.weight", hidden, shared)


def _mlp(weights: Weights, prefix: str, hidden: int, width: int) -> None:
    weights.matrix(f"{prefix}.gate_proj.weight", width, hidden)
    weights.matrix(f"{prefix}.up_proj.weight", width, hidden)
    weights.matrix(f"{prefix}.down_proj.weight", hidden, width)


def _qwen_moe(weights: Weights, config: dict[str, Any], layer: int, prefix: str, layout: str) -> None:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    if layer in config.get("mlp_only_layers", []) or (layer + 1) % config.get("decoder_sparse_step", 1):
        return _mlp(weights, prefix, hidden, config["intermediate_size"])
    weights.matrix(f"{prefix}.gate.weight", config["num_experts"], hidden, gain=2.0)
    experts = [
        [weights.random(*shape) for shape in ((width, hidden), (width, hidden), (hidden, width))] for _ in range(config["num_experts"])
    ]
    if layout == "fused":
        weights.tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in experts])
        weights.tensors[f"{prefix}.experts.down_proj"] = torch.stack([down for _, _, down in experts])
    else:
        for expert, parts in enumerate(experts):
            for name, tensor in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
                weights.tensors[f"{prefix}.experts.{expert}.{name}.weight"] = tensor
    _mlp(weights, f"{prefix}.shared_expert", hidden, config["shared_expert_intermediate_size"])
    weights.matrix(f"{prefix}.shared_expert_gate.weight", 1, hidden)
