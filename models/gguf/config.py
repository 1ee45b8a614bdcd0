"""From the metadata of a GGUF file to the words of a config.json, which `ModelConfig` then checks as any other. No torch.

llama.cpp's names stand in the comments of its converter and in its list of keys (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
What a file does not say follows from what llama.cpp does with such a file: whether routers rescale, for one. Which layers are recurrent and
which have experts follows from the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.files import GGUFFiles
from rimuru_models.gguf.header import GGUFHeader

Values = dict[str, Any]
_SOFTMAX = 1
_NO_SCALING = ("", "none")
_MAX_LAYERS = 4096
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
# What would change the result and no family here has; the value, if there is one, that changes nothing.
_FOREIGN: dict[str, object] = {
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "router_logit_softcapping": 0.0,
    "attention.causal": True,
    "attention.max_alibi_bias": 0.0,
    "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": 0,
    "expert_group_count": 1,
    "expert_gating_func": _SOFTMAX,
    "expert_weights_scale": 1.0,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1.0,
    "swin_norm": False,
}
_GRANITE_ONLY = ("logit_scale", "embedding_scale", "residual_scale", "attention.scale")


class _Metadata:
    """Entries of one architecture, by the rest of their names."""

    def __init__(self, files: GGUFFiles, architecture: str) -> None:
        self.header: GGUFHeader = files.main
        self.prefix = f"{architecture}."
        self.layers: dict[int, set[str]] = {}
        for name in files.tensors:
            block = _BLOCK.fullmatch(name)
            if block is not None:
                self.layers.setdefault(int(block[1]), set()).add(block[2])
        self.files = files

    def has(self, name: str) -> bool:
        return self.prefix + name in self.header

    def integer(self, name: str, default: int | None = None) -> int:
        return self.header.integer(self.prefix + name, default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.header.number(self.prefix + name, default)

    def scalar(self, name: str) -> Any:
        return self.header.scalar(self.prefix + name)

    def with_tensor(self, name: str, count: int) -> list[int]:
        """Layers below `count` that have a tensor."""
        return [layer for layer in range(count) if name in self.layers.get(layer, ())]


def _layer_count(data: _Metadata) -> int:
    """Layers of the model itself: those that only guess further tokens come after them and are not used."""
    count = data.integer("block_count") - data.integer("nextn_predict_layers", 0)
    if not 1 <= count <= _MAX_LAYERS:
        raise data.header.broken(f"it has {count} layers")
    return count


def _head_dim(data: _Metadata) -> int | None:
    if not data.has("attention.key_length"):
        return None
    keys, values = data.integer("attention.key_length"), data.integer("attention.value_length", data.integer("attention.key_length"))
    if keys != values:
        raise data.header.broken(f"keys of {keys} and values of {values} elements are not supported")
    return keys


def _kv_heads(data: _Metadata, heads: int) -> int:
    """One number, or one a layer, of which recurrent layers have 0."""
    key = data.prefix + "attention.head_count_kv"
    if data.header.length(key) is None:
        return data.integer("attention.head_count_kv", heads)
    counts = {count for count in data.header.integers(key) if count}
    if len(counts) != 1:
        raise data.header.broken("its layers have different numbers of key heads, which is not supported")
    return counts.pop()


def _common(data: _Metadata) -> Values:
    heads = data.integer("attention.head_count")
    values: Values = {
        "hidden_size": data.integer("embedding_length"),
        "num_hidden_layers": _layer_count(data),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(data, heads),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": data.number("rope.freq_base", 10000.0),
        "max_position_embeddings": data.integer("context_length"),
        "vocab_size": _vocabulary(data),
        "tie_word_embeddings": "output.weight" not in data.files.tensors,
        "hidden_act": "silu",
        "num_experts_per_tok": data.integer("expert_used_count", 0),
    }
    head_dim = _head_dim(data)
    if head_dim is not None:
        values["head_dim"] = head_dim
    scaling = data.scalar("rope.scaling.type")
    if scaling is not None and scaling not in _NO_SCALING:
        values["rope_scaling"] = {"rope_type": str(scaling)[:40]}
    elif data.number("rope.scaling.factor", 1.0) not in (0.0, 1.0) or "rope_freqs.weight" in data.files.tensors:
        values["rope_scaling"] = {"rope_type": "scaled"}
    return values


def _vocabulary(data: _Metadata) -> int:
    found = data.files.tensors.get("token_embd.weight")
    if found is None or len(found[1].shape) != 2:
        raise data.header.broken("it has no token_embd.weight, so it is not a language model")
    return found[1].shape[0]


def _experts(data: _Metadata, width: str) -> Values:
    count = data.integer("expert_count", 0)
    if count < 1:
        raise CheckpointError(
            f"{data.header.where}: it has no experts; only mixture-of-experts models are supported.",
            hint="Get a mixture-of-experts model, for one of Qwen3-30B-A3B.",
        )
    return {"num_experts": count, width: data.integer("expert_feed_forward_length", data.integer("feed_forward_length", 0))}


def _whole_rotary(data: _Metadata, values: Values) -> None:
    """Families whose rotary embedding turns whole heads."""
    head_dim = values.get("head_dim") or values["hidden_size"] // max(1, values["num_attention_heads"])
    turned = data.integer("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise data.header.broken(f"its rotary embedding turns {turned} of {head_dim} dimensions, which this architecture does not")


def _window(data: _Metadata) -> int | None:
    return data.integer("attention.sliding_window") if data.integer("attention.sliding_window", 0) else None


def _dense_layers(data: _Metadata, layers: int) -> Values:
    sparse = data.with_tensor("ffn_gate_inp.weight", layers)
    values: Values = {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer in range(layers) if layer not in sparse]}
    if data.has("feed_forward_length"):
        values["intermediate_size"] = data.integer("feed_forward_length")
    return values


def _mixtral(data: _Metadata) -> Values:
    values = _common(data) | _experts(data, "intermediate_size")
    _whole_rotary(data, values)
    return values | {"num_local_experts": values.pop("num_experts"), "sliding_window": _window(data)}


def _qwen_moe(data: _Metadata) -> Values:
    values = _common(data) | _experts(data, "moe_intermediate_size")
    _whole_rotary(data, values)
    return values | _dense_layers(data, values["num_hidden_layers"])


def _qwen2_moe(data: _Metadata) -> Values:
    shared = data.files.tensors.get("blk.0.ffn_down_shexp.weight")
    width = data.integer("expert_shared_feed_forward_length", shared[1].shape[-1] if shared else data.integer("feed_forward_length", 0))
    return _qwen_moe(data) | {
        "norm_topk_prob": _rescales(data, False),
        "shared_expert_intermediate_size": width,
        "qkv_bias": bool(data.with_tensor("attn_q.bias", _MAX_LAYERS)),
        "use_sliding_window": False,
    }


def _qwen3_moe(data: _Metadata) -> Values:
    return _qwen_moe(data) | {
        "norm_topk_prob": _rescales(data, True),
        "attention_bias": bool(data.with_tensor("attn_q.bias", _MAX_LAYERS)),
        "use_sliding_window": False,
    }


def _rescales(data: _Metadata, usual: bool) -> bool:
    return data.header.flag(data.prefix + "expert_weights_norm", usual)


def _olmoe(data: _Metadata) -> Values:
    values = _common(data) | _experts(data, "intermediate_size")
    _whole_rotary(data, values)
    clamp = data.number("attention.clamp_kqv", 0.0)
    return values | {"norm_topk_prob": _rescales(data, False), "clip_qkv": clamp or None, "attention_bias": False}


def _delta_net(data: _Metadata) -> Values:
    values = _common(data) | _experts(data, "moe_intermediate_size")
    layers = values["num_hidden_layers"]
    head_dim = values.get("head_dim", 256)
    recurrent = data.with_tensor("ssm_conv1d.weight", layers)
    value_heads = data.integer("ssm.time_step_rank")
    inner = data.integer("ssm.inner_size")
    if value_heads < 1 or inner % value_heads:
        raise data.header.broken(f"ssm.inner_size {inner} is not a multiple of ssm.time_step_rank {value_heads}")
    turned = data.integer("rope.dimension_count", head_dim // 4)
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta"), "partial_rotary_factor": turned / max(1, head_dim)}
    return values | {
        "head_dim": head_dim,
        "rope_parameters": rope,
        "layer_types": ["linear_attention" if layer in recurrent else "full_attention" for layer in range(layers)],
        "linear_num_key_heads": data.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": data.integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": data.integer("ssm.conv_kernel"),
        "shared_expert_intermediate_size": data.integer("expert_shared_feed_forward_length", values["moe_intermediate_size"]),
        "attention_bias": bool(data.with_tensor("attn_q.bias", _MAX_LAYERS)),
    }


def _qwen3_next(data: _Metadata) -> Values:
    values = _delta_net(data)
    return values | _dense_layers(data, values["num_hidden_layers"]) | {"norm_topk_prob": _rescales(data, True)}


def _qwen3_5_moe(data: _Metadata) -> Values:
    if not _rescales(data, True):
        raise data.header.broken("its router does not rescale, which this architecture always does")
    return _delta_net(data)


def _granite_hybrid(data: _Metadata) -> Values:
    values = _common(data) | _experts(data, "intermediate_size")
    layers, hidden = values["num_hidden_layers"], max(1, values["hidden_size"])
    recurrent = data.with_tensor("ssm_in.weight", layers)
    inner, heads = data.integer("ssm.inner_size"), data.integer("ssm.time_step_rank")
    if inner % hidden or heads < 1 or inner % heads:
        raise data.header.broken(f"ssm.inner_size {inner} is no multiple of {hidden} elements and {heads} heads")
    # The converter writes this flag for "has positions", and a context that is only a placeholder for models without them.
    positions = data.header.flag(data.prefix + "rope.scaling.finetuned", False)
    if not positions:
        values.pop("rope_scaling", None)
    return values | {
        "num_local_experts": values.pop("num_experts"),
        "shared_intermediate_size": data.integer("expert_shared_feed_forward_length"),
        "layer_types": ["mamba" if layer in recurrent else "attention" for layer in range(layers)],
        "position_embedding_type": "rope" if positions else "nope",
        "attention_bias": bool(data.with_tensor("attn_q.bias", layers)),
        "attention_multiplier": data.number("attention.scale", 1.0),
        "embedding_multiplier": data.number("embedding_scale", 1.0),
        "residual_multiplier": data.number("residual_scale", 1.0),
        "logits_scaling": data.number("logit_scale", 1.0),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": data.integer("ssm.group_count"),
        "mamba_d_state": data.integer("ssm.state_size"),
        "mamba_d_conv": data.integer("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": bool(data.with_tensor("ssm_conv1d.bias", layers)),
        "mamba_proj_bias": bool(data.with_tensor("ssm_in.bias", layers)),
    }


# general.architecture -> (class name, model_type as config.json has them, what reads the rest)
ARCHITECTURES: dict[str, tuple[str, str, Callable[[_Metadata], Values]]] = {
    "llama": ("MixtralForCausalLM", "mixtral", _mixtral),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "olmoe": ("OlmoeForCausalLM", "olmoe", _olmoe),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next", _qwen3_next),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen3_5_moe),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid),
}


def config_values(files: GGUFFiles) -> dict[str, Any]:
    """What config.json would say of this model, as a dict for `ModelConfig.from_dict`.

    Raises:
        CheckpointError: another architecture, metadata that is missing or contradicts itself, or something that would change the result and
            that this architecture does not have.
    """
    header = files.main
    architecture = header.string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.where}: the architecture {architecture[:80]!r} is not supported.", hint=f"Supported: {', '.join(ARCHITECTURES)}."
        )
    data = _Metadata(files, architecture)
    for name, neutral in _FOREIGN.items():
        _refuse(data, name, neutral)
    if architecture != "granitehybrid":
        for name in _GRANITE_ONLY:
            _refuse(data, name, 1.0)
    if architecture != "olmoe":
        _refuse(data, "attention.clamp_kqv", 0.0)
    name, model_type, read = ARCHITECTURES[architecture]
    eos = header.scalar("tokenizer.ggml.eos_token_id")
    ids = {"eos_token_id": eos} if isinstance(eos, int) else {}
    return {"architectures": [name], "model_type": model_type} | read(data) | ids


def _refuse(data: _Metadata, name: str, neutral: object) -> None:
    allowed = (neutral,) if isinstance(neutral, bool) else (neutral, 0)  # 0: llama.cpp's own "not set"
    if data.has(name) and data.scalar(name) not in allowed:
        raise CheckpointError(f"{data.header.where}: {data.prefix}{name} is set, which is not supported for this architecture.")
