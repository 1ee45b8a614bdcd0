"""The largest matrices, lm_head and embeddings, are in memory once while they are loaded, packed or as numbers, and not several times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peak_memory import peak_of
from quantised import KINDS, foreign_imports, write_quantised_checkpoint
from safetensors.torch import load_file, save_file
from tiny_gguf import write_tiny_gguf

from rimuru_kernels.packed_weights import dequantize, unpack
from rimuru_models.dense import PackedMatrix
from rimuru_models.gguf import blocks
from rimuru_models.layout import LM_HEAD
from rimuru_models.loader import DenseLoader
from rimuru_models.quantization import nibbles, reading
from rimuru_models.readers import open_reader

VOCABULARY = 8192
NAMES = ("int4", "fp8-bf16", "awq", "nvfp4", "Q4_K", "Q6_K")
SPARE = 200_000  # for what is worked on at a time, which is the same for any matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A format -> a tiny model with a large lm_head in it; written when it is asked for."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name not in KINDS:
            options = {"vocab_size": VOCABULARY, "num_layers": 1, "moe_intermediate_size": 256, "hidden_size": 256}
            path, _ = write_tiny_gguf(folder, "qwen3_moe", lambda tensor: name if tensor == "output.weight" else "F32", **options)
            return path
        with foreign_imports():
            model, _ = write_quantised_checkpoint(
                folder, "qwen3_moe", KINDS[name], vocab_size=VOCABULARY, num_layers=1, moe_intermediate_size=64
            )
            tensors = load_file(model / "model.safetensors")
            parts = KINDS[name].encode(tensors.pop(LM_HEAD))
        tensors |= {LM_HEAD.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        return model

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_large_matrix_is_in_memory_once(name: str, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, piece in ((reading, "_PIECE_BYTES"), (reading, "_PIECE_WEIGHTS"), (blocks, "_CHUNK_WEIGHTS"), (blocks, "_CHUNK_BYTES")):
        monkeypatch.setattr(module, piece, 1 << 12)  # so that a matrix of a test is as much larger than a piece as a real one
    monkeypatch.setattr(nibbles, "_CHUNK", 1 << 12)
    with open_reader(models(name)) as reader:
        whole, matrix = peak_of(lambda: DenseLoader(reader, torch.bfloat16, packed=True).matrix(LM_HEAD))
        assert isinstance(matrix, PackedMatrix)
        assert whole < matrix.num_bytes + SPARE
        wide, numbers = peak_of(lambda: DenseLoader(reader, torch.float32).matrix(LM_HEAD))
        assert isinstance(numbers, torch.Tensor) and numbers.shape[0] == VOCABULARY
        assert wide < numbers.nbytes + SPARE
        meant = dequantize(unpack(matrix.page, matrix.fmt, matrix.rows, matrix.columns), matrix.fmt)
        assert torch.allclose(numbers, meant, rtol=3e-7, atol=0)
