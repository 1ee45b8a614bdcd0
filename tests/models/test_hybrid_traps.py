"""Conventions that differ between families and are easily taken for each other: each side against the reference and the other side.

In half precision whole models cannot be compared, because rounding sends tokens to other experts; their blocks can.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import HYBRIDS, tiny_config, write_tiny_checkpoint
from torch import Tensor

from rimuru_kernels.rms_norm import rms_norm
from rimuru_models.config import ModelConfig
from rimuru_models.decoder import MoeDecoder
from rimuru_models.interfaces import ForwardContext
from rimuru_models.layout import dense_bytes, dense_shapes, kept_wide
from rimuru_models.loader import load_model
from rimuru_models.resident import ResidentExperts, ResidentKVCache, ResidentStates
from rimuru_models.weights import CheckpointReader

HALF = torch.bfloat16


@pytest.fixture
def half_models(tmp_path: Path, transformers_module: Any) -> Callable[[str], tuple[MoeDecoder, Any, ModelConfig]]:
    """Family -> our model and the reference's, both in bfloat16."""

    def load(family: str) -> tuple[MoeDecoder, Any, ModelConfig]:
        folder = write_tiny_checkpoint(tmp_path, family, dtype=HALF)
        theirs = transformers_module.AutoModelForCausalLM.from_pretrained(folder, dtype=HALF, attn_implementation="eager").eval()
        with CheckpointReader(folder) as reader:
            return load_model(reader, HALF), theirs, reader.config

    return load


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).to(HALF)


def unequal(ours: Tensor, theirs: Tensor) -> float:
    """Share of elements that differ at all; a last-bit difference in a sum may round one in a hundred the other way."""
    return float((ours != theirs).float().mean())


def run_mixer(model: MoeDecoder, config: ModelConfig, layer: int, x: Tensor, splits: list[int]) -> tuple[Tensor, ResidentStates]:
    kv, states = ResidentKVCache(config), ResidentStates(config, dtype=HALF)
    angles = torch.zeros(len(x), 1, config.rotary_dim, dtype=HALF)
    outs = []
    for part in x.split(splits):
        states.begin_step([len(part)])
        context = ForwardContext(torch.zeros(len(part)), kv, None, recurrent=states)  # type: ignore[arg-type]
        outs.append(model.layers[layer].mixer.forward(part, angles[: len(part)], angles[: len(part)], context))
    return torch.cat(outs), states


@torch.inference_mode()
@pytest.mark.parametrize("family", HYBRIDS)
def test_norms_round_where_their_family_does(family: str, half_models: Any) -> None:
    """Qwen: x̂ (1 + w) in float32, then rounded. Granite: x̂ rounded, then times w."""
    ours, theirs, config = half_models(family)
    x = rows(200)
    for weight, module in [
        (ours.layers[1].mixer_norm, theirs.model.layers[1].input_layernorm),
        (ours.layers[1].mlp_norm, theirs.model.layers[1].post_attention_layernorm),
        (ours.norm, theirs.model.norm),
    ]:
        assert weight.dtype is (torch.float32 if config.zero_centred_norms else HALF)
        assert unequal(rms_norm(x, weight, config.rms_eps), module(x)) < 0.01
        other = weight.to(HALF) if config.zero_centred_norms else weight.float()
        assert unequal(rms_norm(x, other, config.rms_eps), module(x)) > 0.05, "the other order of rounding"
    stored = theirs.model.norm.weight.float()
    torch.testing.assert_close(ours.norm.float(), stored + 1.0 if config.zero_centred_norms else stored)


@torch.inference_mode()
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_gated_norm_has_a_plain_weight_and_its_own_order(family: str, half_models: Any) -> None:
    from rimuru_kernels.gated_rms_norm import gated_rms_norm

    ours, theirs, config = half_models(family)
    delta = config.recurrent is not None and config.recurrent.kind == "delta"
    mixer = ours.layers[0].mixer
    module = theirs.model.layers[0].linear_attn.norm if delta else theirs.model.layers[0].mamba.norm
    assert mixer.norm.dtype is HALF and torch.equal(mixer.norm.flatten(), module.weight)
    x, gate = (torch.randn(30, module.weight.numel(), generator=torch.Generator().manual_seed(seed)).to(HALF) for seed in (0, 1))
    weight = mixer.norm.flatten()
    assert unequal(gated_rms_norm(x, gate, weight, config.rms_eps, norm_before_gate=delta), module(x, gate)) < 0.02
    assert unequal(gated_rms_norm(x, gate, weight, config.rms_eps, norm_before_gate=not delta), module(x, gate)) > 0.5


