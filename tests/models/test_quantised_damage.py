"""Quantised checkpoints that are damaged, lie, or do what is not supported: refused in words that name file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import KINDS, write_quantised_checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_tiny_checkpoint
from torch import Tensor

from rimuru_models.errors import CheckpointError
from rimuru_models.readers import notices_of
from rimuru_models.weights import CheckpointReader

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
QUERY = "model.layers.1.self_attn.q_proj"
Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a kind -> a tiny checkpoint of it, written once."""
    known: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name], _ = write_quantised_checkpoint(folder, "qwen3_moe", KINDS[name], num_layers=2, moe_intermediate_size=64)
        return known[name]

    return get


def changed(source: Path, folder: Path, change: Change, config: dict[str, Any] | None = None) -> Path:
    """A copy with other tensors and, perhaps, other fields of quantization_config."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    values = json.loads((source / "config.json").read_text("utf-8"))
    values["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def add(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


DAMAGED: list[tuple[str, Change, str]] = [
    ("gptq", drop(f"{EXPERT}.scales"), rf"{EXPERT}' lacks its tensor '{EXPERT}.scales'"),
    ("gptq", drop(f"{EXPERT}.qzeros"), rf"lacks its tensor '{EXPERT}.qzeros'"),
    ("gptq", drop(f"{EXPERT}.qweight"), rf"lacks tensor '{EXPERT}.weight'"),
    ("gptq", put(f"{EXPERT}.qweight", lambda t: t[:-1]), rf"'{EXPERT}.qweight' has shape \[7, 64\], but config.json makes it \[8, 64\]"),
    ("gptq", put(f"{EXPERT}.qweight", lambda t: t.to(torch.int64)), "is stored as I64, expected I32"),
    ("gptq", put(f"{EXPERT}.g_idx", lambda t: t[:-1]), "g_idx' has shape"),
    ("gptq", put(f"{EXPERT}.scales", lambda t: t.double()), "is stored as F64, expected F16 or BF16 or F32"),
    ("awq", put(f"{QUERY}.qzeros", lambda t: t[:, :-1]), f"{QUERY}.qzeros' has shape"),
    ("awq", drop(f"{QUERY}.qzeros"), "lacks its tensor"),
    ("fp8-f32", drop(f"{QUERY}.weight_scale_inv"), "lacks its tensor"),
    ("fp8-f32", put(f"{QUERY}.weight_scale_inv", lambda t: t.expand(2, 1)), "weight_scale_inv' has shape"),
    ("fp8-f32", put(f"{QUERY}.weight", lambda t: t.view(torch.float8_e5m2)), "is stored as F8_E5M2"),
    ("fp8-f32", put(f"{QUERY}.weight", lambda t: t.view(torch.int8)), "is stored as I8"),
    ("int4", put(f"{EXPERT}.weight_packed", lambda t: t[:, :-1]), "weight_packed' has shape"),
    ("int4", add(f"{EXPERT}.weight_g_idx", torch.arange(63, dtype=torch.int32)), "weight_g_idx' has shape"),
    ("int4", add(f"{EXPERT}.weight_zero_point", torch.zeros(8, 2, dtype=torch.int32)), "weight_zero_point' has no place"),
    ("int4", add(f"{EXPERT}.weight", torch.zeros(64, 64)), "weight_packed' has no place"),
    ("int8", put(f"{EXPERT}.weight_scale", lambda t: t[:-1]), "weight_scale' has shape"),
    ("nvfp4", drop(f"{EXPERT}.weight_global_scale"), "lacks its tensor"),
    ("nvfp4", put(f"{EXPERT}.weight_scale", lambda t: t.view(torch.uint8)), "is stored as U8, expected F8_E4M3"),
    ("modelopt", drop(f"{EXPERT}.weight_scale_2"), "lacks its tensor"),
    ("int4", add("model.layers.0.mlp.experts.8.up_proj.weight_packed", torch.zeros(1)), "8 experts a layer"),
    ("int4", add("model.layers.2.self_attn.q_proj.weight_scale", torch.zeros(1)), "num_hidden_layers 2"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED, ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_headers(name: str, change: Change, message: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints(name), tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(folder)
    assert "model.safetensors" in str(caught.value)


def test_another_group_size_than_the_tensors_have(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints("gptq"), tmp_path, lambda tensors: None, {"group_size": 16})
    with pytest.raises(CheckpointError, match=r"scales' has shape \[2, 128\], but config.json makes it \[4, 128\]"):
        CheckpointReader(folder)


def test_act_order_is_refused_when_the_model_is_opened(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    def shuffle(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(".g_idx"):
                tensors[name] = tensors[name].flip(0)

    folder = changed(checkpoints("gptq"), tmp_path, shuffle, {"desc_act": True})
    with pytest.raises(CheckpointError, match=r"act-order.*g_idx") as caught:
        CheckpointReader(folder)
    assert "desc_act" in (caught.value.hint or "")


def test_act_order_with_groups_in_order_is_read(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints("gptq"), tmp_path, lambda tensors: None, {"desc_act": True})
    with CheckpointReader(folder) as reader, CheckpointReader(checkpoints("gptq")) as other:
        assert torch.equal(reader.expert(0, 3).up, other.expert(0, 3).up)


def test_one_matrix_out_of_order_is_refused_when_it_is_read(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints("gptq"), tmp_path, put(f"{EXPERT}.g_idx", lambda order: order.flip(0)))
    with CheckpointReader(folder) as reader:
        reader.expert(0, 2)
        with pytest.raises(CheckpointError, match=r"experts.3.up_proj.*act-order"):
            reader.expert(0, 3)


def test_a_stored_shape_that_lies(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints("int4"), tmp_path, put(f"{EXPERT}.weight_shape", lambda shape: shape.flip(0) + 1))
    with (
        CheckpointReader(folder) as reader,
        pytest.raises(CheckpointError, match=r"its shape is \[65, 65\], but config.json makes it \[64, 64\]"),
    ):
        reader.expert(0, 3)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_global_scale_that_means_nothing(value: float, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints("nvfp4"), tmp_path, put(f"{EXPERT}.weight_global_scale", lambda scale: scale * 0 + value))
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError, match="global scale"):
        reader.expert(0, 3)


def wild(scales: Tensor, value: int) -> Tensor:
    """One scale, the last, replaced by bits that are no finite number."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.itemsize]
    flat = scales.clone().reshape(-1)
    flat.view(bits)[-1] = value
    return flat.view(scales.shape)


