"""The kernels around a shared expert against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.shared_gate import add_shared
from rimuru_kernels.shared_gate import kernel as gate_kernel
from rimuru_kernels.silu_and_mul import kernel as silu_kernel
from rimuru_kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 512), (3, 40), (5, 1500)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * width + 8).to(DEVICE, dtype)[:, : 2 * width]  # rows of a wider matrix
    gate, up = x.double().chunk(2, 1)
    out = poisoned(rows, width, dtype=dtype)
    silu_kernel.silu_and_mul(x, out)
    assert relative_error(out, gate / (1.0 + (-gate).exp()) * up) < 2 * TOLERANCE[dtype]
    assert relative_error(silu_and_mul(x.clone()), out) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 2048), (5, 300)])
def test_add_shared(rows: int, width: int, dtype: torch.dtype) -> None:
    x, shared, routed = (torch.randn(rows, width).to(DEVICE, dtype) for _ in range(3))
    gate = (torch.randn(1, width) * width**-0.5).to(DEVICE, dtype)
    expected = routed.double() + torch.sigmoid(x.double() @ gate.double().t()) * shared.double()
    out = poisoned(rows, width, dtype=dtype)
    gate_kernel.add_shared(x, gate, shared, routed, out)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(add_shared(x, gate, shared.clone(), routed.clone()), expected) < 4 * TOLERANCE[dtype]


def test_what_does_not_go_together() -> None:
    x = torch.zeros(2, 8)
    for call in [
        (x, torch.zeros(8), x, x),
        (x, torch.zeros(1, 4), x, x),
        (x, torch.zeros(1, 8), x[:1], x),
        (x, torch.zeros(1, 8), x, x.half()),
    ]:
        with pytest.raises(ValueError, match="add_shared"):
            add_shared(*call)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_the_activation_is_contiguous_and_of_any_rank() -> None:
    for shape in ((7, 96), (2, 3, 40), (64,)):
        x = torch.randn(*shape, device=DEVICE)
        expected = silu_and_mul(x.cpu().clone())
        out = silu_and_mul(x)
        assert out.is_contiguous()
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
