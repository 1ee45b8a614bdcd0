"""Opening checkpoints: zero-copy views of both layouts, and every disagreement between config.json and the tensors."""

from __future__ import annotations

import gc
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, tiny_config, tiny_tensors, write_tiny_checkpoint

from rimuru_models.errors import CheckpointError
from rimuru_models.weights import CheckpointReader


def rewrite(folder: Path, change: Any) -> Path:
    """Load model.safetensors, let `change` edit the dict, save it again."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}  # off the file it rewrites
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def set_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_give_the_same_experts(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    one = CheckpointReader(write_tiny_checkpoint(tmp_path / "one", family, dtype=dtype))
    fused = CheckpointReader(write_tiny_checkpoint(tmp_path / "fused", family, layout="fused", dtype=dtype))
    expected = tiny_tensors(tiny_config(family), family, dtype=dtype)
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    assert one.expert_dtype == fused.expert_dtype == dtype
    for layer in one.config.moe_layers:
        for expert in range(one.config.num_experts):
            names = [f"model.layers.{layer}.{block}.experts.{expert}.{part}.weight" for part in (gate, up, down)]
            for name, a, b in zip(names, one.expert(layer, expert), fused.expert(layer, expert), strict=True):
                assert a.dtype == b.dtype == dtype and a.is_contiguous() and b.is_contiguous()
                assert torch.equal(a, expected[name]) and torch.equal(b, expected[name])


def test_dense_tensors_are_owned_copies_in_the_wanted_dtype(tmp_path: Path) -> None:
    reader = CheckpointReader(write_tiny_checkpoint(tmp_path, "mixtral", dtype=torch.bfloat16))
    router = reader.dense("model.layers.2.mlp.gate.weight", torch.float32)
    assert router.dtype == torch.float32
    router.zero_()
    assert reader.dense("model.layers.2.mlp.gate.weight", torch.float32).abs().max() > 0
    same = reader.dense("model.norm.weight", torch.bfloat16)
    same.zero_()
    assert reader.dense("model.norm.weight", torch.bfloat16).abs().max() > 0


def test_expert_views_share_the_mapped_file_and_never_reach_it(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral")
    before = (folder / "model.safetensors").read_bytes()
    reader = CheckpointReader(folder)
    view = reader.expert(0, 1).gate
    assert reader.expert(0, 1).gate.data_ptr() == view.data_ptr(), "a view, not a copy"
    value = view[0, 0].item()
    view[0, 0] = 7.0  # never done; but if it were, the private mapping keeps the file whole
    assert (folder / "model.safetensors").read_bytes() == before
    reader.close()
    del reader
    gc.collect()
    assert view[0, 0].item() == 7.0 != value, "views outlive the reader"


def test_misaligned_files_are_read_by_copying(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    expected = CheckpointReader(folder).expert(1, 2)
    expected = type(expected)(*(tensor.clone() for tensor in expected))
    for pad in (1, 2, 3):
        path.unlink()  # the mapping of the first reader stays on the old file
        path.write_bytes(struct.pack("<Q", length + pad) + whole[8 : 8 + length] + b" " * pad + whole[8 + length :])
        actual = CheckpointReader(folder).expert(1, 2)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_mixtral_names_in_every_mixture(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral", layout="fused")
    expected = CheckpointReader(folder).expert(1, 2).up.clone()

    def with_suffix(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[f"{name}.weight".replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(name)

    assert torch.equal(CheckpointReader(rewrite(folder, with_suffix)).expert(1, 2).up, expected)

    folder = write_tiny_checkpoint(tmp_path / "b", "mixtral")

    def under_mlp(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)

    assert torch.equal(CheckpointReader(rewrite(folder, under_mlp)).expert(1, 2).up, expected)


MISSING = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.3.input_layernorm.weight",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.2.mlp.gate.weight",
    "model.layers.2.mlp.experts.5.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
]


@pytest.mark.parametrize("name", MISSING)
def test_missing_tensor(name: str, tmp_path: Path) -> None:
    folder = rewrite(write_tiny_checkpoint(tmp_path, "qwen2_moe"), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.* lacks tensor '{name}'"):
        CheckpointReader(folder)


@pytest.mark.parametrize("name", MISSING)
def test_wrong_shape(name: str, tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.cat((tensors[name], tensors[name][:1]))

    folder = rewrite(write_tiny_checkpoint(tmp_path, "qwen2_moe"), widen)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}' has shape \[\d+.*\], but config\.json makes it \["):
        CheckpointReader(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.experts.5.up_proj.weight"])
def test_dtypes_that_are_no_plain_floats(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = rewrite(write_tiny_checkpoint(tmp_path, "qwen2_moe"), lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}' is stored as"):
        CheckpointReader(folder)


def test_experts_of_two_dtypes(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    folder = rewrite(write_tiny_checkpoint(tmp_path, "qwen2_moe"), lambda tensors: tensors.update({name: tensors[name].half()}))
    with pytest.raises(CheckpointError, match=rf"'{name}' is F16, but .* is F32"):
        CheckpointReader(folder)


DISAGREEMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 8}, r"gate\.weight' has shape \[4, 64\], but config\.json makes it \[8, 64\]"),
    ("mixtral", {"num_local_experts": 3}, r"gate\.weight' has shape"),
    ("mixtral", {"num_hidden_layers": 5}, r"lacks tensor 'model\.layers\.4\."),
    ("mixtral", {"num_hidden_layers": 3}, r"'model\.layers\.3\..*num_hidden_layers 3"),
    ("mixtral", {"hidden_size": 128}, r"embed_tokens\.weight' has shape \[128, 64\], but config\.json makes it \[128, 128\]"),
    ("mixtral", {"intermediate_size": 48}, r"w1\.weight' has shape \[96, 64\]"),
    ("mixtral", {"vocab_size": 256}, r"embed_tokens\.weight' has shape"),
    ("mixtral", {"num_key_value_heads": 4}, r"k_proj\.weight' has shape"),
    ("mixtral", {"head_dim": None}, r"q_proj\.weight' has shape"),
    ("qwen2_moe", {"mlp_only_layers": []}, r"lacks tensor 'model\.layers\.1\.mlp\.gate\.weight'"),
    ("qwen2_moe", {"mlp_only_layers": [1, 2]}, r"lacks tensor 'model\.layers\.2\.mlp\.gate_proj\.weight'"),
    ("qwen2_moe", {"qkv_bias": False}, r"proj\.bias' has no place"),
    ("qwen3_moe", {"attention_bias": True}, r"lacks tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"),
    ("mixtral", {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "head_dim": None}, r"shape|lacks"),
]


@pytest.mark.parametrize(("family", "changes", "message"), DISAGREEMENTS, ids=lambda value: value if isinstance(value, str) else None)
def test_config_that_disagrees_with_the_tensors(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = set_config(write_tiny_checkpoint(tmp_path, family), **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(folder)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.4.input_layernorm.weight", "num_hidden_layers 4"),
        ("model.layers.2.mlp.experts.8.up_proj.weight", "8 experts a layer"),
        ("model.layers.2.mlp.shared_expert.up_proj.weight", "no place"),
        ("model.layers.2.self_attn.q_proj.bias", "no place"),
        ("model.layers.2.self_attn.o_proj.weight_scale", "no place"),
        ("model.norm.bias", "no place"),
        ("lm_head.bias", "no place"),
    ],
)
def test_extra_tensors_inside_the_model(name: str, message: str, tmp_path: Path) -> None:
    folder = rewrite(write_tiny_checkpoint(tmp_path, "qwen3_moe"), lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(folder)
    assert name in str(caught.value)


def test_tensors_outside_the_model_are_listed_as_ignored(tmp_path: Path) -> None:
    extra = ["mtp.layers.0.norm.weight", "model.visual.patch.weight", "model.layers.2.self_attn.rotary_emb.inv_freq"]
    added = {name: torch.ones(3) for name in extra}
    folder = rewrite(write_tiny_checkpoint(tmp_path, "qwen3_moe"), lambda tensors: tensors.update(added))
    assert CheckpointReader(folder).ignored == tuple(sorted(extra))


def test_a_checkpoint_without_the_leading_model_prefix(tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    with pytest.raises(CheckpointError, match=r"lacks tensor 'model\.embed_tokens\.weight'"):
        CheckpointReader(rewrite(write_tiny_checkpoint(tmp_path, "mixtral"), strip))


def test_a_file_that_shrank_after_it_was_opened(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "mixtral")
    reader = CheckpointReader(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors shrank"):
        reader.expert(0, 0)
