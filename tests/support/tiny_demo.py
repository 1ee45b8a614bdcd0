"""A tiny base model (GGUF) and adapter, for building demonstration models in milliseconds through the same code as the real one.

2 layers, hidden 64, 2 heads on 1 KV head of 32, 4 experts of 16 neurons, top-2, byte-level vocabulary of 261 tokens.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from rimuru_cli.hub.recipe import Recipe

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, WIDTH, TOP_K, RANK, GROUP = 2, 64, 2, 1, 32, 4, 16, 2, 4, 16
NEURONS = EXPERTS * WIDTH
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
F32, Q4_1, Q8_0 = 0, 3, 8
U8, I32, U32, FLOAT32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10
# Pinned: the same on every machine, or the build is not reproducible. test_merge.py checks the content by another route.
TINY_MODEL_SHA256 = "8c7e337328639717119b77bb4a16312edcefc31763124442fcede38f9eb2b716"

Entry = tuple[str, int, Any]
Tensor = tuple[str, tuple[int, ...], int, bytes]


def gguf_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(kind: int, value: Any) -> bytes:
    """kind ARRAY takes (element kind, values)."""
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(gguf_value(element, one) for one in values)
    return struct.pack({U8: "<B", I32: "<i", U32: "<I", FLOAT32: "<f", BOOL: "<?", U64: "<Q"}[kind], value)


def gguf_bytes(metadata: Iterable[Entry], tensors: Iterable[Tensor], version: int = 3, alignment: int = 32) -> bytes:
    """A GGUF file. Tensors: name, shape with the slowest dimension first, type, raw bytes."""
    metadata, tensors = list(metadata), list(tensors)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, kind, value in metadata:
        head += gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value)
    data = b""
    for name, shape, kind, raw in tensors:
        data += b"\0" * (-len(data) % alignment)
        head += gguf_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += raw
    return head + b"\0" * (-len(head) % alignment) + data


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: int) -> bytes:
    """Raw bytes of a random tensor with weights of about 0.1."""
    count = int(np.prod(shape))
    if kind == F32:
        return (rng.integers(-128, 128, count) / 1024 + 1).astype("<f4").tobytes()
    blocks = count // 32
    scale = (rng.integers(1, 64, blocks) / 16384).astype("<f2")
    if kind == Q8_0:
        return b"".join(scale[i].tobytes() + rng.integers(-127, 128, 32).astype("i1").tobytes() for i in range(blocks))
    minimum = (-rng.integers(1, 256, blocks) / 8192).astype("<f2")
    return b"".join(scale[i].tobytes() + minimum[i].tobytes() + rng.integers(0, 256, 16).astype("u1").tobytes() for i in range(blocks))


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with (printable bytes as themselves, the others from U+0100 on)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tiny_metadata() -> list[Entry]:
    letters = byte_letters()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", letters[32] + "t"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    template = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    return [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, LAYERS),
        ("llama.context_length", U32, 256),
        ("llama.embedding_length", U32, HIDDEN),
        ("llama.feed_forward_length", U32, NEURONS),
        ("llama.attention.head_count", U32, HEADS),
        ("llama.attention.head_count_kv", U32, KV_HEADS),
        ("llama.rope.freq_base", FLOAT32, 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (I32, kinds)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, ["h e", letters[32] + " t"])),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.padding_token_id", U32, 2),
        ("tokenizer.ggml.unknown_token_id", U32, 0),
        ("tokenizer.chat_template", STRING, template),
    ]


def tiny_tensors(seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    vocab = 261
    shapes: list[tuple[str, tuple[int, ...], int]] = [("token_embd.weight", (vocab, HIDDEN), Q8_0)]
    for layer in range(LAYERS):
        shapes += [
            (f"blk.{layer}.attn_norm.weight", (HIDDEN,), F32),
            (f"blk.{layer}.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN), Q4_1),
            (f"blk.{layer}.attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN), Q4_1),
            (f"blk.{layer}.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN), Q4_1),
            (f"blk.{layer}.attn_output.weight", (HIDDEN, HEADS * HEAD_DIM), Q4_1),
            (f"blk.{layer}.ffn_gate.weight", (NEURONS, HIDDEN), Q4_1),
            (f"blk.{layer}.ffn_up.weight", (NEURONS, HIDDEN), Q4_1),
            (f"blk.{layer}.ffn_down.weight", (HIDDEN, NEURONS), Q4_1),
        ]
    return [(name, shape, kind, random_blocks(rng, shape, kind)) for name, shape, kind in shapes]


def tiny_adapter(seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)

    def small(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.integers(-512, 512, shape) / 4096).astype(np.float16)

    adapter = {
        "assign": np.stack([rng.permutation(np.arange(NEURONS) % EXPERTS) for _ in range(LAYERS)]).astype(np.uint8),
        "router": small(LAYERS, EXPERTS, HIDDEN),
        "n1": small(LAYERS, HIDDEN) + np.float16(1),
        "n2": small(LAYERS, HIDDEN) + np.float16(1),
        "nf": small(HIDDEN) + np.float16(1),
    }
    sizes = {"qkv": (HIDDEN, QKV), "o": (HEADS * HEAD_DIM, HIDDEN), "gu": (HIDDEN, 2 * NEURONS), "d": (NEURONS, HIDDEN)}
    for name, (inner, outer) in sizes.items():
        for side, width in (("A", inner), ("B", outer)):
            adapter[f"{side}.{name}.q"] = rng.integers(0, 256, (LAYERS, RANK, width // 2)).astype(np.uint8)
            adapter[f"{side}.{name}.s"] = (rng.integers(1, 128, (LAYERS, RANK, width // GROUP)) / 8192).astype(np.float16)
    return adapter


@dataclass(frozen=True)
class TinyDemo:
    """A recipe and the base model that goes with it."""

    recipe: Recipe
    gguf: Path


def write_tiny_demo(folder: Path, model_sha256: str | None = None) -> TinyDemo:
    """Write a package `tiny_wheel` with the base model, and the adapter's data folder, below `folder`."""
    wheel, data = folder / "tiny_wheel", folder / "data"
    wheel.mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    (wheel / "__init__.py").write_text("raise RuntimeError('this package must not be imported')\n", encoding="utf-8")
    base = gguf_bytes(tiny_metadata(), tiny_tensors())
    (wheel / "tiny.gguf").write_bytes(base)
    adapter = save(tiny_adapter())
    (data / "adapter.safetensors").write_bytes(adapter)
    for name in ("NOTICE.md", "LICENSE"):
        (data / name).write_text(f"{name} of a test\n", encoding="utf-8")
    described = {
        "name": "Tiny-MoE",
        "base": {
            "wheel": "tiny-wheel",
            "wheel_version": "1.2.3",
            "file": "tiny_wheel/tiny.gguf",
            "gguf_sha256": hashlib.sha256(base).hexdigest(),
        },
        "adapter_sha256": hashlib.sha256(adapter).hexdigest(),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    (data / "adapter.json").write_text(json.dumps(described), encoding="utf-8")
    return TinyDemo(Recipe.from_folder(data, model_sha256 or TINY_MODEL_SHA256), wheel / "tiny.gguf")
