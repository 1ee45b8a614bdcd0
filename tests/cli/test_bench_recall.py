"""`rimuru bench recall`: counts by hand, and models built so that the right answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_tiny_checkpoint
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.bench.recall import Hits, _guesses, run_recall_bench
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.main import main


def make_model(folder: Path, *, still: bool = False, same_router: bool = False, same_norm: bool = False) -> Path:
    """A tiny model. still: its layers add nothing to the residual stream; same_router, same_norm: those of layer 0 everywhere."""
    write_tiny_checkpoint(folder, "qwen3_moe", vocab_size=320)
    write_tiny_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        first = ".".join(["model.layers.0", *name.split(".")[3:]])
        if still and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        repeated = (same_router and "mlp.gate.weight") or (same_norm and "post_attention_layernorm.weight")
        if repeated and name.endswith(repeated):
            tensor.copy_(tensors[first])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_stream_that_stands_still_is_foreseen(tmp_path: Path) -> None:
    """With nothing between two routers but a norm, exchanging the norm's weights foresees all, whatever the routers are."""
    folder = make_model(tmp_path / "m", still=True)
    report = run_recall_bench(folder, prompts=2, tokens=3)
    rows = {row["layer"]: row for row in report["rows"]}
    assert list(rows) == [1, 2, 3, "mean"] and (report["num_experts"], report["top_k"], report["chance"]) == (8, 3, 0.375)
    assert all(row["renormed_recall"] == row["renormed_new_recall"] == row["renormed_new_precision"] == 1.0 for row in rows.values())
    assert rows["mean"]["recall"] < 1.0, "the norms differ, and without exchange that shows"


def test_without_exchange_only_equal_norms_are_foreseen(tmp_path: Path) -> None:
    report = run_recall_bench(make_model(tmp_path / "m", still=True, same_norm=True), prompts=1, tokens=2)
    assert report["rows"][-1]["recall"] == 1.0


def test_random_layers_are_foreseen_in_part(tmp_path: Path) -> None:
    """Layers that do something: better than nothing, not perfect; all experts of a token are counted in every layer."""
    report = run_recall_bench(make_model(tmp_path / "m"), prompts=1, tokens=4)
    mean = report["rows"][-1]
    assert 0.2 < mean["recall"] < 1.0 and 0.0 < mean["new_recall"] < 1.0 and 0.0 < mean["token_before"] < 1.0
    assert report["tokens"] > 50


def test_counts_by_hand() -> None:
    used = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.bool)
    guessed = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
    hits = Hits()
    hits.add(used, guessed)
    # Later tokens repeat expert 1, then 2; new are 2, then 0; guessed and new for the predecessor are 2 and 3, then nothing.
    assert hits == Hits(used=6, found=3, repeated=2, new_used=2, new_guessed=2, new_found=1, tokens=3)
    assert hits.figures() == {"recall": 0.5, "new_recall": 0.5, "new_precision": 0.5} and hits.token_before() == 0.5


def test_one_sparse_layer_has_nothing_to_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "m", "qwen3_moe", vocab_size=320, mlp_only_layers=[1, 2, 3])
    write_tiny_tokenizer(tmp_path / "m")
    assert main(["bench", "recall", str(tmp_path / "m"), "--prompts", "1"]) == 2
    assert "needs two" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_model(tmp_path / "m"))
    assert main(["bench", "recall", folder, "--prompts", "1", "--tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 1
    assert main(["bench", "recall", folder, "--prompts", "1", "--tokens", "2"]) == 0
    table = capsys.readouterr().out
    assert "renormed recall" in table and "mean" in table


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    parts = load_parts(make_model(tmp_path / "m"), EngineConfig(device="cpu"), None)
    blocks = [layer.mlp for layer in parts.model.layers]  # type: ignore[attr-defined]
    with pytest.raises(KeyError), _guesses(parts.model):
        assert all("route" in vars(block) for block in blocks)
        raise KeyError
    assert not any("route" in vars(block) for block in blocks)
