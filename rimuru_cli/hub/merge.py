"""Merging the base model and the adapter into a sparse Mixtral checkpoint, one layer at a time.

In a layer, W = W_base + Bᵀ·A for each group of weights: `qkv` (q, k and v stacked), `o`, `gu` (gate and up stacked, their rows in expert
order) and `d` (down, its columns in expert order). Expert e owns the base's feed-forward neurons that `assign` gives to it, in ascending
order: w1 and w3 are their rows of gate and up, w2 their columns of down times top_k. Mixtral's routing weights are a softmax over the
chosen experts and sum to 1; the factor makes an even split equal to the dense sum. Router and RMSNorm weights are the adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rimuru_cli.hub.gguf_reader import GGUFFile
from rimuru_cli.hub.recipe import Recipe
from rimuru_cli.hub.tensor_stream import to_bfloat16

_EMBEDDING_ROWS = 4096
Bits = npt.NDArray[np.uint16]
Float64 = npt.NDArray[np.float64]
Adapter = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the merged model; expert_width is the number of feed-forward neurons of one expert."""

    vocab_size: int
    context_length: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_width: int
    rope_theta: float
    rms_eps: float

    @classmethod
    def of(cls, base: GGUFFile, recipe: Recipe) -> ModelShape:
        """Take the sizes from the base model's metadata and the recipe. CheckpointError when the metadata lacks one."""
        hidden, heads = base.integer("llama.embedding_length"), base.integer("llama.attention.head_count")
        return cls(
            vocab_size=base.tensor("token_embd.weight").shape[0],
            context_length=base.integer("llama.context_length"),
            hidden_size=hidden,
            num_layers=base.integer("llama.block_count"),
            num_heads=heads,
            num_kv_heads=base.integer("llama.attention.head_count_kv"),
            head_dim=hidden // heads,
            num_experts=recipe.num_experts,
            top_k=recipe.top_k,
            expert_width=base.integer("llama.feed_forward_length") // recipe.num_experts,
            rope_theta=base.number("llama.rope.freq_base"),
            # Stored as float32; config.json wants the decimal number that was meant.
            rms_eps=round(base.number("llama.attention.layer_norm_rms_epsilon"), 12),
        )


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes in file order: experts first, each one's w1, w3, w2 side by side, so that an expert is one run of bytes."""
    hidden, width = shape.hidden_size, shape.expert_width
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    table: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.num_layers):
        for expert in range(shape.num_experts):
            prefix = _expert_prefix(layer, expert)
            table[prefix + "w1.weight"] = (width, hidden)
            table[prefix + "w3.weight"] = (width, hidden)
            table[prefix + "w2.weight"] = (hidden, width)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        table[prefix + "input_layernorm.weight"] = (hidden,)
        table[prefix + "self_attn.q_proj.weight"] = (q_rows, hidden)
        table[prefix + "self_attn.k_proj.weight"] = (kv_rows, hidden)
        table[prefix + "self_attn.v_proj.weight"] = (kv_rows, hidden)
        table[prefix + "self_attn.o_proj.weight"] = (hidden, q_rows)
        table[prefix + "post_attention_layernorm.weight"] = (hidden,)
        table[prefix + "block_sparse_moe.gate.weight"] = (shape.num_experts, hidden)
    table["model.norm.weight"] = (hidden,)
    table["model.embed_tokens.weight"] = (shape.vocab_size, hidden)
    return table


def merged_tensors(base: GGUFFile, adapter: Adapter, shape: ModelShape) -> Iterator[tuple[str, Bits]]:
    """(name, bfloat16 bit patterns) in the order of `tensor_shapes`; the embedding comes in several pieces, rows in order.

    Holds one layer's weights at a time. CheckpointError when the base model lacks a tensor.
    """
    for layer in range(shape.num_layers):
        yield from _experts(base, adapter, shape, layer)
    for layer in range(shape.num_layers):
        yield from _dense(base, adapter, shape, layer)
    yield "model.norm.weight", to_bfloat16(adapter["nf"])
    for first in range(0, shape.vocab_size, _EMBEDDING_ROWS):
        rows = base.read("token_embd.weight", first, min(first + _EMBEDDING_ROWS, shape.vocab_size))
        yield "model.embed_tokens.weight", to_bfloat16(rows)


