"""A few rows times a matrix: the Triton kernel against float64, in the interpreter where there is no GPU; and what the op refuses."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.row_linear import MAX_ROWS, kernel, row_linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 5, 16), (1, 64, 1500), (3, 33, 48), (MAX_ROWS, 7, 2048)])
def test_against_float64(rows: int, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight, added = (torch.randn(*size).to(dtype) for size in ((rows, k), (n, k), (n,)))
    expected = x.double() @ weight.double().t() + (added.double() if bias else 0.0)
    out = poisoned(rows, n, dtype=dtype)
    kernel.row_linear(x.to(DEVICE), weight.to(DEVICE), added.to(DEVICE) if bias else None, out)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [0, 1, MAX_ROWS, MAX_ROWS + 1, 30])
def test_any_number_of_rows_is_a_linear_layer(rows: int) -> None:
    x, weight, bias = (torch.randn(*size, device=DEVICE) for size in ((rows, 40), (9, 40), (9,)))
    torch.testing.assert_close(row_linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_views_are_taken_as_they_look() -> None:
    x, weight = torch.randn(2, 80, device=DEVICE)[:, 20:60], torch.randn(40, 9, device=DEVICE).t()
    torch.testing.assert_close(row_linear(x, weight), x @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="elsewhere torch's own refusals apply")
@pytest.mark.gpu
def test_what_does_not_go_together() -> None:
    x, weight = torch.randn(1, 40, device=DEVICE), torch.randn(9, 40, device=DEVICE)
    with pytest.raises(ValueError, match="shapes"):
        row_linear(x, weight[:, :39])
    with pytest.raises(ValueError, match="shapes"):
        row_linear(x, weight, weight[:8, 0])
    with pytest.raises(ValueError, match="one dtype"):
        row_linear(x, weight.half())