NAN, INF = {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}, {"f32": 0x7F800000, "f16": -0x400, "bf16": 0x7F80}
WILD = [
    *(("fp8-f32", "weight_scale_inv", bits["f32"]) for bits in (NAN, INF)),
    ("fp8-bf16", "weight_scale_inv", NAN["bf16"]),
    ("fp8-e8m0", "weight_scale_inv", 255),
    *(("gptq", "scales", bits["f16"]) for bits in (NAN, INF)),
    ("awq", "scales", INF["f16"]),
    *(("int4", "weight_scale", bits["bf16"]) for bits in (NAN, INF)),
    ("int8", "weight_scale", NAN["f32"]),
    ("fp8-channel", "weight_scale", NAN["bf16"]),
    ("nvfp4", "weight_scale", 0xFF),
    ("mxfp4", "weight_scale", 255),
    ("modelopt", "weight_scale", 0x7F),
]


@pytest.mark.parametrize(("name", "suffix", "value"), WILD)
def test_scales_that_are_no_finite_numbers(name: str, suffix: str, value: int, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Such a matrix would turn all that follows into NaN: it is refused by its tensor's name, whoever reads it, however it is read."""
    tensors = load_file(checkpoints(name) / "model.safetensors")

    def change(found: dict[str, Tensor]) -> None:
        for module in (EXPERT, QUERY):
            found[f"{module}.{suffix}"] = wild(tensors[f"{module}.{suffix}"], value)

    with CheckpointReader(changed(checkpoints(name), tmp_path, change)) as reader:
        reader.expert(0, 2)
        formats = reader.formats.experts[0]
        assert formats is not None
        pages = [torch.zeros(1 << 14, dtype=torch.uint8) for _ in range(3)]
        reader.expert_packed(0, 2, pages)
        ways: list[Callable[[], object]] = [
            lambda: reader.expert(0, 3),
            lambda: reader.expert_codes(0, 3),
            lambda: reader.expert_packed(0, 3, pages),
        ]
        for read in ways:
            with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{EXPERT}\.{suffix}' that is not a finite number"):
                read()
        with pytest.raises(CheckpointError, match=rf"{QUERY}\.{suffix}' that is not a finite number"):
            reader.dense_view(f"{QUERY}.weight")


def test_tensors_that_belong_to_a_matrix_and_are_not_needed(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    def more(tensors: dict[str, Tensor]) -> None:
        tensors[f"{QUERY}.input_scale"] = torch.ones(1)
        tensors[f"{EXPERT}.input_global_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
        tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.ones(1)

    with CheckpointReader(changed(checkpoints("nvfp4"), tmp_path, more)) as reader:
        assert "model.layers.0.self_attn.k_scale" in reader.ignored
    with pytest.raises(CheckpointError, match=r"up_proj\.input_zero' has no place"):
        CheckpointReader(changed(checkpoints("nvfp4"), tmp_path, add(f"{EXPERT}.input_zero", torch.ones(1))))


@pytest.mark.parametrize("name", ["gptq", "int4", "fp8-f32"])
def test_quantised_tensors_without_a_quantization_config(name: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(checkpoints(name), tmp_path, lambda tensors: None)
    values = json.loads((folder / "config.json").read_text("utf-8"))
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(folder)
    assert "quantization_config" in f"{caught.value} {caught.value.hint}"


def test_plain_weights_with_a_quantization_config(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """A list of modules that stay plain may name all of them."""
    folder = write_tiny_checkpoint(tmp_path, "qwen3_moe", num_layers=2, moe_intermediate_size=64, quantization_config=KINDS["awq"].config)
    with CheckpointReader(folder) as reader:
        assert not any(reader.formats.experts.values()) and not reader.formats.dense
        assert reader.expert_extents(0, 0) is not None


def test_one_plain_expert_among_quantised_ones_is_announced(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """A list of modules that stay plain may name one expert: then no page holds its layer."""

    def change(tensors: dict[str, Tensor]) -> None:
        for part in [name for name in tensors if name.startswith(f"{EXPERT}.")]:
            del tensors[part]
        tensors[f"{EXPERT}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)

    with CheckpointReader(changed(checkpoints("awq"), tmp_path, change)) as reader:
        assert [layer for layer, formats in reader.formats.experts.items() if formats is None] == [0]
        (notice,) = notices_of(reader)
        assert "1 of 2 layers" in notice and "BF16 and int4" in notice and "held as BF16" in notice
    with CheckpointReader(checkpoints("awq")) as reader:
        assert not notices_of(reader)
