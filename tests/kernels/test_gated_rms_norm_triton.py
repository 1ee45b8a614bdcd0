"""The kernel of the gated norm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.gated_rms_norm import gated_rms_norm, kernel

SHAPES = [(1, 4, 12), (3, 32, 128), (5, 2, 300), (70, 8, 64), *([(4096, 32, 128), (65, 1, 8192)] if ON_GPU else [])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm, then gate", "gate, then norm"])
@pytest.mark.parametrize("own_weights", [False, True], ids=["one weight", "a weight a group"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula(shape: tuple[int, int, int], own_weights: bool, norm_first: bool, dtype: torch.dtype) -> None:
    tokens, groups, n = shape
    x = (2.0 * torch.randn(tokens, groups, n)).to(DEVICE, dtype)
    # the gate is a part of a wider matrix
    gate = torch.randn(tokens, groups * n + 24).to(DEVICE, dtype)[:, 8 : 8 + groups * n].view(tokens, groups, n)
    weight = (torch.rand(groups if own_weights else 1, n) + 0.5).to(DEVICE, dtype)
    wide, opening = x.double(), torch.nn.functional.silu(gate.double())
    value = wide if norm_first else wide * opening
    expected = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    expected = expected * opening if norm_first else expected
    out = poisoned(*shape, dtype=dtype)
    kernel.gated_rms_norm(x, gate, weight, 1e-5, out, norm_first)
    assert relative_error(out, expected) < 2 * TOLERANCE[dtype]
    assert relative_error(gated_rms_norm(x, gate, weight[0] if not own_weights else weight, 1e-5, norm_before_gate=norm_first), out) < (
        2 * TOLERANCE[dtype]
    ), "the op and its kernel agree"


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_rows_of_other_ranks_take_the_kernel_too() -> None:
    for shape in ((7, 96), (2, 3, 4, 40), (33,)):
        x, gate = torch.randn(2, *shape, device=DEVICE)
        weight = torch.rand(shape[-1], device=DEVICE)
        expected = gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-6, norm_before_gate=True)
        torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6, norm_before_gate=True).cpu(), expected, rtol=1e-5, atol=1e-6)
