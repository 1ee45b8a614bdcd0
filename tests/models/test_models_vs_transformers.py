"""Every family against transformers in float32: both layouts, every option that changes the result, every way to cut a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint

TOKENS = 75
TOLERANCE = 1e-4

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"sliding_window": 16}),
    ("mixtral", {"tie_word_embeddings": True, "head_dim": None}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 5, "num_key_value_heads": 1}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 3, "num_layers": 5}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 10, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": True, "qkv_bias": False}),
    ("qwen3_moe", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 12}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}),
    ("qwen3_moe", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    ("qwen3_moe", {"rope_theta": 70.0, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("olmoe", {"clip_qkv": 0.7, "attention_bias": True}),
    ("olmoe", {"num_key_value_heads": 2, "norm_topk_prob": True}),
]


def tokens(count: int = TOKENS, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0]


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_for_every_cut(
    family: str, layout: str, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, layout=layout, seed=len(family))
    expected = reference_logits(reference_model(folder), tokens())
    assert expected.std() > 1
    for first in (1, 63, 64, 65, TOKENS):
        steps = [1] * (TOKENS - first) if first > 1 else [64] + [1] * (TOKENS - 65)
        actual = resident_run(folder).run(tokens(), [first, *steps])
        assert (actual - expected).abs().max() < TOLERANCE, f"prompt cut after {first}"


@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=lambda value: value if isinstance(value, str) else ",".join(value))
def test_logits_match_for_every_option(
    family: str, options: dict[str, Any], tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, seed=11, **options)
    expected = reference_logits(reference_model(folder), tokens())
    actual = resident_run(folder).run(tokens(), [33, 32] + [1] * (TOKENS - 65))
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
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
    assert (torch.cat([out[:rows] for out, rows in steps]) - reference_logits(model, first)).abs().max() < TOLERANCE
    assert (torch.cat([out[rows:] for out, rows in steps]) - reference_logits(model, second)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_written_by_the_reference_loads(
    family: str, tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any
) -> None:
    # transformers 5 writes its own config style (rope_parameters, num_local_experts) and tensor names
    reference = reference_model(write_tiny_checkpoint(tmp_path / "ours", family))
    reference.save_pretrained(tmp_path / "theirs")
    expected = reference_logits(reference, tokens())
    assert (resident_run(tmp_path / "theirs").run(tokens(), [TOKENS]) - expected).abs().max() < TOLERANCE


def test_half_precision_weights_are_computed_in_float32(tmp_path: Path, reference_model: Callable[[Path], Any], resident_run: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        folder = write_tiny_checkpoint(tmp_path / str(dtype), "qwen2_moe", dtype=dtype)
        expected = reference_logits(reference_model(folder), tokens())
        assert (resident_run(folder).run(tokens(), [TOKENS]) - expected).abs().max() < TOLERANCE
