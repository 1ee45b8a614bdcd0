"""The families with recurrent layers against transformers in float32: logits and states, every option, every way to cut a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import HYBRIDS, tiny_config, write_tiny_checkpoint
from torch import Tensor

from rimuru_models.config import ModelConfig
from rimuru_models.weights import CheckpointReader

TOKENS = 75
TOLERANCE = 1e-4

ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    ("qwen3_next", {"attention_bias": True, "num_key_value_heads": 1}),
    ("qwen3_next", {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    ("qwen3_next", {"full_attention_interval": 2, "num_layers": 5}),
    ("qwen3_next", {"mlp_only_layers": [1], "linear_num_key_heads": 4}),
    ("qwen3_next", {"decoder_sparse_step": 2, "linear_num_key_heads": 1}),
    ("qwen3_next", {"linear_conv_kernel_dim": 2, "linear_value_head_dim": 20}),
    ("qwen3_next", {"partial_rotary_factor": 0.5, "rope_theta": 70.0}),
    ("qwen3_next", {"partial_rotary_factor": 1.0}),
    ("qwen3_next", {"partial_rotary_factor": None, "rope_theta": None, "rope_parameters": ROPE}),
    ("qwen3_5_moe", {"nested": False, "tie_word_embeddings": True}),
    ("qwen3_5_moe", {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4}),
    ("qwen3_5_moe", {"attention_bias": True, "linear_conv_kernel_dim": 3}),
    ("qwen3_5_moe", {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "tie_word_embeddings": False}),
    ("granitemoehybrid", {"mamba_n_groups": 4, "mamba_d_head": "auto"}),
    ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("granitemoehybrid", {"attention_bias": True, "num_key_value_heads": None, "position_embedding_type": None}),
    ("granitemoehybrid", {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_layers": 3}),
    ("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_layers": 2, "position_embedding_type": "rope"}),
    ("granitemoehybrid", {"mamba_d_conv": 3, "mamba_expand": 1, "mamba_n_heads": 4}),
]


def tokens(count: int = TOKENS, seed: int = 3) -> Tensor:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def reference_run(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    """Logits of all rows and the reference's cache after them."""
    out = model(ids[None], use_cache=True)
    return out.logits[0], out.cache


def largest_difference_of_states(run: Any, cache: Any) -> float:
    """Over all recurrent layers and both kinds of states; the reference keeps K columns of the convolution, of which K - 1 matter."""
    config: ModelConfig = run.config
    assert config.recurrent is not None
    differences = []
    for layer in config.recurrent_layers:
        theirs = cache.layers[layer]
        ours = run.states.recurrent(layer)[0]
        recurrent = theirs.recurrent_states[0][0]
        assert recurrent.shape == ours.shape and recurrent.std() > 1e-3
        differences.append((ours - recurrent).abs().max())
        columns = theirs.conv_states[0][0][:, -config.recurrent.conv_rows :]
        differences.append((run.states.convolution(layer)[0] - columns.t()).abs().max())
    return float(max(differences))


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family in HYBRIDS for layout in ("per_expert", "fused") if (family, layout) != (HYBRIDS[2], "per_expert")],
)
def test_logits_and_states_match_for_every_cut(
    family: str, layout: str, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, layout=layout, seed=2)
    expected, cache = reference_run(reference_model(folder), tokens())
    assert expected.std() > 1
    for first in (1, 63, 64, 65, TOKENS):
        steps = [1] * (TOKENS - first) if first > 1 else [64] + [1] * (TOKENS - 65)
        run = resident_run(folder)
        assert (run.run(tokens(), [first, *steps]) - expected).abs().max() < TOLERANCE, f"prompt cut after {first}"
        assert largest_difference_of_states(run, cache) < TOLERANCE, f"prompt cut after {first}"


@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=lambda value: value if isinstance(value, str) else ",".join(value))
def test_logits_match_for_every_option(
    family: str, options: dict[str, Any], tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, seed=5, layout="fused", **options)
    expected, _ = reference_run(reference_model(folder), tokens())
    actual = resident_run(folder).run(tokens(), [33, 32] + [1] * (TOKENS - 65))
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_texts_shorter_than_the_convolution(
    family: str, count: int, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family)
    expected, cache = reference_run(reference_model(folder), tokens(count))
    for splits in ([count], [1] * count):
        run = resident_run(folder)
        assert (run.run(tokens(count), splits) - expected).abs().max() < TOLERANCE
        assert largest_difference_of_states(run, cache) < TOLERANCE


