"""The quantization_config of a config.json: those of released checkpoints are read, everything else is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import tiny_config

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.fields import Fields
from rimuru_models.quantization.awq import Awq
from rimuru_models.quantization.compressed_ints import PackedInts, PlainInts
from rimuru_models.quantization.fp4 import Mxfp4, Nvfp4
from rimuru_models.quantization.fp8 import Float8
from rimuru_models.quantization.gptq import Gptq
from rimuru_models.quantization.scheme import Scheme
from rimuru_models.quantization.table import FORMATS, read_quantization

_INT4 = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_NVFP4 = _INT4 | {"type": "float", "group_size": 16, "strategy": "tensor_group"}


def compressed(fmt: str, weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A block as llm-compressor writes it."""
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights or _INT4}
    return {
        "config_groups": {"group_0": group},
        "format": fmt,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    } | more


# Blocks as released checkpoints have them, long lists of names shortened.
RELEASED: dict[str, tuple[dict[str, Any], tuple[Scheme, ...]]] = {
    "Qwen3-30B-A3B-FP8": (
        {
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        (Float8(128, 128, ".weight_scale_inv"),),
    ),
    "Qwen3.5-35B-A3B-FP8": (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.language_model.layers.0.linear_attn.conv1d", "model.visual"],
        },
        (Float8(128, 128, ".weight_scale_inv"),),
    ),
    "DeepSeek style": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        (Float8(128, 128, ".weight_scale_inv"),),
    ),
    "Qwen3-30B-A3B-GPTQ-Int4": (
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "group_size": 128,
            "hyb_act": False,
            "lm_head": False,
            "meta": {"damp_percent": 0.01, "mse": 0.0, "quantizer": ["gptqmodel:2.2.0"], "true_sequential": True},
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        },
        (Gptq(4, 128, True),),
    ),
    "Qwen3.5-35B-A3B-GPTQ-Int4": (
        {
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "method": "gptq",
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
        },
        (Gptq(4, 128, True),),
    ),
    "an AWQ of Qwen3-30B-A3B": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["model.layers.0.mlp.gate"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        (Awq(128, True),),
    ),
    "gpt-oss-20b": (
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"], "quant_method": "mxfp4"},
        (Mxfp4(blocks=True),),
    ),
    "RedHatAI w4a16": (compressed("pack-quantized"), (PackedInts(4, 128, True),)),
    "RedHatAI w8a8": (
        compressed("int-quantized", _INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}),
        (PlainInts(0, True), PackedInts(8, 0, True)),
    ),
    "RedHatAI FP8-dynamic": (
        compressed("float-quantized", _INT4 | {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}),
        (Float8(1, 0, ".weight_scale"),),
    ),
    "RedHatAI FP8-block": (
        compressed(
            "float-quantized",
            _INT4 | {"num_bits": 8, "type": "float", "strategy": "block", "group_size": None, "block_structure": [128, 128]},
        ),
        (Float8(128, 128, ".weight_scale"),),
    ),
    "RedHatAI NVFP4": (compressed("nvfp4-pack-quantized", _NVFP4), (Nvfp4("compressed-tensors"),)),
    "MXFP4 of llm-compressor": (
        compressed("mxfp4-pack-quantized", _NVFP4 | {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}),
        (Mxfp4(blocks=False),),
    ),
    "nvidia NVFP4": (
        {
            "config_groups": {
                "group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
            },
            "ignore": ["lm_head", "model.layers.0.mlp.gate"],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quant_method": "modelopt",
        },
        (Nvfp4("modelopt"),),
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_checkpoints(name: str) -> None:
    block, schemes = RELEASED[name]
    for family in ("qwen3_moe", "qwen3_5_moe"):
        config = ModelConfig.from_dict(tiny_config(family) | {"quantization_config": block})
        assert config.quantization is not None
        assert config.quantization.schemes == schemes
        assert hash(config.quantization) == hash(ModelConfig.from_dict(tiny_config(family) | {"quantization_config": block}).quantization)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "the method is not named"),
    ({"quant_method": None}, "the method is not named"),
    ({"quant_method": 3}, "the method 3 is not supported"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "'bitsandbytes' is not supported"),
    ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "'aqlm' is not supported"),
    ({"quant_method": "hqq"}, "'hqq' is not supported"),
    ({"quant_method": "torchao"}, "'torchao' is not supported"),
    ({"quant_method": "quark"}, "'quark' is not supported"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits is not supported; 4 and 8"),
    ({"quant_method": "gptq", "group_size": 128}, "'bits' is missing"),
    ({"quant_method": "gptq", "bits": "4"}, "bits is '4', expected an integer"),
    ({"quant_method": "gptq", "bits": True}, "bits is True"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size is -2"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not supported; 'gptq' and 'gptq_v2'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "other settings for"),
    ({"quant_method": "gptq", "bits": 4, "sym": "yes"}, "sym is 'yes'"),
    ({"quant_method": "awq", "bits": 3}, "AWQ with 3 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv' is not supported; 'gemm' is"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": [3]}, "modules_to_not_convert"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "two sizes"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two sizes"),
    ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size is '128'"),
    ({"quant_method": "fp8", "weight_block_size": [1 << 40, 128]}, "two sizes"),
    ({"quant_method": "modelopt"}, "'quant_algo' is missing"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is not supported; NVFP4"),
    (compressed("sparse-24-bitmask"), "'sparse-24-bitmask' is not supported"),
    (compressed("marlin-24"), "'marlin-24' is not supported"),
    (compressed("pack-quantized", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (compressed("pack-quantized", transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "rotates activations"),
    (compressed("pack-quantized", _INT4 | {"num_bits": 3}), "type 'int' with 3 bits"),
    (compressed("pack-quantized", _INT4 | {"num_bits": 2}), "type 'int' with 2 bits"),
    (compressed("pack-quantized", _INT4 | {"group_size": None}), "a size from 1 is needed"),
    (compressed("pack-quantized", _INT4 | {"group_size": 1 << 50}), "group_size is"),
    (compressed("pack-quantized", _INT4 | {"actorder": "group"}), "actorder 'group'"),
    (compressed("pack-quantized", _INT4 | {"strategy": "token"}), "strategy 'token'"),
    (compressed("pack-quantized", _INT4 | {"symmetric": 1}), "symmetric is 1"),
    (compressed("float-quantized", _INT4 | {"num_bits": 8, "type": "float", "strategy": "block"}), "block_structure must be two sizes"),
    (compressed("mxfp6-pack-quantized", _INT4 | {"num_bits": 6, "type": "float"}), "'mxfp6-pack-quantized' is not supported"),
    (compressed("nvfp4-pack-quantized", _NVFP4 | {"group_size": 8}), "type 'float' with 4 bits"),
    (compressed("pack-quantized") | {"config_groups": {"group_0": 3}}, "'group_0' is 3, expected an object"),
    (compressed("pack-quantized") | {"config_groups": [1]}, "config_groups is a list"),
    (compressed("pack-quantized") | {"config_groups": {str(i): {} for i in range(300)}}, "300 groups"),
    (compressed("pack-quantized", ignore="lm_head"), "ignore is 'lm_head'"),
    (compressed("pack-quantized", ignore=[None]), "ignore is a list"),
]


@pytest.mark.parametrize(("block", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_everything_else_is_refused_in_words(block: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(tiny_config("qwen3_moe", quantization_config=block), where="some/config.json")
    assert str(caught.value).startswith("some/config.json: quantization_config")
    if "not supported" in str(caught.value):
        assert "Supported: " in str(caught.value.hint) and "FP8" in str(caught.value.hint)
    assert caught.value.hint, "what to do next"


def test_a_refusal_names_what_is_supported() -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(tiny_config("qwen3_moe", quantization_config={"quant_method": "bitsandbytes"}))
    for words in ("FP8", "GPTQ", "AWQ", "compressed-tensors", "MXFP4", "NVFP4"):
        assert words in (caught.value.hint or "")


def test_patterns_of_strangers_are_not_run() -> None:
    """A pattern that would take an ordinary matcher for ever."""
    config = compressed("pack-quantized", ignore=["re:(a+)+$", "re:["])
    config["config_groups"]["group_0"]["targets"] = ["re:(.*)*x" * 50]
    assert ModelConfig.from_dict(tiny_config("qwen3_moe", quantization_config=config)).quantization is not None


def test_a_nested_model_may_say_it_inside_or_outside() -> None:
    block = RELEASED["Qwen3.5-35B-A3B-FP8"][0]
    inside = tiny_config("qwen3_5_moe", quantization_config=block)
    assert ModelConfig.from_dict(inside).quantization is not None
    assert ModelConfig.from_dict(inside | {"quantization_config": block}).quantization is not None
    with pytest.raises(CheckpointError, match="contradicts the one of the whole model"):
        ModelConfig.from_dict(inside | {"quantization_config": block | {"weight_block_size": [64, 64]}})


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = st.sampled_from(
    "bits group_size sym desc_act checkpoint_format dynamic version zero_point fmt weight_block_size format config_groups ignore".split()
    + "sparsity_config transform_config quant_algo modules_to_not_convert".split()
)


@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(_FIELDS, _VALUES, max_size=5))
def test_no_block_whatever_breaks_the_door(method: str, values: dict[str, Any]) -> None:
    block = {"bits": 4, "quant_algo": "NVFP4"} | values | {"quant_method": method}
    try:
        found = read_quantization(Fields({"quantization_config": block}, "config.json"))
    except CheckpointError:
        return
    assert found is not None and all(isinstance(scheme, Scheme) for scheme in found.schemes)
