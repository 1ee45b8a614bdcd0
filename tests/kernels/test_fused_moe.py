"""Expert feed-forward against a float64 formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rimuru_kernels.fused_moe import TokenWorkspace, expert_ffn, token_moe


def _expected(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x, gate, up, down = (t.double() for t in (x, gate, up, down))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize(("rows", "f", "d"), [(1, 48, 64), (5, 48, 64), (33, 7, 129), (2, 1, 1)], ids=lambda v: str(v))
def test_one_expert(rows: int, f: int, d: int) -> None:
    x, gate, up, down, weights = torch.randn(rows, d), torch.randn(f, d), torch.randn(f, d), torch.randn(d, f), torch.rand(rows)
    out = expert_ffn(x, gate, up, down, weights)
    torch.testing.assert_close(out.double(), _expected(x, gate, up, down) * weights[:, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("k", "f", "d"), [(1, 48, 64), (3, 48, 64), (20, 7, 129), (2, 1, 1)], ids=lambda v: str(v))
def test_the_experts_of_one_token(k: int, f: int, d: int) -> None:
    x, weights = torch.randn(1, d), torch.rand(k)
    gate_ups, downs = [torch.randn(2 * f, d) for _ in range(k)], [torch.randn(d, f) for _ in range(k)]
    expected = sum(weights[i] * _expected(x, gate_ups[i][:f], gate_ups[i][f:], downs[i]) for i in range(k))
    torch.testing.assert_close(token_moe(x, gate_ups, downs, weights, TokenWorkspace(k, f, d)).double(), expected, rtol=1e-4, atol=1e-3)


def test_no_rows() -> None:
    assert expert_ffn(torch.zeros(0, 4), torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(0)).shape == (0, 4)


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="expert_ffn"):
        expert_ffn(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="token_moe"):
        token_moe(torch.zeros(2, 4), [torch.zeros(6, 4)], [torch.zeros(4, 3)], torch.zeros(1), TokenWorkspace(1, 3, 4))
    with pytest.raises(ValueError, match="token_moe"):
        token_moe(torch.zeros(1, 4), [torch.zeros(6, 4)], [], torch.zeros(1), TokenWorkspace(1, 3, 4))
    with pytest.raises(ValueError, match="token_moe"):
        token_moe(torch.zeros(1, 4), [torch.zeros(6, 4)], [torch.zeros(4, 3)], torch.zeros(1), TokenWorkspace(2, 3, 4))
