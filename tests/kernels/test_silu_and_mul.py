"""The gated activation against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from rimuru_kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 96), (7, 10), (3, 2, 34), (0, 8)])
def test_formula(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape) * 4
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(silu_and_mul(x.clone()).double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-6, rtol=1e-5)


def test_extremes_do_not_overflow() -> None:
    assert silu_and_mul(torch.tensor([-1000.0, 1000.0, 0.0, 1.0, 2.0, 3.0])).tolist() == [0.0, 2000.0, 0.0]


def test_only_the_gate_half_is_overwritten() -> None:
    x = torch.randn(3, 12)
    up = x[:, 6:].clone()
    silu_and_mul(x)
    assert torch.equal(x[:, 6:], up)


@pytest.mark.parametrize("x", [torch.ones(2, 3), torch.tensor(1.0), torch.ones(2, 4).int()])
def test_misuse_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="silu_and_mul"):
        silu_and_mul(x)