def _experts(base: GGUFFile, adapter: Adapter, shape: ModelShape, layer: int) -> Iterator[tuple[str, Bits]]:
    width, neurons = shape.expert_width, shape.num_experts * shape.expert_width
    order = np.argsort(adapter["assign"][layer], kind="stable")
    update = low_rank_update(adapter, "gu", layer)
    gate = to_bfloat16(base.read(f"blk.{layer}.ffn_gate.weight")[order] + update[:neurons])
    up = to_bfloat16(base.read(f"blk.{layer}.ffn_up.weight")[order] + update[neurons:])
    down = base.read(f"blk.{layer}.ffn_down.weight")[:, order] + low_rank_update(adapter, "d", layer)
    down_bits = to_bfloat16(down * shape.top_k)
    for expert in range(shape.num_experts):
        mine, prefix = slice(expert * width, (expert + 1) * width), _expert_prefix(layer, expert)
        yield prefix + "w1.weight", gate[mine]
        yield prefix + "w3.weight", up[mine]
        yield prefix + "w2.weight", down_bits[:, mine]


def _dense(base: GGUFFile, adapter: Adapter, shape: ModelShape, layer: int) -> Iterator[tuple[str, Bits]]:
    prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
    query = _halves(base.read(block + "attn_q.weight"), shape.num_heads)
    key = _halves(base.read(block + "attn_k.weight"), shape.num_kv_heads)
    stacked = np.concatenate([query, key, base.read(block + "attn_v.weight")]) + low_rank_update(adapter, "qkv", layer)
    q_rows, kv_rows = len(query), len(key)
    yield prefix + "input_layernorm.weight", to_bfloat16(adapter["n1"][layer])
    yield prefix + "self_attn.q_proj.weight", to_bfloat16(stacked[:q_rows])
    yield prefix + "self_attn.k_proj.weight", to_bfloat16(stacked[q_rows : q_rows + kv_rows])
    yield prefix + "self_attn.v_proj.weight", to_bfloat16(stacked[q_rows + kv_rows :])
    output = base.read(block + "attn_output.weight") + low_rank_update(adapter, "o", layer)
    yield prefix + "self_attn.o_proj.weight", to_bfloat16(output)
    yield prefix + "post_attention_layernorm.weight", to_bfloat16(adapter["n2"][layer])
    yield prefix + "block_sparse_moe.gate.weight", to_bfloat16(adapter["router"][layer])


def low_rank_update(adapter: Adapter, name: str, layer: int) -> Float64:
    """Bᵀ·A of one group of weights in one layer: [out, in], float64, exact.

    The factors are 4-bit integers times float16 scales, so every product is a multiple of 2⁻⁴⁸; as long as the absolute products of an
    element add up to less than 2⁵ (the test suite checks that for the packaged adapter), each partial sum fits float64's 53 bits. No
    order of summation, thread count or fused multiply-add can then change a bit, whatever linear algebra library numpy came with.
    """
    update: Float64 = factor(adapter, "B", name, layer).T @ factor(adapter, "A", name, layer)
    return update


def factor(adapter: Adapter, side: str, name: str, layer: int) -> Float64:
    """Factor `side` ("A": [rank, in], "B": [rank, out]) of a low-rank update, float64.

    Stored two values a byte, the even one in the low nibble, offset by 8, with one float16 scale for each run of values of the last
    dimension (64 in the packaged adapter).
    """
    packed, scales = adapter[f"{side}.{name}.q"][layer], adapter[f"{side}.{name}.s"][layer].astype(np.float64)
    values = np.empty((packed.shape[0], packed.shape[1] * 2), np.float64)
    values[:, 0::2] = packed & 15
    values[:, 1::2] = packed >> 4
    values -= 8
    scaled: Float64 = values.reshape(*scales.shape, -1) * scales[..., None]
    return scaled.reshape(values.shape)


def _halves(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's order of a head's rows (rotary pairs next to each other): first halves of the pairs, then second halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _expert_prefix(layer: int, expert: int) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
