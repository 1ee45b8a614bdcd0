"""Quantised copies below the data folder: listed, found by name, deleted, and never mistaken for something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.engine.quantizing import quantized_copy
from rimuru_cli.hub import paths
from rimuru_cli.hub.library import find_models
from rimuru_cli.hub.removal import carry_out, plan_removal
from rimuru_cli.hub.resolve import resolve_model
from rimuru_cli.hub.verification import verify_model
from rimuru_models.errors import CheckpointError, NotFoundError, RimuruError, UsageError
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "my model"]


def test_a_copy_is_not_quantised_again(original: Path) -> None:
    folder, _ = quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir())
    with pytest.raises(UsageError, match="already"):
        quantized_copy(folder, "tiny", Recipe.of("int4"), store=paths.quantized_dir())


@pytest.mark.parametrize("name", ["模型 n° 7", "modèle", "x" * 250, "模" * 80, "..."])
def test_a_copy_can_be_typed_whatever_its_original_is_called(name: str, original: Path) -> None:
    folder, _ = quantized_copy(original, name, Recipe.of("int8"), store=paths.quantized_dir())
    assert resolve_model(folder.name).path == folder
    assert [model.name for model in find_models() if model.kind == "copy"] == [folder.name]
    assert not list(folder.parent.glob(".*")), "a lock is left behind"
    for wrong in ("..", f"../quantized/{folder.name}"):
        with pytest.raises((NotFoundError, UsageError)):
            resolve_model(wrong)


def test_a_home_that_cannot_be_written_to(original: Path, tmp_path: Path) -> None:
    store = tmp_path / "home" / "quantized"
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text("no folder", encoding="utf-8")
    with pytest.raises(RimuruError, match=f"{store} cannot be written to") as caught:
        quantized_copy(original, "tiny", Recipe.of("int8"), store=store)
    assert "--out" in str(caught.value.hint)
    folder, _ = quantized_copy(original, "tiny", Recipe.of("int8"), store=store, out=tmp_path / "elsewhere" / "copy")
    assert (folder / "config.json").is_file() and [path.name for path in folder.parent.iterdir()] == ["copy"]
    with pytest.raises(RimuruError, match="letter cannot be written to"):
        (tmp_path / "letter").touch()
        quantized_copy(original, "tiny", Recipe.of("int8"), store=store, out=tmp_path / "letter" / "copy")


def test_two_at_once(original: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def again(stage: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(RimuruError, match="Another rimuru is making") as caught:
                quantized_copy(original, "tiny", Recipe.of("int8"), store=tmp_path / "other home", out=tmp_path / "copy")
            refused.append(str(caught.value))

    quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir(), out=tmp_path / "copy", progress=again)
    assert refused, "whose home it is makes no difference"


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_damage_inside_a_copy_is_found(to: str, original: Path, tmp_path: Path) -> None:
    """Also in what was made before it was cut short: nobody else knows checksums of these files."""

    def killed(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    (original / "additional_chat_templates").mkdir()
    (original / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            quantized_copy(original, "tiny", Recipe.of(to), store=tmp_path, progress=killed)
    folder, _ = quantized_copy(original, "tiny", Recipe.of(to), store=tmp_path)
    result = verify_model(str(folder))
    assert result.against == "copy" and {file.state for file in result.files} == {"ok"}
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {file.name for file in result.files} == names - {"rimuru-quantized.json"}
    for name in ("model-00002-of-00002.safetensors", "additional_chat_templates/tool_use.jinja", "config.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        error = verify_model(str(folder)).error()
        assert error is not None and f"{name} (damaged)" in error.what and "rimuru quantize" in str(error.hint)
        (folder / name).unlink()
        assert quantized_copy(original, "tiny", Recipe.of(to), store=tmp_path) == (folder, False)
        assert not verify_model(str(folder)).bad and (folder / name).read_bytes() == whole


def test_a_note_from_a_stranger_names_nothing_outside(original: Path, tmp_path: Path) -> None:
    (original / "rimuru-quantized.json").write_text(
        json.dumps({"sha256": {"../letter": "0" * 64, "/etc/passwd": "0" * 64, "C:\\x": "0" * 64, "config.json": 7}}), encoding="utf-8"
    )
    assert verify_model(str(original)).against == "headers"


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "odd", "qwen3_moe", vocab_size=60, num_layers=1)
    write_tiny_tokenizer(folder)
    with pytest.raises(CheckpointError, match="tokenizer does not fit the model, which knows 60 tokens"):
        quantized_copy(folder, "odd", Recipe.of("int4"), store=tmp_path)
    assert quantized_copy(folder, "odd", Recipe.of("int8"), store=tmp_path)[1] is False
