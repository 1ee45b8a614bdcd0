"""Which dense tensors a model needs, by name and shape, and what they take. No torch: all of it follows from the config.

The names are canonical ones; `tensor_map.py` knows how checkpoints may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from rimuru_kernels.packed_weights.format import PackedFormat, page_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.recurrent_config import RecurrentConfig

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def dense_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor that is not a routed expert, in load order. Tied embeddings count once."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        if config.recurrent is not None and layer in config.recurrent_layers:
            shapes |= _recurrent_shapes(prefix, config, config.recurrent)
        else:
            shapes |= _attention_shapes(f"{prefix}.self_attn", config)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if layer in config.moe_layers:
            shapes[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
            if config.shared_intermediate is not None:
                shapes |= _shared_shapes(prefix, config, config.shared_intermediate)
        else:
            assert config.dense_intermediate is not None
            shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, config.dense_intermediate)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def _attention_shapes(prefix: str, config: ModelConfig) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {}
    for name, rows in (("q_proj", q_rows * (2 if config.gated_attention else 1)), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        shapes[f"{prefix}.{name}.weight"] = (rows, hidden)
        if config.attention_bias:
            shapes[f"{prefix}.{name}.bias"] = (rows,)
    if config.qk_norm != "none":
        per_head = config.qk_norm == "head"
        shapes[f"{prefix}.q_norm.weight"] = (head_dim if per_head else q_rows,)
        shapes[f"{prefix}.k_norm.weight"] = (head_dim if per_head else kv_rows,)
    shapes[f"{prefix}.o_proj.weight"] = (hidden, q_rows)
    if config.output_bias:
        shapes[f"{prefix}.o_proj.bias"] = (hidden,)
    return shapes


def recurrent_prefix(config: ModelConfig, layer: int) -> str:
    """Canonical name of a recurrent layer's mixer."""
    assert config.recurrent is not None
    return f"model.layers.{layer}.{'linear_attn' if config.recurrent.kind == 'delta' else 'mamba'}"


def _recurrent_shapes(layer: str, config: ModelConfig, mixer: RecurrentConfig) -> dict[str, Shape]:
    hidden, inner, heads = config.hidden_size, mixer.inner, mixer.value_heads
    if mixer.kind == "mamba2":
        prefix = f"{layer}.mamba"
        projections = {"in_proj": (inner + mixer.channels + heads, hidden)}
        vectors = {"A_log": heads, "D": heads, "dt_bias": heads, "norm.weight": inner}
    else:
        prefix = f"{layer}.linear_attn"
        if config.model_type == "qwen3_next":
            projections = {"in_proj_qkvz": (mixer.channels + inner, hidden), "in_proj_ba": (2 * heads, hidden)}
        else:
            rows = {"in_proj_qkv": mixer.channels, "in_proj_z": inner, "in_proj_b": heads, "in_proj_a": heads}
            projections = {name: (count, hidden) for name, count in rows.items()}
        vectors = {"A_log": heads, "dt_bias": heads, "norm.weight": mixer.value_dim}
    shapes: dict[str, Shape] = {}
    for name, shape in (*projections.items(), ("out_proj", (hidden, inner))):
        shapes[f"{prefix}.{name}.weight"] = shape
        if mixer.projection_bias:
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
    shapes[f"{prefix}.conv1d.weight"] = (mixer.channels, 1, mixer.kernel)
    if mixer.conv_bias:
        shapes[f"{prefix}.conv1d.bias"] = (mixer.channels,)
    return shapes | {f"{prefix}.{name}": (size,) for name, size in vectors.items()}


def _shared_shapes(layer: str, config: ModelConfig, width: int) -> dict[str, Shape]:
    if not config.shared_gate:
        names = f"{layer}.shared_mlp.input_linear.weight", f"{layer}.shared_mlp.output_linear.weight"
        return {names[0]: (2 * width, config.hidden_size), names[1]: (config.hidden_size, width)}
    shapes = _mlp_shapes(f"{layer}.mlp.shared_expert", config.hidden_size, width)
    return shapes | {f"{layer}.mlp.shared_expert_gate.weight": (1, config.hidden_size)}


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def kept_wide(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is held in float32 in a model of half precision, because its formula is computed so."""
    if name.endswith((".A_log", ".dt_bias", ".D")):
        return True
    norms = ("layernorm.weight", ".self_attn.q_norm.weight", ".self_attn.k_norm.weight")
    return config.zero_centred_norms and (name == FINAL_NORM or name.endswith(norms))


def stays_packed(config: ModelConfig, name: str, fmt: PackedFormat) -> bool:
    """Whether a quantised dense matrix may stay packed where a device computes: all but routers and gates, which kernels read as numbers,
    and matrices whose rows are put into another order when they are loaded, where that would tear rows apart that share a scale."""
    if name.endswith((".mlp.gate.weight", ".shared_expert_gate.weight", ".conv1d.weight")):
        return False
    if fmt.group_rows == 1:
        return True
    if name.endswith(".q_proj.weight") and config.gated_attention:
        return config.head_dim % fmt.group_rows == 0
    return not name.endswith((".in_proj_qkvz.weight", ".in_proj_ba.weight"))


@cache
def _plain_bytes(config: ModelConfig, itemsize: int) -> int:
    wide = max(4, itemsize)
    sizes = (math.prod(shape) * (wide if kept_wide(config, name) else itemsize) for name, shape in dense_shapes(config).items())
    return sum(sizes) + config.rotary_dim // 2 * 4


def dense_bytes(config: ModelConfig, itemsize: int, packed: Mapping[str, PackedFormat] | None = None) -> int:
    """Bytes that `load_model` allocates for a dtype of `itemsize` bytes: all dense weights, and the float32 rotary frequencies.

    Args:
        packed: formats of the matrices that stay packed where `stays_packed` says so; None: all become numbers.
    """
    total = _plain_bytes(config, itemsize)
    if not packed:
        return total
    for name, (rows, columns) in ((name, shape) for name, shape in dense_shapes(config).items() if name in packed):
        if stays_packed(config, name, packed[name]):
            total += page_bytes(packed[name], rows, columns) - rows * columns * itemsize
    return total


def expert_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one expert: gate, up and down at `itemsize` bytes an element."""
    return 3 * config.expert_intermediate * config.hidden_size * itemsize


def num_parameters(config: ModelConfig) -> int:
    """All parameters, dense and routed."""
    routed = len(config.moe_layers) * config.num_experts * expert_bytes(config, 1)
    return sum(map(math.prod, dense_shapes(config).values())) + routed
