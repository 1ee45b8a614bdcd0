"""How each family words its config.json: from checked fields to the arguments of `ModelConfig`. No torch.

Defaults of absent fields are those of transformers 5.24 (the reference implementation of these families).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rimuru_models.config_pieces import MAX_POSITIONS, MAX_WIDTH, common, every_layer_sparse, experts, refuse_bias, sliding, sparse_by_step
from rimuru_models.fields import Fields
from rimuru_models.hybrid_families import granite_hybrid, qwen3_5_moe, qwen3_next


def _mixtral(fields: Fields) -> dict[str, Any]:
    refuse_bias(fields)
    base = common(fields, kv_heads_default=8, positions_default=131072, eps_default=1e-5, theta_default=1e6)
    layers = base["num_layers"]
    everywhere = tuple(range(layers)) if fields.present("sliding_window") else ()
    window = sliding(fields, layers, everywhere)
    return base | experts(fields, "intermediate_size") | every_layer_sparse(layers) | window | {"norm_topk_prob": True}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    base = common(fields, kv_heads_default=16, positions_default=32768, eps_default=1e-6, theta_default=1e4)
    layers = base["num_layers"]
    use_window = fields.flag("use_sliding_window", False)
    below = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
    window = sliding(fields, layers, tuple(range(0, min(below, layers), 2)) if use_window else (), free=use_window)
    return (
        base
        | experts(fields, "moe_intermediate_size")
        | sparse_by_step(fields, layers)
        | window
        | {
            "norm_topk_prob": fields.flag("norm_topk_prob", False),
            "shared_intermediate": fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 5632),
            "attention_bias": fields.flag("qkv_bias", True),
        }
    )


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    base = common(fields, kv_heads_default=4, positions_default=32768, eps_default=1e-6, theta_default=1e4)
    layers = base["num_layers"]
    bias = fields.flag("attention_bias", False)
    everywhere = tuple(range(layers)) if fields.flag("use_sliding_window", False) else ()
    return (
        base
        | experts(fields, "moe_intermediate_size")
        | sparse_by_step(fields, layers)
        | sliding(fields, layers, everywhere)
        | {"norm_topk_prob": fields.flag("norm_topk_prob", False), "attention_bias": bias, "output_bias": bias, "qk_norm": "head"}
    )


def _olmoe(fields: Fields) -> dict[str, Any]:
    base = common(fields, kv_heads_default=None, positions_default=4096, eps_default=1e-5, theta_default=1e4)
    if base["head_dim"] * base["num_heads"] != base["hidden_size"]:
        raise fields.error("head_dim times num_attention_heads must equal hidden_size for this architecture.")
    if fields.present("sliding_window"):
        raise fields.error("sliding_window is set, which this architecture does not have.")
    layers = base["num_layers"]
    bias = fields.flag("attention_bias", False)
    return (
        base
        | experts(fields, "intermediate_size")
        | every_layer_sparse(layers)
        | sliding(fields, layers, ())
        | {
            "norm_topk_prob": fields.flag("norm_topk_prob", False),
            "attention_bias": bias,
            "output_bias": bias,
            "qk_norm": "full",
            "clip_qkv": fields.number("clip_qkv", 1e-30, 1e30, None),
        }
    )


class Family(NamedTuple):
    """How one architecture is read.

    model_type: what config.json calls it. read: fields -> arguments of ModelConfig. nested: the field that holds the text model of a
    multimodal checkpoint, and its model_type.
    """

    model_type: str
    read: Callable[[Fields], dict[str, Any]]
    nested: tuple[str, str] | None = None


FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family("mixtral", _mixtral),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _qwen2_moe),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe),
    "OlmoeForCausalLM": Family("olmoe", _olmoe),
    "Qwen3NextForCausalLM": Family("qwen3_next", qwen3_next),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", qwen3_5_moe),
    "Qwen3_5MoeForConditionalGeneration": Family("qwen3_5_moe", qwen3_5_moe, nested=("text_config", "qwen3_5_moe_text")),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", granite_hybrid),
}
