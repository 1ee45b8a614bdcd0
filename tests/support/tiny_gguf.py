"""Random GGUF files of every supported family, written with the `gguf` package as llama.cpp's converter writes them.

`write_tiny_gguf` starts from a tiny checkpoint (`tiny_checkpoints.py`), does to its tensors what the converter does and quantises them. It
also writes the checkpoint that the file means: safetensors in float32 with the numbers that the `gguf` package reads out of the blocks, at
the places where they belong. Places are found by sending numbers of elements through the converter's own rearrangement.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_tiny_checkpoint

Array = np.ndarray
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe": "qwen35moe",
    "granitemoehybrid": "granitehybrid",
}
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def _permute(weights: Array, heads: int) -> Array:
    """LlamaModel.permute of the converter."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _reorder_v_heads(tensor: Array, axis: int, key_heads: int, per_key: int, width: int) -> Array:
    """_LinearAttentionVReorderBase._reorder_v_heads of the converter."""
    shape = list(tensor.shape)
    cut = tensor.reshape(*shape[:axis], key_heads, per_key, width, *shape[axis + 1 :])
    return cut.swapaxes(axis, axis + 1).reshape(shape)


class _Converter:
    """What the converter does to one family's tensors. `rearranged` moves elements only; `changed` is what it does to numbers."""

    def __init__(self, family: str, config: dict[str, Any], fuse: bool, old: bool) -> None:
        self.family = family
        self.config = config.get("text_config", config)
        self.fuse = fuse
        self.old = old

    def rearranged(self, tensors: dict[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, tensor in self._stacked(tensors).items():
            name = name.replace("model.language_model.", "model.")
            if name.startswith(("mtp.", "model.visual.")):
                continue
            found |= self._one(name, tensor)
        return found

    def _stacked(self, tensors: dict[str, Array]) -> dict[str, Array]:
        """Experts of a layer in one tensor a projection; fused ones cut."""
        out: dict[str, Array] = {}
        parts: dict[str, list[Array]] = {}
        for name, tensor in tensors.items():
            pieces = name.split(".experts.")
            if len(pieces) == 2 and pieces[1][0].isdigit():
                if self.old and self.family == "mixtral":
                    out[name] = tensor
                else:
                    parts.setdefault(f"{pieces[0]}.experts.{pieces[1].split('.')[1]}", []).append(tensor)
            elif name.endswith("experts.gate_up_proj") or name.endswith("block_sparse_moe.input_linear.weight"):
                stem = name.removesuffix("gate_up_proj").removesuffix("input_linear.weight")
                half = tensor.shape[1] // 2
                out[f"{stem}gate_proj"], out[f"{stem}up_proj"] = tensor[:, :half], tensor[:, half:]
            else:
                out[name] = tensor
        return out | {name: np.stack(tensors) for name, tensors in parts.items()}

    def _one(self, name: str, tensor: Array) -> dict[str, Array]:
        config = self.config
        top = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        if name in top:
            return {top[name]: tensor}
        _, _, layer, rest = name.split(".", 3)
        block = f"blk.{layer}."
        rest = rest.replace("block_sparse_moe.", "mlp.") if self.family != "granitemoehybrid" else rest
        if ".experts." in rest and rest.split(".experts.")[1][0].isdigit():  # the oldest Mixtral files
            _, expert, part = rest.removesuffix(".weight").rsplit(".", 2)
            return {f"{block}ffn_{ {'w1': 'gate', 'w2': 'down', 'w3': 'up'}[part] }.{expert}.weight": tensor}
        experts = {
            "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down", "output_linear": "down",
        }  # fmt: skip
        if ".experts." in rest or rest.startswith(("block_sparse_moe.gate", "block_sparse_moe.up", "block_sparse_moe.output")):
            return {f"{block}ffn_{experts[rest.removesuffix('.weight').split('.')[-1]]}_exps.weight": tensor}
        if rest == "shared_mlp.input_linear.weight":
            half = len(tensor) // 2
            return {f"{block}ffn_gate_shexp.weight": tensor[:half], f"{block}ffn_up_shexp.weight": tensor[half:]}
        if rest.startswith(("linear_attn.", "mamba.")):
            return {block + one: part for one, part in self._mixer(rest.split(".", 1)[1], tensor).items()}
        if rest == "mlp.shared_expert_gate.weight":
            return {f"{block}ffn_gate_inp_shexp.weight": tensor.reshape(-1)}
        post = "post_attention_norm" if self.family in ("qwen3_next", "qwen3_5_moe") else "ffn_norm"
        names = {
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": f"{post}.weight",
            "self_attn.o_proj.weight": "attn_output.weight",
            "self_attn.q_norm.weight": "attn_q_norm.weight",
            "self_attn.k_norm.weight": "attn_k_norm.weight",
            "mlp.gate.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        }
        if rest in names:
            return {block + names[rest]: tensor}
        if rest.startswith("self_attn."):
            letter, kind = rest[10], rest.rsplit(".", 1)[1]
            if self.family in ("mixtral", "granitemoehybrid") and letter in "qk":
                tensor = _permute(tensor, config["num_attention_heads" if letter == "q" else "num_key_value_heads"])
            return {f"{block}attn_{letter}.{kind}": tensor}
        part = rest.removesuffix(".weight").removesuffix("_proj").removeprefix("mlp.")
        return {f"{block}ffn_{part.removeprefix('shared_expert.')}{'_shexp' if 'shared' in part else ''}.weight": tensor}

    def _mixer(self, name: str, tensor: Array) -> dict[str, Array]:
        config = self.config
        if name.startswith("conv1d."):
            tensor = tensor.squeeze()
        if self.family == "granitemoehybrid":
            tensor = tensor.reshape(-1, 1) if name in ("A_log", "D") else tensor
            tensor = tensor.reshape(config["mamba_n_groups"], -1) if name == "norm.weight" else tensor
            names = {"in_proj.weight": "ssm_in.weight", "in_proj.bias": "ssm_in.bias", "D": "ssm_d"}
        else:
            keys, dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
            per_key, dv = config["linear_num_value_heads"] // keys, config["linear_value_head_dim"]
            if name == "in_proj_qkvz.weight" and not self.old:
                cut = tensor.reshape(keys, -1, tensor.shape[1])
                bounds = np.cumsum([dk, dk, per_key * dv])
                q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in np.split(cut, bounds, axis=1))
                return {"attn_qkv.weight": np.concatenate((q, k, v)), "attn_gate.weight": z}
            if self.family == "qwen3_5_moe" and per_key > 1:
                width = {"in_proj_z.weight": dv, "in_proj_a.weight": 1, "in_proj_b.weight": 1, "A_log": 1, "dt_bias": 1}.get(name)
                if width is not None:
                    tensor = _reorder_v_heads(tensor, 0, keys, per_key, width)
                elif name in ("in_proj_qkv.weight", "conv1d.weight"):
                    front = 2 * keys * dk
                    tensor = np.concatenate((tensor[:front], _reorder_v_heads(tensor[front:], 0, keys, per_key, dv)))
                elif name == "out_proj.weight":
                    tensor = _reorder_v_heads(tensor, 1, keys, per_key, dv)
            names = {
                "in_proj_qkvz.weight": "ssm_in.weight",
                "in_proj_ba.weight": "ssm_ba.weight",
                "in_proj_qkv.weight": "attn_qkv.weight",
                "in_proj_z.weight": "attn_gate.weight",
                "in_proj_a.weight": "ssm_alpha.weight",
                "in_proj_b.weight": "ssm_beta.weight",
            }
        names |= {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight"}
        return {names.get(name, name.replace("conv1d", "ssm_conv1d").replace("out_proj", "ssm_out")): tensor}

    def changed(self, name: str, values: Array) -> Array:
        if name.endswith("ssm_a"):
            return -np.exp(values)
        if self.family in ("qwen3_next", "qwen3_5_moe") and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            return values + np.float32(1)
        return values


def metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any], *, mtp: int = 0) -> None:
    """The entries that the converter writes for a family."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or {}
    layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    writer.add_block_count(layers + mtp)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or text["rope_theta"])
    writer.add_expert_count(text.get("num_local_experts") or text["num_experts"])
    writer.add_expert_used_count(text["num_experts_per_tok"])
    if text.get("intermediate_size"):
        writer.add_feed_forward_length(text["intermediate_size"])
    if text.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family != "granitemoehybrid":
        writer.add_head_count_kv(text["num_key_value_heads"])
    if "moe_intermediate_size" in text:
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in text:
        writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    if family == "mixtral":
        writer.add_vocab_size(text["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    elif family in ("qwen3_next", "qwen3_5_moe"):
        writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(text["linear_key_head_dim"])
        writer.add_ssm_group_count(text["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
        writer.add_ssm_inner_size(text["linear_value_head_dim"] * text["linear_num_value_heads"])
        writer.add_full_attention_interval(text["full_attention_interval"])
        writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or text.get("partial_rotary_factor", 0.25))))
        if "mrope_section" in rope:
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        if mtp:
            writer.add_nextn_predict_layers(mtp)
    elif family == "granitemoehybrid":
        attention = [kind == "attention" for kind in text["layer_types"]]
        writer.add_head_count_kv([text["num_key_value_heads"] if here else 0 for here in attention])
        writer.add_attention_scale(text["attention_multiplier"])
        writer.add_embedding_scale(text["embedding_multiplier"])
        writer.add_residual_scale(text["residual_multiplier"])
        writer.add_logit_scale(text["logits_scaling"])
        writer.add_expert_shared_feed_forward_length(text["shared_intermediate_size"])
        writer.add_ssm_conv_kernel(text["mamba_d_conv"])
        writer.add_ssm_state_size(text["mamba_d_state"])
        writer.add_ssm_group_count(text["mamba_n_groups"])
        writer.add_ssm_inner_size(text["mamba_expand"] * hidden)
        writer.add_ssm_time_step_rank(text["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(text["position_embedding_type"] == "rope")
        writer.add_rope_dimension_count(head_dim)


def encode(kind: str, values: Array, seed: int) -> Array:
    """Blocks of a type: by the `gguf` package, and where it cannot, random ones about as large as `values`."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in K_TYPES:
        return gguf.quantize(values, number)
    weights, size = gguf.GGML_QUANT_SIZES[number]
    rows = values.reshape(-1, values.shape[-1])
    blocks = np.random.default_rng(seed).integers(0, 256, (*rows.shape[:1], rows.shape[1] // weights, size), dtype=np.uint8)
    spread = float(values.std())
    if kind == "Q6_K":
        blocks[..., -2:] = np.array([spread / 1300], np.float16).view(np.uint8)
    else:
        step = spread / (290 if kind == "Q4_K" else 580)
        blocks[..., :4] = np.array([step, step * (7.5 if kind == "Q4_K" else 15.5)], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write_tiny_gguf(
    folder: Path,
    family: str,
    kind_of: Callable[[str], str] = lambda name: "Q8_0",
    *,
    seed: int = 0,
    fuse: bool = False,
    old: bool = False,
    mtp: int = 0,
    parts: int = 1,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    name: str = "tiny",
    **options: Any,
) -> tuple[Path, Path]:
    """Write a GGUF file and the checkpoint it means; returns the paths of both: the (first) file, and a folder.

    Args:
        kind_of: GGUF name of a matrix -> its type; where rows are no whole number of blocks, and for vectors and routers, F32 is taken.
        fuse: gate and up of experts in one tensor. old: the arrangement of older files. mtp: layers that guess further tokens.
        parts: files to split it into.
        more: writes further metadata (a tokenizer, say).
        options: of `write_tiny_checkpoint`.
    """
    source = write_tiny_checkpoint(folder / "source", family, seed=seed, **options)
    return write_gguf(source, folder, family, kind_of, seed=seed, fuse=fuse, old=old, mtp=mtp, parts=parts, more=more, name=name)


def write_gguf(
    source: Path,
    folder: Path,
    family: str,
    kind_of: Callable[[str], str],
    *,
    seed: int = 0,
    fuse: bool = False,
    old: bool = False,
    mtp: int = 0,
    parts: int = 1,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    name: str = "tiny",
) -> tuple[Path, Path]:
    """The same for a checkpoint in one file that exists, in `source`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    originals = {key: value.float().numpy() for key, value in load_file(source / "model.safetensors").items()}
    converter = _Converter(family, config, fuse, old)
    arranged = converter.rearranged(originals)
    # Where each element of the file comes from: its number among all elements of the checkpoint.
    starts = np.cumsum([0, *(value.size for value in originals.values())])
    places = converter.rearranged(
        {
            key: np.arange(start, start + value.size).reshape(value.shape)
            for (key, value), start in zip(originals.items(), starts, strict=False)
        }
    )
    if fuse:
        for table in (arranged, places):
            for gate in [key for key in table if key.endswith("ffn_gate_exps.weight")]:
                up = gate.replace("ffn_gate_exps", "ffn_up_exps")
                table[gate.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate((table.pop(gate), table.pop(up)), axis=1)
    flat = np.concatenate([value.reshape(-1) for value in originals.values()])
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family], split_max_tensors=-(-len(arranged) // parts) if parts > 1 else 0)
    metadata(writer, family, config, mtp=mtp)
    if more is not None:
        more(writer)
    for number, (key, value) in enumerate(arranged.items()):
        kind = kind_of(key) if value.ndim > 1 and "ffn_gate_inp" not in key and "conv1d" not in key and "norm" not in key else "F32"
        kind = (
            kind
            if key not in ("ssm_a", "ssm_d") and value.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
            else "F32"
        )
        kind = "F32" if key.endswith(("ssm_a", "ssm_d")) else kind
        raw = encode(kind, converter.changed(key, np.ascontiguousarray(value)), seed + number)
        if kind == "F32":
            writer.add_tensor(key, raw)
            continue
        flat[places[key].reshape(-1)] = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
        writer.add_tensor(key, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    if mtp:
        writer.add_tensor(
            f"blk.{config.get('text_config', config)['num_hidden_layers']}.nextn.eh_proj.weight", np.zeros((8, 32), np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    meant = folder / "meant"
    meant.mkdir(exist_ok=True)
    (meant / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {
        key: torch.from_numpy(flat[start : start + value.size].reshape(value.shape).copy())
        for (key, value), start in zip(originals.items(), starts, strict=False)
    }
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})
    return (path if parts == 1 else folder / f"{name}-00001-of-{parts:05d}.gguf"), meant


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str, *, rows: int | None = None) -> None:
    """Metadata of the tokenizer in a folder (tokenizer.json, tokenizer_config.json), as the converter writes byte-level ones.

    Args:
        pre: what GGUF calls the way it cuts text.
        rows: of the embedding; the vocabulary is padded to so many.
    """
    from tokenizers import Tokenizer

    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = fast.get_vocab(with_added_tokens=True)
    by_id, added = {number: token for token, number in vocabulary.items()}, fast.get_added_tokens_decoder()
    tokens, kinds = [], []
    for number in range(rows or max(by_id) + 1):
        token = by_id.get(number)
        tokens.append(f"[PAD{number}]" if token is None else token)
        if token is None:
            kinds.append(gguf.TokenType.UNUSED)
        elif number in added:
            special = added[number].special or (token.startswith("<|") and token.endswith("|>"))
            kinds.append(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = described["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        value = config.get(name)
        value = value["content"] if isinstance(value, dict) else value
        if value in vocabulary:
            add(vocabulary[value])
    template = config.get("chat_template")
    if isinstance(template, str):
        writer.add_chat_template(template)


def write_vocabulary(path: Path, folder: Path, pre: str, architecture: str = "qwen3moe", **more: Any) -> Path:
    """A GGUF file that holds a tokenizer and no weights."""
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer, folder, pre, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
