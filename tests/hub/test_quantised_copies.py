"""Quantised copies below the data folder: listed, found by name, deleted, and never mistaken for something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.engine.quantizing import quantized_copy
from rimuru_cli.hub import paths
from rimuru_cli.hub.library import find_models
from rimuru_cli.hub.removal import carry_out, plan_removal
from rimuru_cli.hub.resolve import resolve_model
from rimuru_models.errors import NotFoundError, UsageError
from rimuru_models.quantizer.layout import Recipe


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = write_tiny_checkpoint(tmp_path / "my model", "qwen3_moe", vocab_size=259, num_layers=1)
    write_tiny_tokenizer(folder)
    return folder


def test_a_copy_is_made_once_and_found_again(original: Path) -> None:
    store = paths.quantized_dir()
    folder, was_there = quantized_copy(original, "org/my model", Recipe.of("int4"), store=store)
    assert folder.parent == store and folder.name.startswith("my-model-int4-g32-") and not was_there
    assert quantized_copy(original, "org/my model", Recipe.of("int4"), store=store) == (folder, True)
    other, was_there = quantized_copy(original, "org/my model", Recipe.of("int8"), store=store)
    assert other != folder and not was_there
    resolved = resolve_model(folder.name)
    assert (resolved.path, resolved.name, resolved.embedded) == (folder, folder.name, False)
    # Another version of the original is another model.
    weights = original / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert quantized_copy(original, "org/my model", Recipe.of("int8"), store=store)[0] != other


def test_copies_are_listed_and_deleted_by_name(original: Path) -> None:
    folder, _ = quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir())
    (found,) = [model for model in find_models() if model.kind == "copy"]
    assert (found.name, found.path, found.status) == (folder.name, folder, "ready")
    removal = plan_removal(folder.name)
    assert removal.freed_bytes == found.size_bytes > 0
    carry_out(removal)
    assert not folder.exists() and original.is_dir()
    with pytest.raises(NotFoundError):
        resolve_model(folder.name)


def test_a_copy_that_was_cut_short_is_said_to_be_and_can_be_deleted(original: Path) -> None:
    def killed(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir(), progress=killed)
    (found,) = [model for model in find_models() if model.kind == "copy"]
    assert found.status == "incomplete"
    with pytest.raises(NotFoundError):
        resolve_model(found.name)
    carry_out(plan_removal(found.name))
    assert not found.path.exists()


def test_a_folder_that_somebody_chose_is_theirs(original: Path, tmp_path: Path) -> None:
    folder, _ = quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir(), out=tmp_path / "mine")
    assert folder == tmp_path / "mine" and not [model for model in find_models() if model.kind == "copy"]
    with pytest.raises(UsageError, match="local folder"):
        plan_removal(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "mine", "my model"]


def test_a_copy_is_not_quantised_again(original: Path) -> None:
    folder, _ = quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir())
    with pytest.raises(UsageError, match="already"):
        quantized_copy(folder, "tiny", Recipe.of("int4"), store=paths.quantized_dir())
