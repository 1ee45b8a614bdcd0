"""Where a GGUF file keeps the tensors of a model, and what llama.cpp's converter did to them. No torch.

Canonical names are those of `rimuru_models.layout`; the converter (github.com/ggml-org/llama.cpp, conversion/) changes more than names:

    llama, granitehybrid    rows of q and k: each head's two halves are interleaved, for another form of the rotary embedding
    qwen3next, qwen35moe    norms hold 1 + w (not that of the recurrent mixer)
    recurrent mixers        ssm_a holds -exp(A_log); the convolution has lost its middle dimension of 1
    qwen3next               in_proj_qkvz is cut: q, k and v of all heads in attn_qkv, z in attn_gate (older files have it whole in ssm_in)
    qwen35moe               value heads of one key head lie apart: the first of every key head, then the second of each, and so on,
                            in all rows that belong to value heads and in the columns of ssm_out
    granitehybrid           the two halves of the shared MLP's input are two tensors
    experts                 one tensor a projection and layer, [E, out, in]; newer files may have gate and up in one, the oldest
                            have three an expert
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from rimuru_models.config import ModelConfig
from rimuru_models.layout import EMBEDDING, FINAL_NORM, LM_HEAD, dense_shapes
from rimuru_models.recurrent_config import RecurrentConfig

Order = npt.NDArray[np.int64]
Change = Literal["none", "one less", "log of the negative"]


@dataclass(frozen=True)
class Source:
    """Where a canonical dense tensor comes from.

    Attributes:
        names: tensors of the file whose rows follow each other.
        rows: gives an order: row i of the canonical tensor is row rows()[i] of these; None: the same. It is asked for only when the shapes
            in the file have been found to be right: before that, the sizes are a stranger's words.
        columns: likewise for columns.
        change: what to do with the numbers.
    """

    names: tuple[str, ...]
    rows: Callable[[], Order] | None = None
    columns: Callable[[], Order] | None = None
    change: Change = "none"


@dataclass(frozen=True)
class ExpertSource:
    """Where a layer's experts come from: three stacked tensors (gate, up, down), two (gate and up in one, down), or three an expert."""

    stacked: tuple[str, ...] = ()
    single: tuple[tuple[str, str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors."""
        return self.stacked or tuple(name for names in self.single for name in names)


def halves_joined(heads: int, head_dim: int) -> Order:
    """Rows of q or k as the reference has them, of heads whose halves are interleaved."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def grouped(key_heads: int, value_heads: int, width: int, before: int = 0) -> Order:
    """Rows of value heads by key head, of heads that lie in turns; `width` rows a head, and `before` rows of something else in front."""
    order = np.arange(value_heads * width).reshape(value_heads // key_heads, key_heads, width).swapaxes(0, 1).reshape(-1)
    return np.concatenate((np.arange(before), before + order))


def by_key_head(mixer: RecurrentConfig) -> Order:
    """Rows of in_proj_qkvz (per key head q, k, its v, its z) out of those of q, k, v and z, each of all heads."""
    heads, keys = mixer.key_heads, mixer.key_heads * mixer.key_dim
    parts, start = [], 0
    for rows in (keys, keys, mixer.inner, mixer.inner):
        parts.append((start + np.arange(rows)).reshape(heads, -1))
        start += rows
    return np.concatenate(parts, axis=1).reshape(-1)


def dense_sources(config: ModelConfig, present: frozenset[str]) -> dict[str, Source]:
    """Canonical name -> Source of every dense tensor; `present`: names in the file, which decide between old and new arrangements."""
    return {name: _source(config, name, present) for name in dense_shapes(config)}


def _source(config: ModelConfig, name: str, present: frozenset[str]) -> Source:
    shift: Change = "one less" if config.zero_centred_norms else "none"
    if name == EMBEDDING:
        return Source(("token_embd.weight",))
    if name == FINAL_NORM:
        return Source(("output_norm.weight",), change=shift)
    if name == LM_HEAD:
        return Source(("output.weight",))
    _, _, layer, rest = name.split(".", 3)
    block = f"blk.{layer}."
    if rest in _PLAIN:
        return Source((block + _PLAIN[rest],))
    if rest == "input_layernorm.weight":
        return Source((f"{block}attn_norm.weight",), change=shift)
    if rest == "post_attention_layernorm.weight":
        return Source((block + ("post_attention_norm" if config.zero_centred_norms else "ffn_norm") + ".weight",), change=shift)
    if rest in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        return Source((f"{block}attn_{rest[10]}_norm.weight",), change=shift)
    part, projection, kind = rest.split(".") if rest.count(".") == 2 else (rest.split(".")[0], rest.split(".")[1], "")
    if part == "self_attn":
        return _attention(config, block, projection, kind)
    if part == "shared_mlp":
        names = ("ffn_gate_shexp", "ffn_up_shexp") if projection == "input_linear" else ("ffn_down_shexp",)
        return Source(tuple(f"{block}{one}.weight" for one in names))
    assert config.recurrent is not None, name
    return _mixer(config, config.recurrent, block, projection, kind, present)


_PLAIN = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
_INTERLEAVED = ("mixtral", "granitemoehybrid")


def _attention(config: ModelConfig, block: str, projection: str, kind: str) -> Source:
    letter = projection[0]
    name = f"{block}attn_{'output' if letter == 'o' else letter}.{kind}"
    heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(letter)
    if heads is None or config.model_type not in _INTERLEAVED:
        return Source((name,))
    return Source((name,), rows=partial(halves_joined, heads, config.head_dim))


def _mixer(config: ModelConfig, mixer: RecurrentConfig, block: str, name: str, kind: str, present: frozenset[str]) -> Source:
    tiled = config.model_type.startswith("qwen3_5") and mixer.key_heads != mixer.value_heads
    keys, values = mixer.key_heads, mixer.value_heads
    per_head = partial(grouped, keys, values, 1) if tiled else None
    per_value = partial(grouped, keys, values, mixer.value_dim) if tiled else None
    after_keys = partial(grouped, keys, values, mixer.value_dim, 2 * keys * mixer.key_dim) if tiled else None
    match name:
        case "in_proj":
            return Source((f"{block}ssm_in.{kind}",))
        case "in_proj_qkvz":
            if f"{block}ssm_in.weight" in present:
                return Source((f"{block}ssm_in.weight",))
            return Source((f"{block}attn_qkv.weight", f"{block}attn_gate.weight"), rows=partial(by_key_head, mixer))
        case "in_proj_ba":
            return Source((f"{block}ssm_ba.weight",))
        case "in_proj_qkv":
            return Source((f"{block}attn_qkv.weight",), rows=after_keys)
        case "in_proj_z":
            return Source((f"{block}attn_gate.weight",), rows=per_value)
        case "in_proj_b":
            return Source((f"{block}ssm_beta.weight",), rows=per_head)
        case "in_proj_a":
            return Source((f"{block}ssm_alpha.weight",), rows=per_head)
        case "conv1d":
            return Source((f"{block}ssm_conv1d.{kind}",), rows=after_keys)
        case "out_proj":
            return Source((f"{block}ssm_out.{kind}",), columns=per_value if kind == "weight" else None)
        case "norm":
            return Source((f"{block}ssm_norm.weight",))
        case "A_log":
            return Source((f"{block}ssm_a",), rows=per_head, change="log of the negative")
        case "dt_bias":
            return Source((f"{block}ssm_dt.bias",), rows=per_head)
        case _:
            assert name == "D", name
            return Source((f"{block}ssm_d",))


def expert_source(config: ModelConfig, layer: int, present: frozenset[str]) -> ExpertSource:
    """Where the experts of a sparse layer are; of several arrangements the one that is there, else the usual one."""
    block = f"blk.{layer}."
    if f"{block}ffn_gate_up_exps.weight" in present:
        return ExpertSource((f"{block}ffn_gate_up_exps.weight", f"{block}ffn_down_exps.weight"))
    if {f"{block}ffn_gate.{number}.weight" for number in (0, config.num_experts - 1)} <= present:
        parts = ("ffn_gate", "ffn_up", "ffn_down")
        return ExpertSource(
            single=tuple(
                (f"{block}{parts[0]}.{e}.weight", f"{block}{parts[1]}.{e}.weight", f"{block}{parts[2]}.{e}.weight")
                for e in range(config.num_experts)
            )
        )
    return ExpertSource(tuple(f"{block}ffn_{part}_exps.weight" for part in ("gate", "up", "down")))


def belongs_to_no_layer(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is one of the layers that guess further tokens, which follow those of the model and are not used."""
    parts = name.split(".")
    return parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() and int(parts[1][:9]) >= config.num_layers
