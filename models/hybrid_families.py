"""How the hybrid families word their config.json. No torch.

Defaults of absent fields are those of transformers 5.24.
"""

from __future__ import annotations

import math
from typing import Any

from rimuru_models.config_pieces import MAX_COUNT, MAX_LAYERS, MAX_WIDTH, common, every_layer_sparse, experts, sparse_by_step
from rimuru_models.fields import Fields
from rimuru_models.recurrent_config import RecurrentConfig

# transformers 5 renamed the kinds of layers; hub files have both
_RECURRENT = ("linear_attention", "mamba")
_ATTENTION = ("full_attention", "attention")
_MAX_FACTOR = 1e6


def qwen3_next(fields: Fields) -> dict[str, Any]:
    """Qwen3-Next: the layer pattern and dense layers are free, and norm_topk_prob is read."""
    base = _qwen(fields)
    layers = base["num_layers"]
    return base | sparse_by_step(fields, layers) | {"norm_topk_prob": fields.flag("norm_topk_prob", True)}


def qwen3_5_moe(fields: Fields) -> dict[str, Any]:
    """The text model of Qwen3.5 and Qwen3.6: every layer is sparse, and the router always rescales."""
    base = _qwen(fields)
    return base | every_layer_sparse(base["num_layers"]) | {"norm_topk_prob": True}


def _qwen(fields: Fields) -> dict[str, Any]:
    base = common(
        fields,
        kv_heads_default=2,
        positions_default=32768,
        eps_default=1e-6,
        theta_default=1e4,
        head_dim_default=256,
        partial_default=0.25,
    )
    bias = fields.flag("attention_bias", False)
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    pattern = tuple(layer for layer in range(base["num_layers"]) if (layer + 1) % interval)
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_COUNT, 16)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_COUNT, 32)
    if value_heads % key_heads:
        raise fields.contradiction(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}.")
    recurrent = RecurrentConfig(
        kind="delta",
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_COUNT, 128),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_COUNT, 128),
        kernel=fields.integer("linear_conv_kernel_dim", 2, MAX_COUNT, 4),
    )
    return (
        base
        | experts(fields, "moe_intermediate_size")
        | {
            "shared_intermediate": fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 512),
            "attention_bias": bias,
            "output_bias": bias,
            "qk_norm": "head",
            "gated_attention": True,
            "zero_centred_norms": True,
        }
        | _mixers(fields, base["num_layers"], pattern, recurrent)
    )


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Granite 4.0 H: Mamba-2 layers, four multipliers, and usually no positions."""
    base = common(fields, kv_heads_default=None, positions_default=2048, eps_default=1e-6, theta_default=1e4)
    positions = fields.text("position_embedding_type", "nope")
    if positions not in ("nope", "rope"):
        raise fields.error(f"position_embedding_type {positions[:40]!r} is not supported; 'nope' and 'rope' are.")
    if fields.integer("num_local_experts", 0, MAX_COUNT, None) == 0:
        raise fields.error("it has no experts (num_local_experts 0); only mixture-of-experts models are supported.")
    layers, bias = base["num_layers"], fields.flag("attention_bias", False)
    return (
        base
        | experts(fields, "intermediate_size")
        | every_layer_sparse(layers)
        | {
            # the softmax over the chosen k logits is the softmax over all, rescaled
            "norm_topk_prob": True,
            "rotary_dim": base["head_dim"] if positions == "rope" else 0,
            "shared_intermediate": fields.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024),
            "shared_gate": False,
            "attention_bias": bias,
            "output_bias": bias,
            "attention_scale": fields.number("attention_multiplier", 0.0, _MAX_FACTOR, 1.0),
            "embedding_multiplier": fields.number("embedding_multiplier", -_MAX_FACTOR, _MAX_FACTOR, 1.0),
            "residual_multiplier": fields.number("residual_multiplier", -_MAX_FACTOR, _MAX_FACTOR, 1.0),
            "logits_divisor": fields.number("logits_scaling", 1 / _MAX_FACTOR, _MAX_FACTOR, 1.0),
        }
        | _mixers(fields, layers, tuple(range(layers)), _mamba2(fields, base["hidden_size"]))
    )


def _mamba2(fields: Fields, hidden: int) -> RecurrentConfig:
    heads = fields.integer("mamba_n_heads", 1, MAX_COUNT, 128)
    groups = fields.integer("mamba_n_groups", 1, MAX_COUNT, 1)
    inner = fields.integer("mamba_expand", 1, MAX_COUNT, 2) * hidden
    if fields.values.get("mamba_d_head") in (None, "auto"):
        head_dim = inner // heads
    else:
        head_dim = fields.integer("mamba_d_head", 1, MAX_WIDTH)
    if head_dim * heads != inner:
        raise fields.contradiction(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} do not make up mamba_expand times hidden_size, {inner}."
        )
    if heads % groups:
        raise fields.contradiction(f"mamba_n_heads {heads} is not a multiple of mamba_n_groups {groups}.")
    return RecurrentConfig(
        kind="mamba2",
        key_heads=groups,
        value_heads=heads,
        key_dim=fields.integer("mamba_d_state", 1, MAX_COUNT, 256),
        value_dim=head_dim,
        kernel=fields.integer("mamba_d_conv", 2, MAX_COUNT, 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        projection_bias=fields.flag("mamba_proj_bias", False),
        step_limits=_step_limits(fields),
    )


def _step_limits(fields: Fields) -> tuple[float, float]:
    """time_step_limit: two numbers, of which the second may be infinite (written Infinity, or as transformers 5 writes it)."""
    value = fields.values.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    limits = [math.inf if item == {"__float__": "Infinity"} else item for item in value] if isinstance(value, list) else []
    numbers = [item for item in limits if isinstance(item, int | float) and not isinstance(item, bool)]
    ordered = len(limits) == len(numbers) == 2 and 0 <= numbers[0] <= numbers[1]
    if not ordered or numbers[0] > _MAX_FACTOR or _MAX_FACTOR < numbers[1] < math.inf:
        raise fields.contradiction(f"time_step_limit must be two numbers from 0 to {_MAX_FACTOR:g} in order; the second may be Infinity.")
    return float(numbers[0]), float(numbers[1])


def _mixers(fields: Fields, num_layers: int, default: tuple[int, ...], recurrent: RecurrentConfig) -> dict[str, Any]:
    """Which layers are recurrent: `layer_types` (or `layers_block_type`), else `default`."""
    layers = default
    name = "layer_types" if fields.present("layer_types") else "layers_block_type"
    types = fields.list_of(name, str, MAX_LAYERS)
    if types is not None:
        if len(types) != num_layers or not set(types) <= {*_RECURRENT, *_ATTENTION}:
            raise fields.contradiction(f"{name} must name {_RECURRENT[0]} or {_ATTENTION[0]} for each layer.")
        layers = tuple(layer for layer, kind in enumerate(types) if kind in _RECURRENT)
    if types is None and len(layers) == num_layers:
        raise fields.contradiction("it has no attention layer: layer_types is missing, and without it all layers are recurrent.")
    if len(layers) == num_layers:
        raise fields.error("it has no attention layer; models of recurrent layers alone are not supported.")
    return {"recurrent_layers": layers, "recurrent": recurrent if layers else None}
