"""The made-up routing: the habits of the recorded one that its model was fitted to, and the shapes that it is for."""

from __future__ import annotations

import pytest
import torch

from rimuru_cli.bench.drawn_routing import PROMPT_STEPS, drawn_experts
from rimuru_cli.bench.hybrid_shapes import HYBRID_SHAPES
from rimuru_cli.bench.synthetic import SHAPES, SyntheticReader
from rimuru_cli.bench.tokens import Routing
from rimuru_models.config import ModelConfig
from rimuru_models.layout import num_parameters


def used_again(experts: torch.Tensor, distance: int) -> float:
    """Share of a token's experts that the token `distance` before it used too."""
    later, before = experts[distance:], experts[:-distance]
    return float((later.unsqueeze(-1) == before.unsqueeze(-2)).any(-1).float().mean())


def test_experts_come_again_as_often_as_in_the_recording() -> None:
    experts = drawn_experts(PROMPT_STEPS + 128, 12, 128, 6)[PROMPT_STEPS:, :, 0]
    # The recording (top 6 of 128) has 38.0 and 28.3 %; uniform choice would have 4.7 % at any distance.
    assert used_again(experts, 1) == pytest.approx(0.38, abs=0.06)
    assert used_again(experts, 16) == pytest.approx(0.283, abs=0.06)


def test_every_token_has_so_many_different_experts_in_order_and_always_the_same() -> None:
    experts = drawn_experts(40, 5, 64, 8, answers=3)
    assert experts.shape == (40, 5, 3, 8) and experts.dtype is torch.int64
    assert bool((experts.diff(dim=3) > 0).all()) and int(experts.min()) >= 0 and int(experts.max()) < 64
    assert torch.equal(experts, drawn_experts(40, 5, 64, 8, answers=3))
    assert not torch.equal(experts, drawn_experts(40, 5, 64, 8, answers=3, seed=1))
    assert not torch.equal(experts[:, :, 0], experts[:, :, 1]), "each answer is another one"
    routing = Routing.drawn(12, 5, 64, 8, answers=3)
    assert routing.prompt_steps == PROMPT_STEPS and torch.equal(routing.experts, experts)
    assert torch.allclose(routing.weights.sum(-1), torch.ones(40, 5, 3))


@pytest.mark.parametrize(("name", "billions"), [("qwen3.5-35b-a3b", 34.661), ("granite-4.0-h-tiny", 6.939)])
def test_hybrid_shapes_have_the_released_models_parameters(name: str, billions: float) -> None:
    assert num_parameters(ModelConfig.from_dict(HYBRID_SHAPES[name], where=name)) / 1e9 == pytest.approx(billions, abs=0.001)


def test_weights_of_a_hybrid_shape_have_the_shapes_of_a_checkpoint() -> None:
    assert set(HYBRID_SHAPES) < set(SHAPES)
    reader = SyntheticReader("tiny-hybrid", dtype=torch.float32)
    assert reader.dense_view("model.layers.0.linear_attn.conv1d.weight").shape == (2 * 2 * 32 + 4 * 24, 1, 4)
    assert reader.config.recurrent_layers == (0, 1, 2) and reader.config.attention_layers == (3,)
