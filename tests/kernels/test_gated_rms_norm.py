"""The gated norm against its formula in float64, in both orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rimuru_kernels.gated_rms_norm import gated_rms_norm


def by_hand(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_before_gate: bool) -> Tensor:
    x, gate, weight = x.double(), gate.double(), weight.double()
    opening = gate / (1 + torch.exp(-gate))
    value = x if norm_before_gate else x * opening
    normed = weight * value / torch.sqrt((value * value).mean(-1, keepdim=True) + eps)
    return normed * opening if norm_before_gate else normed


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4, 16), (70, 2, 9), (0, 8)])
def test_formula(shape: tuple[int, ...], norm_before_gate: bool) -> None:
    x, gate, weight = 3 * torch.randn(*shape), 2 * torch.randn(*shape), torch.randn(shape[-1])
    out = gated_rms_norm(x, gate, weight, 1e-5, norm_before_gate=norm_before_gate)
    torch.testing.assert_close(out.double(), by_hand(x, gate, weight, 1e-5, norm_before_gate), atol=1e-5, rtol=1e-5)
    other = by_hand(x, gate, weight, 1e-5, not norm_before_gate)
    assert not out.numel() or shape[-1] == 1 or not torch.allclose(out.double(), other, atol=1e-2), "the order matters"


def test_groups_have_weights_and_means_of_their_own() -> None:
    x, gate, weight = torch.randn(5, 3, 8), torch.randn(5, 3, 8), torch.randn(3, 8)
    out = gated_rms_norm(x, gate, weight, 1e-5, norm_before_gate=False)
    for group in range(3):
        alone = gated_rms_norm(x[:, group], gate[:, group], weight[group], 1e-5, norm_before_gate=False)
        torch.testing.assert_close(out[:, group], alone)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_half_precision_is_computed_in_float32(norm_before_gate: bool) -> None:
    x, gate, weight = (torch.randn(*shape).bfloat16() for shape in ((6, 40), (6, 40), (40,)))
    out = gated_rms_norm(x, gate, weight, 1e-6, norm_before_gate=norm_before_gate)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), by_hand(x, gate, weight, 1e-6, norm_before_gate), atol=1e-3, rtol=2**-6)


def test_mismatches_are_refused() -> None:
    x = torch.ones(2, 3, 4)
    for gate, weight in [(x[:1], torch.ones(4)), (x, torch.ones(3)), (x.double(), torch.ones(4)), (x, torch.ones(4).double())]:
        with pytest.raises(ValueError, match="gated_rms_norm"):
            gated_rms_norm(x, gate, weight, 1e-5, norm_before_gate=True)
