"""Model folders: one file, many shards, an index that lies, no weights at all; and the identity of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_models.errors import CheckpointError, NotFoundError
from rimuru_models.index import model_identity, open_index

INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    return write_tiny_checkpoint(folder, "mixtral", num_layers=1, shards=3)


def rewrite_index(folder: Path, **entries: object) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index["weight_map"] |= entries
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def test_one_file_and_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    one = open_index(write_tiny_checkpoint(tmp_path / "one", "mixtral", num_layers=1))
    many = open_index(sharded(tmp_path / "many"))
    assert one.tensors.keys() == many.tensors.keys()
    assert one.total_bytes == many.total_bytes > 0
    assert len(one.headers) == 1 and len(many.headers) == 3
    (tmp_path / "many" / INDEX).unlink()
    (tmp_path / "many" / "._model-00001-of-00003.safetensors").write_bytes(b"Mac OS X")
    assert open_index(tmp_path / "many").tensors.keys() == one.tensors.keys()


def test_a_file_may_hold_more_than_the_index_uses(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    del index["weight_map"]["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert "lm_head.weight" not in open_index(folder).tensors


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_shard(tmp_path: Path, missing: int) -> None:
    folder = sharded(tmp_path)
    (folder / f"model-{missing:05d}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"model-{missing:05d}-of-00003\.safetensors is missing"):
        open_index(folder)


@pytest.mark.parametrize(
    "target",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/x.safetensors",
        "..\\outside.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "\ud800.safetensors",
        "x" * 5000 + ".safetensors",
        "weights.bin",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_index_that_points_elsewhere(tmp_path: Path, target: object) -> None:
    folder = sharded(tmp_path / "model")
    rewrite_index(folder, **{"model.norm.weight": target})
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'model\.norm\.weight' points to"):
        open_index(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}', "{", "[" * 100_000, "\xff"]
)
def test_index_that_is_no_index(tmp_path: Path, content: str) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_index(folder)


def test_index_that_disagrees_with_the_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    rewrite_index(folder, **{"model.ghost.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors lacks tensor 'model\.ghost\.weight'"):
        open_index(folder)


def test_index_that_swaps_two_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    here = index["weight_map"]["model.norm.weight"]
    other = next(name for name in index["weight_map"].values() if name != here)
    rewrite_index(folder, **{"model.norm.weight": other})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'"):
        open_index(folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX).unlink()
    save_file({"model.norm.weight": torch.ones(64)}, folder / "extra.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is in both"):
        open_index(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pt", "model.pth"])
def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_bytes(b"\x80\x04K.")
    with pytest.raises(CheckpointError, match="run any code"):
        open_index(tmp_path)


def test_not_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        open_index(tmp_path / "absent")
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        open_index(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(NotFoundError, match="not a folder"):
        open_index(tmp_path / "config.json")
    with pytest.raises(NotFoundError, match=r"no \*\.safetensors"):
        open_index(tmp_path)


def test_a_folder_named_like_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_index(tmp_path)


def test_identity_is_of_the_architecture_not_of_the_files(tmp_path: Path) -> None:
    one = write_tiny_checkpoint(tmp_path / "one", "mixtral", num_layers=1)
    many = sharded(tmp_path / "many")
    identity = model_identity(one)
    assert len(identity) == 64 and int(identity, 16) >= 0
    assert model_identity(many) == identity
    assert model_identity(write_tiny_checkpoint(tmp_path / "seed", "mixtral", num_layers=1, seed=9)) == identity
    config = json.loads((many / "config.json").read_text(encoding="utf-8"))
    (many / "config.json").write_text(json.dumps(dict(reversed(config.items()))), encoding="utf-8")
    assert model_identity(many) == identity, "the order of keys means nothing"
    (many / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}), encoding="utf-8")
    assert model_identity(many) != identity
    assert (
        model_identity(write_tiny_checkpoint(tmp_path / "dtype", "mixtral", num_layers=1, dtype=torch.float16, torch_dtype="x")) != identity
    )


def test_identity_of_a_config_nested_too_deep(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral", num_layers=1)
    for depth in (700, 900, 970, 5000):
        (folder / "config.json").write_text('{"a":' * depth + "1" + "}" * depth, encoding="utf-8")
        try:
            model_identity(folder)
        except CheckpointError as error:
            assert "config.json" in str(error)