@torch.inference_mode()
@pytest.mark.parametrize("splits", [[70], [65, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_mixers_in_half_precision(family: str, splits: list[int], half_models: Any) -> None:
    """States stay float32; what the convolution remembers has the model's dtype and one row less than the kernel."""
    ours, theirs, config = half_models(family)
    assert config.recurrent is not None
    module = theirs.model.layers[0].mamba if family == "granitemoehybrid" else theirs.model.layers[0].linear_attn
    x = rows(70)
    expected = module(x[None])[0]
    out, states = run_mixer(ours, config, 0, x, splits)
    assert (out - expected).abs().max() < 2**-6 * expected.abs().max()
    recurrent, convolution = states.recurrent(0)[0], states.convolution(0)[0]
    assert recurrent.dtype is torch.float32 and recurrent.shape == config.recurrent.state_shape
    assert convolution.dtype is HALF and convolution.shape == (config.recurrent.kernel - 1, config.recurrent.channels)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "qwen3_moe", "mixtral", "granitemoehybrid"])
def test_router_weights_are_float32_everywhere(family: str, tmp_path: Path, transformers_module: Any) -> None:
    """Ours are exact, logits and all. The references round their logits to the model's dtype, and all but Mixtral's their weights too."""
    folder = write_tiny_checkpoint(tmp_path, family, dtype=HALF)
    theirs = transformers_module.AutoModelForCausalLM.from_pretrained(folder, dtype=HALF, attn_implementation="eager").eval()
    with CheckpointReader(folder) as reader:
        block: Any = load_model(reader, HALF).layers[0].mlp
    layer = theirs.model.layers[0]
    router = layer.block_sparse_moe.router if family == "granitemoehybrid" else layer.mlp.gate
    x = rows(50)
    ours, chosen = block.route(x)
    exact = torch.softmax(x.double() @ block.router.double().t(), 1).gather(1, chosen)
    exact = exact / exact.sum(1, keepdim=True) if block.renormalize else exact
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=1e-6)
    _, weights, ids = router(x)
    order = ids.argsort(1)
    same = (chosen == ids.gather(1, order)).all(1)
    assert same.float().mean() > 0.9, "near ties may go either way"
    assert weights.dtype is (torch.float32 if family == "mixtral" else HALF)
    torch.testing.assert_close(ours[same], weights.gather(1, order)[same].float(), atol=2**-6, rtol=2**-5)


def changed_logits(folder: Path, change: Callable[[MoeDecoder], None]) -> float:
    """Largest difference of the logits that a change of the loaded model makes."""
    with CheckpointReader(folder) as reader, torch.inference_mode():
        outs = []
        for edit in (None, change):
            model = load_model(reader)
            if edit is not None:
                edit(model)
            states = ResidentStates(reader.config)
            states.begin_step([40])
            context = ForwardContext(torch.arange(40), ResidentKVCache(reader.config), ResidentExperts(reader), recurrent=states)
            outs.append(model.logits(model.forward(torch.arange(40) * 3 % 128, context)))
    return float((outs[0] - outs[1]).abs().max())


def swap_halves(model: MoeDecoder) -> None:
    """Take the gate for the query."""
    attention: Any = model.layers[3].mixer
    size = attention.heads * attention.head_dim
    attention.qkv = torch.cat((attention.qkv[-size:], attention.qkv[size:-size], attention.qkv[:size]))


def flat_query(model: MoeDecoder) -> None:
    """Take q_proj as all queries, then all gates, instead of head by head."""
    attention: Any = model.layers[3].mixer
    size, width = attention.heads * attention.head_dim, attention.head_dim
    q, gate = attention.qkv[:size].view(-1, width, 64), attention.qkv[-size:].view(-1, width, 64)
    stored = torch.cat((q, gate), 1).view(-1, 64)
    attention.qkv = torch.cat((stored[:size], attention.qkv[size:-size], stored[size:]))


