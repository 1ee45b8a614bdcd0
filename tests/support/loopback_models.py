"""Models as small as a model can be, with the files that a repository on the hub has around one. No torch."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def safetensors_bytes(tensors: Mapping[str, tuple[int, ...]], seed: int) -> bytes:
    """A file of float32 tensors with random content."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(offset)


def model_files(*, shards: int = 3, seed: int = 0, config: Mapping[str, Any] | None = None, extra: bool = True) -> dict[str, bytes]:
    """All files of a repository: a Mixtral of 2 layers in `shards` files (1: model.safetensors), tokenizer, template, licence.

    Args:
        shards: number of weight files.
        seed: of the weights.
        config: overrides config.json; a larger intermediate_size makes larger experts.
        extra: add files that are no business of rimuru's: a README, pickles, another set of weights, an onnx folder.
    """
    from rimuru_models.config import ModelConfig
    from rimuru_models.layout import dense_shapes

    values = {**CONFIG, **(config or {})}
    shape = ModelConfig.from_dict({**CONFIG, "intermediate_size": values["intermediate_size"]})
    tensors: dict[str, tuple[int, ...]] = {
        name.replace(".mlp.gate.", ".block_sparse_moe.gate."): size for name, size in dense_shapes(shape).items()
    }
    for layer in shape.moe_layers:
        for expert in range(shape.num_experts):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            wide, tall = (shape.expert_intermediate, shape.hidden_size), (shape.hidden_size, shape.expert_intermediate)
            tensors |= {f"{prefix}.w1.weight": wide, f"{prefix}.w3.weight": wide, f"{prefix}.w2.weight": tall}
    files = {
        "config.json": json.dumps(values, indent=2).encode(),
        "generation_config.json": b'{"do_sample": false}',
        "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "tokenizer_config.json": b'{"model_max_length": 256}',
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
        "LICENSE": b"Apache License 2.0\n" * 40,
    }
    names = list(tensors)
    if shards == 1:
        files["model.safetensors"] = safetensors_bytes(tensors, seed)
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            mine = names[number::shards]
            files[file] = safetensors_bytes({name: tensors[name] for name in mine}, seed + number)
            weight_map |= dict.fromkeys(mine, file)
        files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    if extra:
        files |= {
            "README.md": b"# A model\n" * 100,
            ".gitattributes": b"*.safetensors filter=lfs\n",
            "pytorch_model.bin": b"pickled" * 100,
            "consolidated.safetensors": safetensors_bytes({"tok_embeddings.weight": (8, 8)}, 9),
            "onnx/model.onnx": b"onnx" * 100,
        }
    return files


LEFT_OUT = ("README.md", ".gitattributes", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx")


def wanted(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Those of `files` that `rimuru pull` takes."""
    left_out = (
        set(LEFT_OUT)
        if "model.safetensors.index.json" in files or "model.safetensors" in files
        else set(LEFT_OUT) - {"consolidated.safetensors"}
    )
    return {name: data for name, data in files.items() if name not in left_out}