@pytest.mark.parametrize("family", HYBRIDS)
def test_sequences_of_one_batch_do_not_see_each_other(
    family: str, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, shards=3)
    model = reference_model(folder)
    first, second = tokens(66, seed=1), tokens(40, seed=2)
    batch = resident_run(folder, num_sequences=2)
    # prefill of one beside single steps of the other, then one of them rests
    cuts = [(first[:64], second[:1]), (first[64:65], second[1:35]), (first[65:], second[35:36]), (first[:0], second[36:])]
    steps = [(batch.step(a, b), len(a)) for a, b in cuts]
    assert (torch.cat([out[:rows] for out, rows in steps]) - reference_run(model, first)[0]).abs().max() < TOLERANCE
    assert (torch.cat([out[rows:] for out, rows in steps]) - reference_run(model, second)[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "nested"), [("qwen3_next", False), ("qwen3_5_moe", True), ("qwen3_5_moe", False), ("granitemoehybrid", False)]
)
def test_a_folder_written_by_the_reference_loads(
    family: str, nested: bool, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    # transformers 5 writes its own config style (new layer names, rope_parameters, Infinity) and un-fuses experts
    options = {"nested": nested} if family == "qwen3_5_moe" else {}
    reference = reference_model(write_tiny_checkpoint(tmp_path / "ours", family, **options))
    reference.save_pretrained(tmp_path / "theirs")
    expected, _ = reference_run(reference, tokens())
    assert (resident_run(tmp_path / "theirs").run(tokens(), [TOKENS]) - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def test_the_text_of_a_multimodal_model_of_the_reference(tmp_path: Path, transformers_module: Any, resident_run: Any) -> None:
    """The whole model, images and all, as the reference makes, computes and saves it; ours reads the text part."""
    values = tiny_config("qwen3_5_moe")
    vision = values["vision_config"] | {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    config = transformers_module.AutoConfig.for_model(
        "qwen3_5_moe", text_config=values["text_config"], vision_config=vision, tie_word_embeddings=False
    )
    torch.manual_seed(4)
    model = transformers_module.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    assert type(model).__name__ == "Qwen3_5MoeForConditionalGeneration"
    model.set_experts_implementation("eager")
    for parameter in model.parameters():
        # away from defaults that hide mistakes: vectors from 0 and 1, matrices from next to nothing
        parameter.copy_(parameter + 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else parameter * 5)
    model.save_pretrained(tmp_path)
    ids = tokens()
    expected = model(input_ids=ids[None], mm_token_type_ids=torch.zeros(1, TOKENS, dtype=torch.int32)).logits[0]
    assert expected.std() > 0.5
    for splits in ([TOKENS], [1] * TOKENS, [63, TOKENS - 63], [64, TOKENS - 64], [65] + [1] * (TOKENS - 65)):
        assert (resident_run(tmp_path).run(ids, splits) - expected).abs().max() < TOLERANCE
    with CheckpointReader(tmp_path) as reader:
        assert len(reader.unused_parts) == 1 and "reads images" in reader.unused_parts[0]


@pytest.mark.parametrize("family", HYBRIDS)
def test_half_precision_weights_are_computed_in_float32(
    family: str, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16, seed=3)
    expected, cache = reference_run(reference_model(folder), tokens())
    run = resident_run(folder)
    assert (run.run(tokens(), [TOKENS]) - expected).abs().max() < TOLERANCE
    assert largest_difference_of_states(run, cache) < TOLERANCE


def test_step_limits_hold_in_prompts_and_single_tokens(tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any) -> None:
    """The reference clamps steps only where it computes several tokens at once; ours agree with that, however they are cut."""
    limited = write_tiny_checkpoint(tmp_path / "limited", "granitemoehybrid", time_step_limit=[0.3, 0.9])
    expected, _ = reference_run(reference_model(limited), tokens())
    for splits in ([TOKENS], [64] + [1] * (TOKENS - 64)):
        assert (resident_run(limited).run(tokens(), splits) - expected).abs().max() < TOLERANCE
    free = write_tiny_checkpoint(tmp_path / "free", "granitemoehybrid")
    assert (resident_run(free).run(tokens(), [TOKENS]) - expected).abs().max() > 0.1, "the limits change something"
