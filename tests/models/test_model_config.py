"""config.json in both styles, every way it can be wrong, and the released models' numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import FAMILIES, HYBRIDS, tiny_config

from rimuru_models import ARCHITECTURES
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.layout import expert_bytes, num_parameters

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}


@pytest.mark.parametrize(
    ("config", "total", "rest", "one_expert"),
    [
        (QWEN15_MOE, "14.316", "1.859", 17_301_504),
        (QWEN3_30B, "30.532", "1.541", 9_437_184),
        (MIXTRAL_8X7B, "46.703", "1.606", 352_321_536),
        (OLMOE_1B_7B, "6.919", "0.477", 12_582_912),
    ],
    ids=["Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "Mixtral-8x7B", "OLMoE-1B-7B"],
)
def test_released_models_have_their_published_size(config: dict[str, Any], total: str, rest: str, one_expert: int) -> None:
    model = ModelConfig.from_dict(config)
    routed = len(model.moe_layers) * model.num_experts * expert_bytes(model, 1)
    assert f"{num_parameters(model) / 1e9:.3f}" == total  # billions
    assert f"{(num_parameters(model) - routed) / 1e9:.3f}" == rest
    assert expert_bytes(model, 2) == one_expert


def test_fields_of_a_released_model() -> None:
    model = ModelConfig.from_dict(QWEN3_30B)
    assert (model.architecture, model.model_type, model.qk_norm) == ("Qwen3MoeForCausalLM", "qwen3_moe", "head")
    assert (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2048, 48, 32, 4, 128)
    assert (model.num_experts, model.top_k, model.expert_intermediate, model.norm_topk_prob) == (128, 8, 768, True)
    assert model.moe_layers == tuple(range(48))
    assert (model.shared_intermediate, model.dense_intermediate, model.sliding_window, model.clip_qkv) == (None, None, None, None)
    assert (model.rms_eps, model.rope_theta, model.max_positions, model.vocab_size) == (1e-6, 1e6, 40960, 151936)


def test_every_architecture_has_a_reader_and_a_module() -> None:
    configs = [tiny_config(family) for family in (*FAMILIES, *HYBRIDS)] + [tiny_config("qwen3_5_moe", nested=False)]
    assert {ModelConfig.from_dict(config).architecture for config in configs} == ARCHITECTURES.keys()


def test_both_styles_of_rope(tmp_path: Path) -> None:
    def theta(family: str, **changes: Any) -> float:
        return ModelConfig.from_dict(tiny_config(family, **changes)).rope_theta

    assert theta("mixtral", rope_theta=5.0) == 5.0
    assert theta("mixtral", rope_theta=None) == 1e6
    assert theta("olmoe", rope_theta=None) == 1e4
    assert theta("mixtral", rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0}) == 7.0
    assert theta("mixtral", rope_theta=5.0, rope_parameters={"rope_type": "default"}) == 5.0
    assert theta("mixtral", rope_theta=5.0, rope_scaling={"type": "default"}, rope_parameters={"rope_theta": 7.0}) == 5.0
    assert theta("mixtral", rope_theta=5, rope_scaling={}) == 5.0


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3", "longrope", "dynamic", "mrope"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_types_are_refused(kind: str, field: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{field}.*{kind}"):
        ModelConfig.from_dict(tiny_config("qwen3_moe", **{field: {key: kind, "factor": 4.0}}))


def test_count_of_experts_under_either_name() -> None:
    for family in FAMILIES:
        for name, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
            assert ModelConfig.from_dict(tiny_config(family, **{name: 7, other: None})).num_experts == 7
    with pytest.raises(CheckpointError, match="contradicts"):
        ModelConfig.from_dict(tiny_config("mixtral", num_local_experts=8, num_experts=4))


def test_which_layers_are_sparse() -> None:
    def sparse(**changes: Any) -> tuple[int, ...]:
        return ModelConfig.from_dict(tiny_config("qwen3_moe", num_layers=6, **changes)).moe_layers

    assert sparse() == (0, 1, 2, 3, 4, 5)
    assert sparse(decoder_sparse_step=2) == (1, 3, 5)
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3, 0]) == (1, 5)
    assert sparse(mlp_only_layers=None) == (0, 1, 2, 3, 4, 5)


def test_which_layers_slide() -> None:
    def windows(family: str, **changes: Any) -> list[int | None]:
        config = ModelConfig.from_dict(tiny_config(family, num_layers=4, **changes))
        return [config.window(layer) for layer in range(4)]

    assert windows("mixtral") == [None] * 4
    assert windows("mixtral", sliding_window=9) == [9] * 4
    assert windows("mixtral", sliding_window=9, layer_types=["sliding_attention"] * 4) == [9] * 4
    assert windows("qwen2_moe", sliding_window=9) == [None] * 4
    assert windows("qwen2_moe", sliding_window=0, layer_types=["full_attention"] * 4) == [None] * 4
    assert windows("qwen2_moe", sliding_window=9, use_sliding_window=True) == [9, None, 9, None]
    assert windows("qwen2_moe", sliding_window=9, use_sliding_window=True, max_window_layers=1) == [9, None, None, None]
    assert windows("qwen3_moe", sliding_window=9, use_sliding_window=True, max_window_layers=1) == [9] * 4


INTEGERS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts_per_tok",
]
WRONG: list[object] = [0, -1, 10**30, True, 64.0, float("nan"), float("inf"), "64", [64], {}]


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("field", INTEGERS)
def test_integers_that_are_none(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is "):
        ModelConfig.from_dict(tiny_config("mixtral", **{field: value}))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, True, "1e-5", [1e-5]], ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "clip_qkv"])
def test_numbers_that_are_none(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        ModelConfig.from_dict(tiny_config("olmoe", **{field: value}))


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"architectures": None}, "no architecture"),
    ("mixtral", {"architectures": []}, "no architecture"),
    ("mixtral", {"architectures": "MixtralForCausalLM"}, "architectures is "),
    ("mixtral", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported"),
    ("mixtral", {"architectures": ["MixtralForSequenceClassification"]}, "not supported"),
    ("mixtral", {"model_type": "qwen3_moe"}, "contradicts the architecture"),
    ("mixtral", {"hidden_size": None}, "'hidden_size' is missing"),
    ("mixtral", {"num_local_experts": None}, "neither num_local_experts nor num_experts"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
    ("mixtral", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ("mixtral", {"num_key_value_heads": 8}, "not a multiple of num_key_value_heads 8"),
    ("mixtral", {"head_dim": 15}, "odd"),
    ("mixtral", {"head_dim": None, "num_attention_heads": 6}, "not a multiple of num_attention_heads 6"),
    ("mixtral", {"hidden_act": "gelu"}, "'gelu' is not supported"),
    ("mixtral", {"hidden_act": 3}, "hidden_act is 3, expected a string"),
    ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types contradicts"),
    ("mixtral", {"layer_types": ["sliding_attention"] * 4}, "layer_types contradicts"),
    ("mixtral", {"layer_types": ["full_attention"] * 3}, "for each layer"),
    ("mixtral", {"layer_types": ["linear_attention"] * 4}, "for each layer"),
    ("mixtral", {"attention_bias": True}, "attention_bias"),
    ("mixtral", {"tie_word_embeddings": "yes"}, "expected true or false"),
    ("mixtral", {"tie_word_embeddings": 1}, "expected true or false"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("mixtral", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("mixtral", {"rope_parameters": "default"}, "rope_parameters is 'default', expected an object"),
    ("mixtral", {"rope_scaling": {"type": 3}}, "type is 3"),
    ("mixtral", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes' is not supported"),
    ("qwen3_moe", {"quantization_config": {}}, "quantised"),
    ("qwen3_moe", {"quantization_config": 4}, "quantization_config is 4"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
    ("qwen3_moe", {"decoder_sparse_step": 5}, "no layer has experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("qwen3_moe", {"mlp_only_layers": [4]}, "outside 0 to 3"),
    ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers is "),
    ("qwen3_moe", {"use_sliding_window": True}, "sliding_window is missing"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types contradicts"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ("olmoe", {"head_dim": 32}, "must equal hidden_size"),
    ("olmoe", {"sliding_window": 16}, "sliding_window"),
    ("olmoe", {"clip_qkv": 0}, "clip_qkv is 0"),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONTRADICTIONS, ids=lambda value: value if isinstance(value, str) else None)
def test_contradictions_and_unsupported_fields(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(tiny_config(family, **changes), where="some/config.json")
    assert str(caught.value).startswith("some/config.json")


NO_CONFIG = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"a": 1, "a": 2}',
    b'{"a": NaN}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
]


@pytest.mark.parametrize("content", NO_CONFIG, ids=lambda content: repr(content[:16]))
def test_files_that_are_no_config(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        ModelConfig.from_dir(tmp_path)


def test_a_value_nested_too_deep_for_repr() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(CheckpointError, match="hidden_size is a list"):
        ModelConfig.from_dict(tiny_config("mixtral", hidden_size=nested))
