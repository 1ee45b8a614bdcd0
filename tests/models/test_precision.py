"""What models are stored as, in words and in bytes, from headers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from quantised_headers import released_index
from released_shapes import QWEN3_30B

from rimuru_kernels.packed_weights.format import PackedFormat, page_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.layout import num_parameters
from rimuru_models.quantization.formats import LayerFormats, WeightFormats
from rimuru_models.quantization.precision import Precision, format_name, precision_of
from rimuru_models.tensor_map import resolve

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}
    },
}
RELEASED: list[tuple[str, dict[str, Any], bool, Precision, int]] = [
    # the bytes of one projection: codes, scales (at a multiple of 128), zero points, the factor
    ("fp8", FP8, False, Precision("FP8 (blocks of 128)", "FP8 (blocks of 128) and BF16"), 768 * 2048 + 6 * 16 * 2),
    ("gptq", GPTQ, True, Precision("int4 (groups of 128)", "int4 (groups of 128) and BF16"), 768 * 2048 // 2 + 768 * 16 * 3),
    ("nvfp4", NVFP4, False, Precision("NVFP4", "NVFP4 and BF16"), 768 * 2048 // 2 + 768 * 128 + 4),
]


@pytest.mark.parametrize(
    ("kind", "block", "router", "precision", "page"), RELEASED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_released_headers(kind: str, block: dict[str, Any], router: bool, precision: Precision, page: int) -> None:
    config = ModelConfig.from_dict(QWEN3_30B | {"quantization_config": block})
    few = replace(config, num_layers=2, moe_layers=(0, 1), num_experts=16)  # all 48 layers take a second
    found = resolve(released_index(few, kind, router=router), few)
    assert precision_of(few, found.formats).experts == precision.experts
    assert precision_of(config, replace(found.formats, experts=found.formats.experts, dense=_all_layers(found.formats))) == precision
    assert (found.formats.expert_dtype, found.formats.compute_dtype) == ("BF16", "BF16")
    assert ("model.layers.1.mlp.gate.weight" in found.formats.dense) == router
    formats = found.formats.experts[1]
    assert formats is not None
    assert page_bytes(formats.gate_up, 768, 2048) == page
    assert num_parameters(config) == 30_532_122_624
    assert not found.ignored or all(name.endswith("input_global_scale") for name in found.ignored)


def _all_layers(formats: WeightFormats) -> dict[str, PackedFormat]:
    """The formats of two layers' dense matrices, said of 48."""
    first = {name: fmt for name, fmt in formats.dense.items() if ".layers.1." in name}
    return {name.replace(".layers.1.", f".layers.{layer}."): fmt for layer in range(48) for name, fmt in first.items()}


NAMES = [
    (PackedFormat("int4", 128, "f16", "zero"), "int4 (groups of 128)"),
    (PackedFormat("int4", 0, "bf16", bias=8), "int4 (whole rows)"),
    (PackedFormat("int8", 32, "f32"), "int8 (groups of 32)"),
    (PackedFormat("fp8", 0, "bf16"), "FP8 (whole rows)"),
    (PackedFormat("fp8", 128, "f32", group_rows=128), "FP8 (blocks of 128)"),
    (PackedFormat("fp8", 64, "f32", group_rows=32), "FP8 (blocks of 32 x 64)"),
    (PackedFormat("fp8", 32, "e8m0"), "MXFP8"),
    (PackedFormat("fp4", 32, "e8m0"), "MXFP4"),
    (PackedFormat("fp4", 16, "e4m3", factor=True), "NVFP4"),
]


@pytest.mark.parametrize(("fmt", "name"), NAMES, ids=lambda value: value if isinstance(value, str) else "")
def test_names(fmt: PackedFormat, name: str) -> None:
    assert format_name(fmt) == name
    assert format_name(fmt, {fmt: "Q4_0"}) == "Q4_0"


def test_mixtures_name_the_commonest_first() -> None:
    config = ModelConfig.from_dict(QWEN3_30B)
    small, large = PackedFormat("int4", 32, "u8*f16", "u8*f16"), PackedFormat("int6", 16, "i8*f16", bias=32)
    names = {small: "Q4_K", large: "Q6_K"}
    layers: dict[int, LayerFormats | None] = {layer: LayerFormats(small, large if layer < 24 else small) for layer in config.moe_layers}
    formats = WeightFormats(layers, {"lm_head.weight": large}, "F32", "BF16", names)
    assert precision_of(config, formats) == Precision("Q4_K and Q6_K", "BF16 and Q6_K")
    plain = WeightFormats(layers | {0: None}, {}, "BF16", "BF16", names)
    assert precision_of(config, plain).experts == "Q4_K, Q6_K and BF16"


def test_in_one_phrase() -> None:
    assert Precision("BF16", "BF16").words() == "BF16"
    assert Precision("int4 (groups of 128)", "BF16").words() == "experts int4 (groups of 128), dense BF16"
    assert Precision("BF16", "BF16").words("q8") == "experts BF16, dense BF16, KV q8"
