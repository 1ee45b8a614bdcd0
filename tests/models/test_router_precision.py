"""Routers in bfloat16 models: their logits are float32, so that near ties do not become ties."""

from __future__ import annotations

import pytest
import torch

from rimuru_models.moe import router_logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_are_those_of_float64(dtype: torch.dtype) -> None:
    x, router = torch.randn(5, 256).to(dtype), torch.randn(16, 256).to(dtype)
    logits = router_logits(x, router)
    exact = x.double() @ router.double().t()
    assert logits.dtype is torch.float32
    assert float((logits.double() - exact).norm() / exact.norm()) < 1e-6


def test_a_near_tie_is_decided_by_what_was_computed() -> None:
    """Two experts apart by less than bfloat16 can show: the better one wins, not the one with the lower number."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    router = torch.tensor([[64.0, 0.0], [64.0, 0.0625]], dtype=torch.bfloat16)
    assert router_logits(x, router).argmax(-1).tolist() == [1]
    assert torch.nn.functional.linear(x, router).argmax(-1).tolist() == [0], "in bfloat16 they are equal"
