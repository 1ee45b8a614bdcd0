"""Pieces of config.json that several families share: checked fields in, arguments of `ModelConfig` out. No torch."""

from __future__ import annotations

from typing import Any

from rimuru_models.fields import Fields

# Far above every real model, far below what would make arithmetic or memory absurd.
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_COUNT = 1 << 16
MAX_POSITIONS = 1 << 31
_MAX_VOCAB = 1 << 24


def refuse_what_we_cannot_compute(fields: Fields) -> None:
    """Other activations than silu."""
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error(f"hidden_act {activation[:40]!r} is not supported; only 'silu' is.")


def rope(fields: Fields, theta_default: float, *, partial_default: float = 1.0, partial: bool = False) -> tuple[float, float]:
    """Base of the rotary embedding and the part of each head that it turns (0 to 1]; plain rotary is the only kind supported.

    hub style: `rope_theta` and `rope_scaling`; transformers 5 style: `rope_parameters`. A non-empty `rope_scaling` takes the place of
    `rope_parameters`, whose own values win over those at the top level (convert_rope_params_to_dict in transformers 5.24).

    Args:
        partial_default: part of the head where no field names it.
        partial: whether this family turns a part of each head only. Such families also carry multimodal sections: with text alone the
            three positions of a token are equal, and every arrangement of sections is the plain embedding.
    """
    source = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = Fields(fields.mapping(source), f"{fields.where}: {source}")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind != "default" and not (partial and kind == "mrope"):
        raise fields.error(f"{source} asks for rotary embeddings of type {kind[:40]!r}; only 'default' is supported.")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if partial:
        known |= {"mrope_section", "mrope_interleaved"}
    unknown = sorted(set(rope.values) - known)
    if unknown:
        raise fields.error(f"{source} has the unsupported field {unknown[0][:40]!r}.")
    part = rope.number("partial_rotary_factor", 0.0, 1.0, fields.number("partial_rotary_factor", 0.0, 1.0, partial_default))
    if not partial and part != 1.0:
        raise fields.error("partial_rotary_factor below 1 is not supported for this architecture.")
    return rope.number("rope_theta", 1e-6, 1e15, fields.number("rope_theta", 1e-6, 1e15, theta_default)), part


def common(
    fields: Fields,
    *,
    kv_heads_default: int | None,
    positions_default: int,
    eps_default: float,
    theta_default: float,
    head_dim_default: int | None = None,
    partial_default: float | None = None,
) -> dict[str, Any]:
    """Fields that all families share; `head_dim_default` None means hidden_size / heads, `partial_default` None the whole head."""
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_COUNT)
    # null means "as many as heads"; an absent field takes the default of the reference's config class
    fallback = heads if kv_heads_default is None or "num_key_value_heads" in fields.values else kv_heads_default
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_COUNT, fallback)
    if heads % kv_heads:
        raise fields.contradiction(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    head_dim = fields.integer("head_dim", 1, MAX_COUNT, head_dim_default)
    if head_dim is None:
        if hidden % heads:
            raise fields.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim.")
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embeddings need an even one.")
    theta, part = rope(fields, theta_default, partial_default=partial_default or 1.0, partial=partial_default is not None)
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or rotary_dim < 2:
        raise fields.error(f"partial_rotary_factor {part:g} makes {rotary_dim} of {head_dim} dimensions turn; an even number is needed.")
    return {
        "vocab_size": fields.integer("vocab_size", 1, _MAX_VOCAB),
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_eps": fields.number("rms_norm_eps", 1e-30, 1.0, eps_default),
        "rope_theta": theta,
        "rotary_dim": rotary_dim,
        "attention_scale": head_dim**-0.5,
        "max_positions": fields.integer("max_position_embeddings", 1, MAX_POSITIONS, positions_default),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def experts(fields: Fields, width_field: str) -> dict[str, Any]:
    """Expert count, top-k and width. The count has two names, which must agree where both are given."""
    counts = {name: fields.integer(name, 1, MAX_COUNT) for name in ("num_local_experts", "num_experts") if fields.present(name)}
    if not counts:
        raise fields.error("neither num_local_experts nor num_experts is given.")
    if len(set(counts.values())) > 1:
        raise fields.error(f"num_local_experts {counts['num_local_experts']} contradicts num_experts {counts['num_experts']}.")
    num_experts = next(iter(counts.values()))
    top_k = fields.integer("num_experts_per_tok", 1, MAX_COUNT)
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok {top_k} is more than the {num_experts} experts of a layer.")
    return {"num_experts": num_experts, "top_k": top_k, "expert_intermediate": fields.integer(width_field, 1, MAX_WIDTH)}


def every_layer_sparse(num_layers: int) -> dict[str, Any]:
    """Every layer has experts."""
    return {"moe_layers": tuple(range(num_layers)), "dense_intermediate": None}


def sparse_by_step(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Layer i is sparse iff it is not in mlp_only_layers and (i + 1) is a multiple of decoder_sparse_step."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.list_of("mlp_only_layers", int, MAX_LAYERS) or []
    if any(not 0 <= layer < num_layers for layer in dense):
        raise fields.error(f"mlp_only_layers names a layer outside 0 to {num_layers - 1}.")
    sparse = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not sparse:
        raise fields.error("no layer has experts (decoder_sparse_step, mlp_only_layers); only mixture-of-experts models are supported.")
    width = None if len(sparse) == num_layers else fields.integer("intermediate_size", 1, MAX_WIDTH)
    return {"moe_layers": sparse, "dense_intermediate": width}


def sliding(fields: Fields, num_layers: int, expected: tuple[int, ...], *, free: bool = False) -> dict[str, Any]:
    """Sliding-window fields from the layers that the other fields make sliding.

    Args:
        expected: layers that slide unless `layer_types` says otherwise.
        free: whether this family lets `layer_types` choose (otherwise it may only repeat what the other fields say).
    """
    types = fields.list_of("layer_types", str, MAX_LAYERS)
    layers = expected
    if types is not None:
        if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise fields.error("layer_types must name full_attention or sliding_attention for each layer.")
        layers = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
        if layers != expected and not free:
            raise fields.error("layer_types contradicts the sliding-window fields.")
    if not layers:
        return {"sliding_window": None, "sliding_layers": ()}
    if not fields.present("sliding_window"):
        raise fields.error("sliding-window attention is on, but sliding_window is missing.")
    return {"sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS), "sliding_layers": layers}


def refuse_bias(fields: Fields) -> None:
    """Biases where the architecture has none."""
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias is true, but this architecture has no such biases.")
