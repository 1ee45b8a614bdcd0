"""What a checkpoint says it is: `ModelConfig`, read from config.json and validated. No torch.

Defaults of absent fields are those of transformers 5.17 (the reference implementation of these families). Whatever would make our
result differ from the reference is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rimuru_models.errors import CheckpointError
from rimuru_models.fields import Fields
from rimuru_models.headers import brief
from rimuru_models.index import read_json_file

# Far above every real model, far below what would make arithmetic or memory absurd.
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 4096
_MAX_COUNT = 1 << 16
_MAX_VOCAB = 1 << 24
_MAX_POSITIONS = 1 << 31


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a supported MoE decoder. All sizes are counts of elements, never bytes.

    Attributes:
        architecture: class name in config.json, a key of `rimuru_models.ARCHITECTURES`.
        model_type: family as config.json names it.
        head_dim: width of one attention head; num_heads * head_dim need not equal hidden_size.
        max_positions: longest context the model was made for, in tokens.
        moe_layers: indices of the layers with routed experts, ascending; the others have a dense MLP of `dense_intermediate`.
        expert_intermediate: f; expert matrices are gate, up [f, hidden_size] and down [hidden_size, f].
        norm_topk_prob: whether the top-k router weights are rescaled to sum to 1.
        shared_intermediate: width of the always-active shared expert, or None.
        dense_intermediate: width of the dense MLP, or None if every layer is sparse.
        attention_bias: q, k and v projections have biases; `output_bias`: so does the output projection.
        qk_norm: RMSNorm on q and k: none, over each head, or over the full projection.
        sliding_window: key j is visible to query i iff 0 <= i - j < sliding_window, in the layers of `sliding_layers`; None: no window.
        sliding_layers: indices of the layers that use the window.
        clip_qkv: q, k and v are clamped to [-clip_qkv, clip_qkv] (after any q/k norm), or None.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    tie_word_embeddings: bool
    num_experts: int
    top_k: int
    expert_intermediate: int
    norm_topk_prob: bool
    moe_layers: tuple[int, ...]
    shared_intermediate: int | None = None
    dense_intermediate: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    clip_qkv: float | None = None

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, or None for full attention."""
        return self.sliding_window if layer in self.sliding_layers else None

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelConfig:
        """Read `model_dir`/config.json.

        Raises:
            CheckpointError: unreadable, unsupported or contradictory; names the file and the field.
        """
        path = Path(model_dir) / "config.json"
        values = read_json_file(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is not a JSON object.")
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the dict of a config.json; `where` names it in errors.

        Raises:
            CheckpointError: as `from_dir`.
        """
        fields = Fields(values, where)
        architectures = fields.list_of("architectures", str, 16)
        if not architectures:
            raise fields.error("it names no architecture, so it cannot be loaded.", hint=f"Supported: {', '.join(_FAMILIES)}.")
        if len(architectures) != 1 or architectures[0] not in _FAMILIES:
            raise fields.error(
                f"the architecture {', '.join(architectures)[:200]} is not supported.", hint=f"Supported: {', '.join(_FAMILIES)}."
            )
        architecture = architectures[0]
        model_type, read_family = _FAMILIES[architecture]
        if fields.text("model_type", model_type) != model_type:
            raise fields.error(
                f"model_type {fields.text('model_type')[:80]!r} contradicts the architecture {architecture} ({model_type!r})."
            )
        _refuse_what_we_cannot_compute(fields)
        return cls(architecture=architecture, model_type=model_type, **read_family(fields))


def _refuse_what_we_cannot_compute(fields: Fields) -> None:
    if fields.present("quantization_config"):
        method = fields.mapping("quantization_config").get("quant_method", "unnamed method")
        raise fields.error(
            f"the weights are quantised ({brief(method)}), which this version cannot compute with yet.",
            hint="Get the bfloat16 or float16 version of this model.",
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error(f"hidden_act {activation[:40]!r} is not supported; only 'silu' is.")


def _rope_theta(fields: Fields, default: float) -> float:
    """Base of the rotary embedding; plain rotary over the whole head is the only kind supported.

    hub style: `rope_theta` and `rope_scaling`; transformers 5 style: `rope_parameters`. A non-empty `rope_scaling` takes the place of
    `rope_parameters`, whose rope_theta wins over the top-level one (transformers 5.17, modeling_rope_utils.convert_rope_params_to_dict).
    """
    source = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = Fields(fields.mapping(source), f"{fields.where}: {source}")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind != "default":
        raise fields.error(f"{source} asks for rotary embeddings of type {kind[:40]!r}; only 'default' is supported.")
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise fields.error("partial_rotary_factor below 1 is not supported for this architecture.")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = sorted(set(rope.values) - known)
    if unknown:
        raise fields.error(f"{source} has the unsupported field {unknown[0][:40]!r}.")
    theta: float = rope.number("rope_theta", 1e-6, 1e15, fields.number("rope_theta", 1e-6, 1e15, default))
    return theta


def _common(
    fields: Fields, *, kv_heads_default: int | None, positions_default: int, eps_default: float, theta_default: float
) -> dict[str, Any]:
    """Fields that all four families share."""
    hidden = fields.integer("hidden_size", 1, _MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, _MAX_COUNT)
    # null means "as many as heads"; an absent field takes the default of the reference's config class
    fallback = heads if kv_heads_default is None or "num_key_value_heads" in fields.values else kv_heads_default
    kv_heads = fields.integer("num_key_value_heads", 1, _MAX_COUNT, fallback)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    head_dim = fields.integer("head_dim", 1, _MAX_COUNT, None)
    if head_dim is None:
        if hidden % heads:
            raise fields.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim.")
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embeddings need an even one.")
    return {
        "vocab_size": fields.integer("vocab_size", 1, _MAX_VOCAB),
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", 1, _MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_eps": fields.number("rms_norm_eps", 1e-30, 1.0, eps_default),
        "rope_theta": _rope_theta(fields, theta_default),
        "max_positions": fields.integer("max_position_embeddings", 1, _MAX_POSITIONS, positions_default),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _experts(fields: Fields, width_field: str) -> dict[str, Any]:
    """Expert count, top-k and width. The count has two names, which must agree where both are given."""
    counts = {name: fields.integer(name, 1, _MAX_COUNT) for name in ("num_local_experts", "num_experts") if fields.present(name)}
    if not counts:
        raise fields.error("neither num_local_experts nor num_experts is given.")
    if len(set(counts.values())) > 1:
        raise fields.error(f"num_local_experts {counts['num_local_experts']} contradicts num_experts {counts['num_experts']}.")
    num_experts = next(iter(counts.values()))
    top_k = fields.integer("num_experts_per_tok", 1, _MAX_COUNT)
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok {top_k} is more than the {num_experts} experts of a layer.")
    return {"num_experts": num_experts, "top_k": top_k, "expert_intermediate": fields.integer(width_field, 1, _MAX_WIDTH)}


def _every_layer_sparse(num_layers: int) -> dict[str, Any]:
    return {"moe_layers": tuple(range(num_layers)), "dense_intermediate": None}


def _sparse_by_step(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Layer i is sparse iff it is not in mlp_only_layers and (i + 1) is a multiple of decoder_sparse_step."""
    step = fields.integer("decoder_sparse_step", 1, _MAX_LAYERS, 1)
    dense = fields.list_of("mlp_only_layers", int, _MAX_LAYERS) or []
    if any(not 0 <= layer < num_layers for layer in dense):
        raise fields.error(f"mlp_only_layers names a layer outside 0 to {num_layers - 1}.")
    sparse = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not sparse:
        raise fields.error("no layer has experts (decoder_sparse_step, mlp_only_layers); only mixture-of-experts models are supported.")
    width = None if len(sparse) == num_layers else fields.integer("intermediate_size", 1, _MAX_WIDTH)
    return {"moe_layers": sparse, "dense_intermediate": width}


def _sliding(fields: Fields, num_layers: int, expected: tuple[int, ...], *, free: bool = False) -> dict[str, Any]:
    """Sliding-window fields from the layers that the other fields make sliding.

    Args:
        expected: layers that slide unless `layer_types` says otherwise.
        free: whether this family lets `layer_types` choose (otherwise it may only repeat what the other fields say).
    """
    types = fields.list_of("layer_types", str, _MAX_LAYERS)
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
    return {"sliding_window": fields.integer("sliding_window", 1, _MAX_POSITIONS), "sliding_layers": layers}


def _refuse_bias(fields: Fields) -> None:
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias is true, but this architecture has no such biases.")


def _mixtral(fields: Fields) -> dict[str, Any]:
    _refuse_bias(fields)
    common = _common(fields, kv_heads_default=8, positions_default=131072, eps_default=1e-5, theta_default=1e6)
    layers = common["num_layers"]
    everywhere = tuple(range(layers)) if fields.present("sliding_window") else ()
    sliding = _sliding(fields, layers, everywhere)
    return common | _experts(fields, "intermediate_size") | _every_layer_sparse(layers) | sliding | {"norm_topk_prob": True}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    common = _common(fields, kv_heads_default=16, positions_default=32768, eps_default=1e-6, theta_default=1e4)
    layers = common["num_layers"]
    use_window = fields.flag("use_sliding_window", False)
    below = fields.integer("max_window_layers", 0, _MAX_POSITIONS, 28)
    sliding = _sliding(fields, layers, tuple(range(0, min(below, layers), 2)) if use_window else (), free=use_window)
    return (
        common
        | _experts(fields, "moe_intermediate_size")
        | _sparse_by_step(fields, layers)
        | sliding
        | {
            "norm_topk_prob": fields.flag("norm_topk_prob", False),
            "shared_intermediate": fields.integer("shared_expert_intermediate_size", 1, _MAX_WIDTH, 5632),
            "attention_bias": fields.flag("qkv_bias", True),
        }
    )


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    common = _common(fields, kv_heads_default=4, positions_default=32768, eps_default=1e-6, theta_default=1e4)
    layers = common["num_layers"]
    bias = fields.flag("attention_bias", False)
    everywhere = tuple(range(layers)) if fields.flag("use_sliding_window", False) else ()
    return (
        common
        | _experts(fields, "moe_intermediate_size")
        | _sparse_by_step(fields, layers)
        | _sliding(fields, layers, everywhere)
        | {"norm_topk_prob": fields.flag("norm_topk_prob", False), "attention_bias": bias, "output_bias": bias, "qk_norm": "head"}
    )


def _olmoe(fields: Fields) -> dict[str, Any]:
    common = _common(fields, kv_heads_default=None, positions_default=4096, eps_default=1e-5, theta_default=1e4)
    if common["head_dim"] * common["num_heads"] != common["hidden_size"]:
        raise fields.error("head_dim times num_attention_heads must equal hidden_size for this architecture.")
    if fields.present("sliding_window"):
        raise fields.error("sliding_window is set, which this architecture does not have.")
    layers = common["num_layers"]
    bias = fields.flag("attention_bias", False)
    return (
        common
        | _experts(fields, "intermediate_size")
        | _every_layer_sparse(layers)
        | _sliding(fields, layers, ())
        | {
            "norm_topk_prob": fields.flag("norm_topk_prob", False),
            "attention_bias": bias,
            "output_bias": bias,
            "qk_norm": "full",
            "clip_qkv": fields.number("clip_qkv", 1e-30, 1e30, None),
        }
    )


_FAMILIES: dict[str, tuple[str, Callable[[Fields], dict[str, Any]]]] = {
    "MixtralForCausalLM": ("mixtral", _mixtral),
    "Qwen2MoeForCausalLM": ("qwen2_moe", _qwen2_moe),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _qwen3_moe),
    "OlmoeForCausalLM": ("olmoe", _olmoe),
}
