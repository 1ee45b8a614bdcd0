"""Where hybrid checkpoints keep their tensors: prefixes, both layouts of experts, parts that are not used, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import HYBRIDS, tiny_config, write_tiny_checkpoint
from torch import Tensor

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.layout import dense_shapes
from rimuru_models.loader import DenseLoader
from rimuru_models.weights import CheckpointReader

Tensors = dict[str, Tensor]


def edited(folder: Path, family: str, edit: Callable[[Tensors], None], **options: Any) -> Path:
    write_tiny_checkpoint(folder, family, **options)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return folder


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_dense_tensor_is_found_and_has_the_canonical_shape(family: str, tmp_path: Path) -> None:
    with CheckpointReader(write_tiny_checkpoint(tmp_path, family)) as reader:
        for name, shape in dense_shapes(reader.config).items():
            assert tuple(reader.dense_view(name).shape) == shape, name


def test_both_layouts_and_both_prefixes_hold_the_same_model(tmp_path: Path) -> None:
    folders = [
        write_tiny_checkpoint(tmp_path / "a", "qwen3_5_moe", layout="fused"),
        write_tiny_checkpoint(tmp_path / "b", "qwen3_5_moe", layout="per_expert"),
        write_tiny_checkpoint(tmp_path / "c", "qwen3_5_moe", layout="fused", nested=False),
        # a text model saved alone whose tensors kept the long prefix, and a multimodal one that lost it
        edited(tmp_path / "d", "qwen3_5_moe", rename("model.", "model.language_model."), nested=False),
        edited(tmp_path / "e", "qwen3_5_moe", rename("model.language_model.", "model.")),
        write_tiny_checkpoint(tmp_path / "f", "qwen3_5_moe", shards=3),
    ]
    readers = [CheckpointReader(folder) for folder in folders]
    for reader in readers[1:]:
        assert reader.config == readers[0].config or reader.config.architecture == "Qwen3_5MoeForCausalLM"
        for name in dense_shapes(readers[0].config):
            assert torch.equal(reader.dense_view(name), readers[0].dense_view(name)), name
        for layer in range(4):
            for ours, first in zip(reader.experts(layer), readers[0].experts(layer), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, first, strict=True))


def test_what_is_not_used_is_said(tmp_path: Path) -> None:
    reader = CheckpointReader(write_tiny_checkpoint(tmp_path / "a", "qwen3_5_moe"))
    assert reader.ignored == (
        "model.visual.blocks.0.attn.qkv.bias",
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
    )
    assert reader.unused_parts == (
        "the part that reads images (2 tensors)",
        "the head that guesses several tokens at once (2 tensors)",
    )
    assert len(CheckpointReader(write_tiny_checkpoint(tmp_path / "b", "qwen3_next")).unused_parts) == 1
    assert CheckpointReader(write_tiny_checkpoint(tmp_path / "c", "granitemoehybrid")).unused_parts == ()


def test_granite_under_the_names_of_transformers_in_memory(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            if ".block_sparse_moe." in name:
                new = name.replace("input_linear.weight", "experts.gate_up_proj").replace("output_linear.weight", "experts.down_proj")
                tensors[new.replace("router.layer.", "router.")] = tensors.pop(name)

    hub = CheckpointReader(write_tiny_checkpoint(tmp_path / "a", "granitemoehybrid"))
    memory = CheckpointReader(edited(tmp_path / "b", "granitemoehybrid", edit))
    assert torch.equal(hub.expert(1, 5).up, memory.expert(1, 5).up) and torch.equal(hub.expert(3, 7).down, memory.expert(3, 7).down)
    name = "model.layers.2.mlp.gate.weight"
    assert torch.equal(hub.dense_view(name), memory.dense_view(name))


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def add(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


LAYER = "model.language_model.layers"
REFUSED: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("qwen3_next", drop("model.layers.0.linear_attn.A_log"), "lacks tensor 'model.layers.0.linear_attn.A_log' of shape .4."),
    ("qwen3_next", add("model.layers.0.linear_attn.dt_bias", 3), "has shape .3., but config.json makes it .4."),
    ("qwen3_next", add("model.layers.0.self_attn.q_proj.weight", 256, 64), "has no place in a Qwen3NextForCausalLM"),
    ("qwen3_next", add("model.layers.4.input_layernorm.weight", 64), "a layer that config.json does not have"),
    ("qwen3_5_moe", drop(f"{LAYER}.1.linear_attn.in_proj_z.weight"), f"lacks tensor '{LAYER}.1.linear_attn.in_proj_z.weight'"),
    ("qwen3_5_moe", add(f"{LAYER}.4.input_layernorm.weight", 64), "a layer that config.json does not have"),
    ("qwen3_5_moe", add(f"{LAYER}.0.mlp.experts.8.up_proj.weight", 48, 64), "8 experts a layer"),
    ("qwen3_5_moe", add(f"{LAYER}.0.linear_attn.in_proj_qkvz.weight", 2, 2), "has no place"),
    ("qwen3_5_moe", add("model.layers.0.input_layernorm.weight", 64), "has no place"),
    ("granitemoehybrid", drop("model.layers.0.mamba.D"), "lacks tensor 'model.layers.0.mamba.D'"),
    (
        "granitemoehybrid",
        drop("model.layers.0.block_sparse_moe.router.layer.weight"),
        "nor 'model.layers.0.block_sparse_moe.router.weight'",
    ),
    ("granitemoehybrid", drop("model.layers.3.shared_mlp.output_linear.weight"), "shared_mlp.output_linear"),
    ("granitemoehybrid", add("model.layers.0.mamba.in_proj.bias", 4), "has no place"),
    ("granitemoehybrid", add("model.layers.2.mamba.D", 8), "has no place"),
]


@pytest.mark.parametrize(("family", "edit", "message"), REFUSED, ids=[f"{family}-{index}" for index, (family, _, _) in enumerate(REFUSED)])
def test_checkpoints_that_do_not_fit_their_config(family: str, edit: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(edited(tmp_path, family, edit))


def test_rows_are_put_in_order_when_they_are_loaded(tmp_path: Path) -> None:
    """The interleaved projections of Qwen3-Next, by their definition: per key head q, k, v of its value heads, z of its value heads."""
    from rimuru_models.qwen3_next import InterleavedDeltaNet

    with CheckpointReader(write_tiny_checkpoint(tmp_path, "qwen3_next")) as reader:
        mixer = reader.config.recurrent
        assert mixer is not None
        layer = InterleavedDeltaNet(DenseLoader(reader, torch.float32), 0)
        stored = reader.dense_view("model.layers.0.linear_attn.in_proj_qkvz.weight").view(2, -1, 64)
        ba = reader.dense_view("model.layers.0.linear_attn.in_proj_ba.weight").view(2, -1, 64)
    dk, r, dv = mixer.key_dim, 2, mixer.value_dim
    q, k, v, z = stored.split([dk, dk, r * dv, r * dv], 1)
    expected = torch.cat([part.reshape(-1, 64) for part in (q, k, v, z, ba[:, :r], ba[:, r:])])
    assert torch.equal(layer.projection, expected)


def test_a_loader_takes_every_row_once(tmp_path: Path) -> None:
    with CheckpointReader(write_tiny_checkpoint(tmp_path, "qwen3_5_moe")) as reader:
        loader = DenseLoader(reader, torch.float32)
        name = "model.layers.0.linear_attn.in_proj_b.weight"
        assert torch.equal(loader.rows([(name, 2, 4), (name, 0, 2)]), reader.dense_view(name)[[2, 3, 0, 1]])
        with pytest.raises(AssertionError, match="one piece"):
            loader.rows([(name, 0, 3)])
        taps = loader.taps("model.layers.0.linear_attn.conv1d.weight")
        assert taps.is_contiguous() and torch.equal(taps.t(), reader.dense_view("model.layers.0.linear_attn.conv1d.weight")[:, 0])


def test_a_hybrid_config_describes_what_the_tiny_writer_writes() -> None:
    for family in HYBRIDS:
        config = ModelConfig.from_dict(tiny_config(family))
        assert config.recurrent is not None and config.recurrent.key_dim != config.recurrent.value_dim, "a transposed state would show"