def repeated_heads(model: MoeDecoder) -> None:
    """Value heads in the order 0, 2, 1, 3: what results where value head i reads key head i % Hk instead of i // (Hv / Hk)."""
    for layer in model.layers[:3]:
        mixer: Any = layer.mixer
        mixer.a_log, mixer.dt_bias = mixer.a_log[[0, 2, 1, 3]], mixer.dt_bias[[0, 2, 1, 3]]


def plain_norms(model: MoeDecoder) -> None:
    """Forget that norms are centred on zero."""
    model.norm -= 1.0


def centred_gated_norm(model: MoeDecoder) -> None:
    """Take the gated norm for one centred on zero."""
    for layer in model.layers[:3]:
        mixer: Any = layer.mixer
        mixer.norm = mixer.norm + torch.arange(len(mixer.norm)) / len(mixer.norm)


def no_shared_gate(model: MoeDecoder) -> None:
    for layer in model.layers:
        block: Any = layer.mlp
        block.shared_gate = block.shared_gate * 100.0


def factor(name: str) -> Callable[[MoeDecoder], None]:
    def change(model: MoeDecoder) -> None:
        from dataclasses import replace

        model.config = replace(model.config, **{name: 1.0})

    return change


def plain_scale(model: MoeDecoder) -> None:
    attention: Any = model.layers[2].mixer
    attention.scale = attention.head_dim**-0.5


def no_skip(model: MoeDecoder) -> None:
    mixer: Any = model.layers[0].mixer
    mixer.skip = torch.zeros_like(mixer.skip)


def reversed_taps(model: MoeDecoder) -> None:
    mixer: Any = model.layers[0].mixer
    mixer.taps = mixer.taps.flip(0)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_next", swap_halves),
        ("qwen3_next", flat_query),
        ("qwen3_next", repeated_heads),
        ("qwen3_next", plain_norms),
        ("qwen3_next", centred_gated_norm),
        ("qwen3_next", no_shared_gate),
        ("qwen3_5_moe", reversed_taps),
        ("granitemoehybrid", factor("embedding_multiplier")),
        ("granitemoehybrid", factor("residual_multiplier")),
        ("granitemoehybrid", factor("logits_divisor")),
        ("granitemoehybrid", plain_scale),
        ("granitemoehybrid", no_skip),
    ],
)
def test_the_tiny_models_would_show_it(family: str, change: Callable[[MoeDecoder], None], tmp_path: Path) -> None:
    """The comparison with the reference is worth something only if what could be mistaken changes the logits far beyond its tolerance."""
    assert changed_logits(write_tiny_checkpoint(tmp_path, family), change) > 0.01


def test_positions_matter_only_where_the_model_knows_them(tmp_path: Path) -> None:
    def spread(family: str, **options: Any) -> float:
        folder = write_tiny_checkpoint(tmp_path / f"{family}{len(options)}", family, **options)
        with CheckpointReader(folder) as reader, torch.inference_mode():
            model, experts, outs = load_model(reader), ResidentExperts(reader), []
            for stretch in (1, 3):
                states = ResidentStates(reader.config)
                states.begin_step([30])
                context = ForwardContext(torch.arange(30) * stretch, ResidentKVCache(reader.config), experts, recurrent=states)
                outs.append(model.logits(model.forward(torch.arange(30), context)))
        return float((outs[0] - outs[1]).abs().max())

    assert spread("granitemoehybrid") == 0.0
    assert spread("granitemoehybrid", position_embedding_type="rope") > 0.01
    assert spread("qwen3_5_moe") > 0.01


@pytest.mark.parametrize("family", HYBRIDS)
def test_bytes_of_the_dense_weights_in_every_dtype(family: str, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with CheckpointReader(write_tiny_checkpoint(tmp_path, family)) as reader:
            model = load_model(reader, dtype)
            assert model.dense_bytes == dense_bytes(reader.config, dtype.itemsize)
    config = ModelConfig.from_dict(tiny_config(family))
    wide = {name.split(".", 3)[-1] for name in dense_shapes(config) if kept_wide(config, name)}
    assert any("A_log" in name for name in wide) and not any("linear_attn.norm" in name or "mamba.norm" in name for name in wide)
    assert any("layernorm" in name for name in wide) is config.zero_centred_norms
