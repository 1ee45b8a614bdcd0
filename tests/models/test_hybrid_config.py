"""config.json of the hybrid families: the released models' numbers, both styles, every way it can be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from released_hybrids import RELEASED
from tiny_checkpoints import tiny_config

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.layout import expert_bytes, num_parameters

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "total", "rest"),
    [
        ("qwen3-next-80b", "79.674", "2.365"),
        ("qwen3.5-35b", "34.661", "2.448"),
        ("qwen3.5-122b", "122.112", "6.147"),
        ("qwen3.5-397b", "396.346", "9.799"),
        ("granite-4.0-h-tiny", "6.939", "0.899"),
        ("granite-4.0-h-small", "32.207", "5.028"),
    ],
)
def test_released_models_have_their_published_size(name: str, total: str, rest: str) -> None:
    model = ModelConfig.from_dict(RELEASED[name])
    routed = len(model.moe_layers) * model.num_experts * expert_bytes(model, 1)
    assert f"{num_parameters(model) / 1e9:.3f}" == total  # billions; text model only
    assert f"{(num_parameters(model) - routed) / 1e9:.3f}" == rest


@pytest.mark.parametrize(
    ("name", "state", "row", "rows", "layers", "all_states_mib"),
    [
        ("qwen3-next-80b", 2 * MIB, 16_384, 3, (12, 36), 73.69),
        ("qwen3.5-35b", 2 * MIB, 16_384, 3, (10, 30), 61.41),
        ("qwen3.5-122b", 4 * MIB, 24_576, 3, (12, 36), 146.53),
        ("qwen3.5-397b", 4 * MIB, 24_576, 3, (15, 45), 183.16),
        ("granite-4.0-h-tiny", 1_572_864, 6_656, 3, (4, 36), 54.69),
        ("granite-4.0-h-small", 4 * MIB, 16_896, 3, (4, 36), 145.74),
    ],
)
def test_states_of_released_models(name: str, state: int, row: int, rows: int, layers: tuple[int, int], all_states_mib: float) -> None:
    model = ModelConfig.from_dict(RELEASED[name])
    mixer = model.recurrent
    assert mixer is not None
    assert (mixer.state_bytes, mixer.conv_row_bytes(2), mixer.conv_rows) == (state, row, rows)
    assert (len(model.attention_layers), len(model.recurrent_layers)) == layers
    per_sequence = len(model.recurrent_layers) * (mixer.state_bytes + mixer.conv_rows * mixer.conv_row_bytes(2))
    assert per_sequence / MIB == pytest.approx(all_states_mib, abs=0.006)


def test_fields_of_a_released_model() -> None:
    model = ModelConfig.from_dict(RELEASED["qwen3.5-35b"])
    assert (model.architecture, model.model_type) == ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
    assert (model.rotary_dim, model.rope_theta, model.attention_scale, model.qk_norm) == (64, 1e7, 256**-0.5, "head")
    assert (model.gated_attention, model.zero_centred_norms, model.shared_gate, model.norm_topk_prob) == (True, True, True, True)
    assert model.attention_layers == tuple(range(3, 40, 4)) and model.moe_layers == tuple(range(40))
    assert (model.embedding_multiplier, model.residual_multiplier, model.logits_divisor) == (1.0, 1.0, 1.0)
    granite = ModelConfig.from_dict(RELEASED["granite-4.0-h-small"])
    assert (granite.rotary_dim, granite.attention_scale, granite.qk_norm) == (0, 0.0078125, "none")
    assert (granite.gated_attention, granite.zero_centred_norms, granite.shared_gate, granite.norm_topk_prob) == (False, False, False, True)
    assert granite.attention_layers == (5, 15, 25, 35) and granite.tie_word_embeddings
    assert (granite.embedding_multiplier, granite.residual_multiplier, granite.logits_divisor) == (12.0, 0.22, 6.0)


def test_defaults_of_absent_fields() -> None:
    bare = {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = ModelConfig.from_dict(bare)
    assert (model.head_dim, model.rotary_dim, model.num_kv_heads, model.rope_theta) == (256, 64, 2, 1e4)
    assert model.attention_layers == (3, 7) and model.norm_topk_prob and model.shared_intermediate == 512
    mixer = model.recurrent
    assert mixer is not None and mixer.state_shape == (32, 128, 128) and mixer.kernel == 4


def test_where_the_embeddings_are_tied() -> None:
    def tied(top: object, text: object) -> bool:
        config = tiny_config("qwen3_5_moe", tie_word_embeddings=top)
        config["text_config"]["tie_word_embeddings"] = text
        return ModelConfig.from_dict(config).tie_word_embeddings

    assert tied(True, False) and tied(True, None) and tied(None, True)
    assert not tied(False, True) and not tied(None, None)


def test_router_of_each_family() -> None:
    def renormalises(family: str, **changes: Any) -> bool:
        return ModelConfig.from_dict(tiny_config(family, **changes)).norm_topk_prob

    assert renormalises("qwen3_next", norm_topk_prob=True) and not renormalises("qwen3_next", norm_topk_prob=False)
    assert renormalises("qwen3_5_moe", norm_topk_prob=False), "Qwen3.5 has no such field and always rescales"


def test_kinds_of_layers_in_both_styles() -> None:
    def recurrent(**changes: Any) -> tuple[int, ...]:
        return ModelConfig.from_dict(tiny_config("granitemoehybrid", **changes)).recurrent_layers

    assert recurrent() == (0, 1, 3)
    assert recurrent(layer_types=["linear_attention", "full_attention"] * 2) == (0, 2)
    assert recurrent(layer_types=None, layers_block_type=["attention", "mamba"] * 2) == (1, 3)
    alone = ModelConfig.from_dict(tiny_config("granitemoehybrid", layer_types=["attention"] * 4))
    assert alone.recurrent is None and alone.attention_layers == (0, 1, 2, 3)


@pytest.mark.parametrize("written", ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]', "null", "[0, 1e6]"])
def test_step_limits_as_they_are_written(written: str, tmp_path: Path) -> None:
    text = json.dumps(tiny_config("granitemoehybrid", time_step_limit="HERE")).replace('"HERE"', written)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    mixer = ModelConfig.from_dir(tmp_path).recurrent
    assert mixer is not None and mixer.step_limits == (0.0, 1e6 if "1e6" in written else math.inf)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"linear_num_value_heads": 3}, "not a multiple of linear_num_key_heads 2"),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "no attention layer"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "for each layer"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "for each layer"),
    ("qwen3_next", {"full_attention_interval": 5}, "no attention layer"),
    ("qwen3_next", {"partial_rotary_factor": 0.1}, "makes 3 of 32 dimensions turn"),
    ("qwen3_next", {"partial_rotary_factor": 0.0}, "makes 0 of 32"),
    ("qwen3_next", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ("qwen3_next", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ("qwen3_next", {"hidden_act": "gelu"}, "'gelu' is not supported"),
    ("qwen3_next", {"num_experts": 0}, "num_experts is 0"),
    ("qwen3_5_moe", {"model_type": "qwen3_5_text"}, "text_config: model_type 'qwen3_5_text' contradicts"),
    ("qwen3_5_moe", {"quantization_config": {"quant_method": "aqlm"}}, "text_config.*'aqlm'"),
    ("granitemoehybrid", {"num_local_experts": 0}, "no experts"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "'alibi' is not supported"),
    ("granitemoehybrid", {"layer_types": None}, "layer_types is missing, .*recurrent"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "no attention layer"),
    ("granitemoehybrid", {"mamba_d_head": 15}, "do not make up"),
    ("granitemoehybrid", {"mamba_d_head": "wide"}, "mamba_d_head is 'wide'"),
    ("granitemoehybrid", {"mamba_n_groups": 3}, "not a multiple of mamba_n_groups 3"),
    ("granitemoehybrid", {"mamba_n_heads": 7, "mamba_d_head": "auto"}, "do not make up"),
    ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling is 0"),
    ("granitemoehybrid", {"residual_multiplier": float("inf")}, "residual_multiplier is inf"),
    ("granitemoehybrid", {"time_step_limit": [0.0]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": [2.0, 1.0]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": [-1.0, 1.0]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": [0.0, 10**400]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": [True, 1.0]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": {"a": 1}}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": [float("inf"), float("inf")]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit must be two numbers"),
]


@pytest.mark.parametrize(("family", "changes", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_contradictions_and_unsupported_fields(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(tiny_config(family, **changes), where="some/config.json")
    assert str(caught.value).startswith("some/config.json")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_next", {"linear_num_value_heads": 3}),
        ("qwen3_5_moe", {"linear_conv_kernel_dim": 0}),
        ("qwen3_5_moe", {"num_key_value_heads": 3}),
        ("qwen3_next", {"hidden_size": None}),
        ("granitemoehybrid", {"layer_types": None}),
        ("granitemoehybrid", {"mamba_n_groups": 3}),
        ("granitemoehybrid", {"mamba_d_head": 15}),
    ],
)
def test_what_no_released_model_says_comes_with_advice(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(tiny_config(family, **changes))
    assert caught.value.hint is not None and "again" in caught.value.hint


def test_a_multimodal_config_without_its_text_model() -> None:
    config = tiny_config("qwen3_5_moe")
    del config["text_config"]
    with pytest.raises(CheckpointError, match="'text_config', which describes the text model, is missing"):
        ModelConfig.from_dict(config)
    with pytest.raises(CheckpointError, match="text_config is 3"):
        ModelConfig.from_dict(config | {"text_config": 3})
    with pytest.raises(CheckpointError, match="'aqlm'"):
        ModelConfig.from_dict(tiny_config("qwen3_5_moe") | {"quantization_config": {"quant_method": "aqlm"}})
