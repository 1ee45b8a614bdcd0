"""What load_model allocates, tied embeddings, progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import KINDS, write_quantised_checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from rimuru_models.errors import CheckpointError
from rimuru_models.layout import dense_bytes
from rimuru_models.loader import load_model
from rimuru_models.readers import open_reader
from rimuru_models.weights import CheckpointReader


def storages(value: Any, found: dict[int, int] | None = None) -> dict[int, int]:
    """Address -> bytes of every storage that hangs on an object of ours."""
    found = {} if found is None else found
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple):
        for item in value:
            storages(item, found)
    elif type(value).__module__.startswith("rimuru_models."):
        for item in vars(value).values():
            storages(item, found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_bytes_is_exactly_what_is_allocated(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    reader = CheckpointReader(write_tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied))
    model = load_model(reader, dtype)
    assert sum(storages(model).values()) == dense_bytes(reader.config, dtype.itemsize) == model.dense_bytes
    assert (model.output.data_ptr() == model.embedding.data_ptr()) is tied


@pytest.mark.parametrize("name", ["fp8-bf16", "gptq", "nvfp4", "gguf"])
def test_numbers_made_of_a_quantised_matrix_are_not_held_twice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "gguf":
        path, _ = write_tiny_gguf(tmp_path, "qwen3_moe")
    else:
        path, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS[name], num_layers=2, moe_intermediate_size=64)
    with open_reader(path) as reader:
        made: dict[int, str] = {}

        def remembered(name: str) -> torch.Tensor:
            view = type(reader).dense_view(reader, name)
            if name in reader.formats.dense and name.endswith(("o_proj.weight", "embed_tokens.weight", "lm_head.weight")):
                made[view.data_ptr()] = name
            return view

        monkeypatch.setattr(reader, "dense_view", remembered)
        model = load_model(reader, torch.float32)
        assert made and made.keys() <= storages(model).keys()
        assert sum(storages(model).values()) == dense_bytes(reader.config, 4) == model.dense_bytes
        assert load_model(reader, torch.bfloat16).embedding.dtype is torch.bfloat16


def test_the_model_keeps_nothing_of_the_file(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "olmoe")
    with CheckpointReader(folder) as reader:
        mapped = reader.view("model.norm.weight").untyped_storage().data_ptr()
        model = load_model(reader)
        assert mapped not in storages(model)
        assert torch.equal(model.norm, load_file(folder / "model.safetensors")["model.norm.weight"])


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    reader = CheckpointReader(write_tiny_checkpoint(tmp_path, "qwen2_moe"))
    seen: list[tuple[int, int]] = []
    load_model(reader, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {dense_bytes(reader.config, 4)}
    assert seen[-1][0] == seen[-1][1]


def test_tied_embeddings_may_be_stored_twice_but_must_agree(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral", tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    reader = CheckpointReader(folder)
    assert load_model(reader).dense_bytes == dense_bytes(reader.config, 4)
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*ties.*'lm_head\.weight' differs"):
        load_model(CheckpointReader(folder))


def test_tied_embeddings_may_be_stored_as_the_output_matrix_only(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral", tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    expected = tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_model(CheckpointReader(folder)).embedding, expected)


def test_an_integer_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="floating"):
        load_model(CheckpointReader(write_tiny_checkpoint(tmp_path, "mixtral")), torch.int8)
