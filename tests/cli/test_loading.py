"""What the settings make of a model before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantised import KINDS, foreign_imports, write_quantised_checkpoint
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.chat.loading import DEMO_RESIDENT_SHARE, engine_config, open_parts
from rimuru_cli.engine.quantizing import quantized_copy
from rimuru_cli.hub import paths
from rimuru_cli.hub.resolve import ResolvedModel
from rimuru_cli.output import Output
from rimuru_cli.settings import resolve
from rimuru_models.errors import CheckpointError, UsageError
from rimuru_models.quantizer.layout import Recipe


@pytest.mark.parametrize(("quant", "share"), [(None, DEMO_RESIDENT_SHARE), ("none", DEMO_RESIDENT_SHARE), ("int4", None), ("int8", None)])
def test_experts_of_the_demonstration_model_are_kept_out_unless_it_is_quantised(
    quant: str | None, share: float | None, tmp_path: Path
) -> None:
    model = ResolvedModel(name="rimuru-demo", path=tmp_path, revision=None, embedded=True)
    settings = resolve({"quant": quant, "profile": "none"}, file=tmp_path / "none.toml", environ={})
    assert engine_config(model, settings, Output()).resident_share == share


def test_a_model_that_is_quantised_already_can_be_taken_as_it_is(tmp_path: Path) -> None:
    """Whoever has set `quant` for all models is told how to leave it out for one."""
    with foreign_imports():
        folder, _ = write_quantised_checkpoint(tmp_path, "qwen3_moe", KINDS["int8"], num_layers=1)
    settings = resolve({}, file=tmp_path / "none.toml", environ={"RIMURU_QUANT": "int4"})
    with pytest.raises(UsageError, match="quantised already") as caught:
        open_parts(str(folder), settings, Output(), chat=False)
    assert "--quant none" in str(caught.value.hint)


def test_a_damaged_copy_is_made_again_and_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_layers=1, vocab_size=259)
    write_tiny_tokenizer(original)
    folder, _ = quantized_copy(original, "tiny", Recipe.of("int8"), store=paths.quantized_dir())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    settings = resolve({}, file=tmp_path / "none.toml", environ={})
    with pytest.raises(CheckpointError, match="model-00002") as caught:
        open_parts(folder.name, settings, Output(), chat=False)
    assert "rimuru quantize" in str(caught.value.hint)
