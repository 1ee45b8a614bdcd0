from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from rimuru_cli.hub import embedded
from rimuru_cli.hub.gguf_reader import GGUFFile
from rimuru_cli.hub.merge import factor, low_rank_update
from rimuru_cli.hub.recipe import PACKAGED_FOLDER, Recipe


def test_factor_unpacks_low_nibble_first_with_a_scale_for_each_run() -> None:
    adapter = {
        "A.x.q": np.array([[[0x0F, 0x80]]], np.uint8),  # values 15, 0, 0, 8, less 8: 7, -8, -8, 0
        "A.x.s": np.array([[[0.5, 2.0]]], np.float16),
    }
    assert factor(adapter, "A", "x", 0).tolist() == [[3.5, -4.0, -16.0, 0.0]]


def test_packaged_adapter_is_intact_and_its_products_are_exact_in_float64() -> None:
    recipe = Recipe.packaged()
    path = PACKAGED_FOLDER / "adapter.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == recipe.adapter_sha256
    adapter = load_file(path)
    for name in ("qkv", "o", "gu", "d"):
        rank = adapter[f"A.{name}.q"].shape[1]
        largest = math.prod(8.0 * float(np.abs(adapter[f"{side}.{name}.s"]).max()) for side in "AB")
        assert rank * largest < 2**5, name  # with multiples of 2^-48, so every partial sum fits 53 bits


def test_update_does_not_depend_on_the_order_of_summation() -> None:
    adapter = tiny.tiny_adapter()
    a, b = factor(adapter, "A", "gu", 1), factor(adapter, "B", "gu", 1)
    total = np.zeros((b.shape[1], a.shape[1]))
    for rank in reversed(range(len(a))):
        total += np.outer(b[rank], a[rank])
    np.testing.assert_array_equal(low_rank_update(adapter, "gu", 1), total)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny.TinyDemo, Path]:
    folder = tmp_path_factory.mktemp("merge")
    demo = tiny.write_tiny_demo(folder)
    return demo, embedded.build(folder / "cache", recipe=demo.recipe, gguf=demo.gguf)


def rounded(value: float) -> float:
    """To bfloat16 through float32, by torch."""
    return float(torch.tensor(value, dtype=torch.float64).float().bfloat16())


def test_each_weight_is_the_base_weight_plus_the_update_in_its_place(demo: tuple[tiny.TinyDemo, Path]) -> None:
    """Picks single weights of the built file and computes each from the definition, neuron by neuron."""
    made, folder = demo
    adapter = tiny.tiny_adapter()
    rng = np.random.default_rng(5)
    with GGUFFile(made.gguf) as base, safe_open(folder / "model.safetensors", "pt") as file:

        def update(name: str, layer: int, row: int, column: int) -> float:
            a, b = factor(adapter, "A", name, layer), factor(adapter, "B", name, layer)
            return math.fsum(b[r, row] * a[r, column] for r in range(tiny.RANK))

        def weight(name: str, row: int, column: int) -> float:
            return float(file.get_slice(name)[row : row + 1, column : column + 1])

        for _ in range(40):
            layer, expert = int(rng.integers(tiny.LAYERS)), int(rng.integers(tiny.EXPERTS))
            within, column = int(rng.integers(tiny.WIDTH)), int(rng.integers(tiny.HIDDEN))
            mine = [neuron for neuron in range(tiny.NEURONS) if adapter["assign"][layer][neuron] == expert]
            neuron, place = mine[within], expert * tiny.WIDTH + within
            block, prefix = f"blk.{layer}.", f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            gate = float(base.read(block + "ffn_gate.weight")[neuron, column]) + update("gu", layer, place, column)
            up = float(base.read(block + "ffn_up.weight")[neuron, column]) + update("gu", layer, tiny.NEURONS + place, column)
            down = float(base.read(block + "ffn_down.weight")[column, neuron]) + update("d", layer, column, place)
            assert weight(prefix + "w1.weight", within, column) == rounded(gate)
            assert weight(prefix + "w3.weight", within, column) == rounded(up)
            assert weight(prefix + "w2.weight", column, within) == rounded(tiny.TOP_K * down)

            head, pair, half = int(rng.integers(tiny.HEADS)), int(rng.integers(tiny.HEAD_DIM // 2)), int(rng.integers(2))
            row = head * tiny.HEAD_DIM + half * tiny.HEAD_DIM // 2 + pair
            stored = head * tiny.HEAD_DIM + 2 * pair + half  # GGUF keeps the two halves of a rotary pair side by side
            query = float(base.read(block + "attn_q.weight")[stored, column]) + update("qkv", layer, row, column)
            attention = f"model.layers.{layer}.self_attn."
            assert weight(attention + "q_proj.weight", row, column) == rounded(query)
            k_row, k_stored = half * tiny.HEAD_DIM // 2 + pair, 2 * pair + half
            at = tiny.HEADS * tiny.HEAD_DIM + k_row
            key = float(base.read(block + "attn_k.weight")[k_stored, column]) + update("qkv", layer, at, column)
            assert weight(attention + "k_proj.weight", k_row, column) == rounded(key)
            at = (tiny.HEADS + tiny.KV_HEADS) * tiny.HEAD_DIM + k_row
            value = float(base.read(block + "attn_v.weight")[k_row, column]) + update("qkv", layer, at, column)
            assert weight(attention + "v_proj.weight", k_row, column) == rounded(value)
            output = float(base.read(block + "attn_output.weight")[column, row]) + update("o", layer, column, row)
            assert weight(attention + "o_proj.weight", column, row) == rounded(output)

        for name, expected in (
            ("model.embed_tokens.weight", base.read("token_embd.weight")),
            ("model.norm.weight", adapter["nf"]),
            ("model.layers.1.input_layernorm.weight", adapter["n1"][1]),
            ("model.layers.1.post_attention_layernorm.weight", adapter["n2"][1]),
            ("model.layers.1.block_sparse_moe.gate.weight", adapter["router"][1]),
        ):
            assert torch.equal(file.get_tensor(name), torch.from_numpy(expected.astype(np.float32)).bfloat16())


def test_an_expert_is_one_run_of_bytes(demo: tuple[tiny.TinyDemo, Path]) -> None:
    from rimuru_models.headers import read_header

    tensors = read_header(demo[1] / "model.safetensors").tensors
    for layer in range(tiny.LAYERS):
        for expert in range(tiny.EXPERTS):
            gate, up, down = (tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}.weight"] for w in ("w1", "w3", "w2"))
            assert (gate.stop, up.stop) == (up.start, down.start)


def test_small_files_describe_the_model(demo: tuple[tiny.TinyDemo, Path]) -> None:
    import json

    from tokenizers import Tokenizer

    folder = demo[1]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["num_local_experts"], config["num_experts_per_tok"]) == (["MixtralForCausalLM"], 4, 2)
    assert (config["intermediate_size"], config["head_dim"], config["rope_theta"], config["rms_norm_eps"]) == (16, 32, 10000.0, 1e-5)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["eos_token_id"], generation["temperature"], generation["repetition_penalty"]) == (2, 0.7, 1.05)
    described = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert described["eos_token"] == "<|im_end|>" and "<|im_start|>" in described["chat_template"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nthe  year 1984, é 你好 🎉<|im_end|>"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.ids[0] == 1 and encoded.ids[-1] == 2
    assert [token for token in encoded.tokens if token in ("1", "9", "8", "4")] == ["1", "9", "8", "4"]
    assert "he" in encoded.tokens
