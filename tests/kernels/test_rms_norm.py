"""RMSNorm against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from rimuru_kernels.rms_norm import add_rms_norm, rms_norm


def by_hand(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.5])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (1, 576), (3, 64), (5, 2, 33), (129,), (0, 8)])
def test_formula(shape: tuple[int, ...], eps: float) -> None:
    x, weight = torch.randn(*shape) * 3, torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), by_hand(x, weight, eps), atol=1e-6, rtol=2e-6)
    exact = rms_norm(x.double(), weight.double(), eps)
    torch.testing.assert_close(exact, by_hand(x, weight, eps), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-4, 1e4, 1e15])
def test_tiny_and_huge_rows(scale: float) -> None:
    x, weight = torch.randn(4, 48) * scale, torch.rand(48)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), by_hand(x, weight, 1e-6), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 40).to(dtype), torch.randn(40).to(dtype)
    expected = by_hand(x, torch.ones(40), 1e-5).to(dtype) * weight
    assert rms_norm(x, weight, 1e-5).dtype == dtype
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, atol=0, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_weight_scales_before_rounding(dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 40).to(dtype), 1.0 + 0.1 * torch.randn(40)
    expected = by_hand(x, weight, 1e-6).to(dtype)
    out, (hidden, added) = rms_norm(x, weight, 1e-6), add_rms_norm(torch.zeros_like(x), x.clone(), weight, 1e-6)
    assert out.dtype is added.dtype is dtype
    assert torch.equal(hidden, x) and torch.equal(out, added)
    assert (out != expected).float().mean() < 0.01, "rounded once"
    assert (rms_norm(x, weight.to(dtype), 1e-6) != expected).float().mean() > 0.1, "the other order rounds twice"


def test_views_are_read_and_nothing_is_overwritten() -> None:
    base, weight = torch.randn(5, 3, 20), torch.randn(10)
    kept = base.clone()
    x = base[:, 1, 4:14]
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), by_hand(x, weight, 1e-5), atol=1e-6, rtol=2e-6)
    rms_norm(x, weight, 1e-5).zero_()
    assert torch.equal(base, kept)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = torch.randn(64, 576), torch.randn(576)
    assert torch.equal(torch.cat([rms_norm(row[None], weight, 1e-5) for row in x]), rms_norm(x, weight, 1e-5))


def test_works_in_and_out_of_inference_mode() -> None:
    x, weight = torch.randn(2, 12), torch.randn(12)
    with torch.inference_mode():
        first = rms_norm(x, weight, 0.0625)
    assert torch.equal(rms_norm(x, weight, 0.0625), first)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 4), torch.ones(3)),
        (torch.ones(2, 4), torch.ones(1, 4)),
        (torch.tensor(1.0), torch.ones(1)),
        (torch.ones(2, 4), torch.ones(4).double()),
        (torch.ones(2, 4), torch.ones(4).half()),
        (torch.ones(2, 4).double(), torch.ones(4)),
        (torch.ones(2, 4).int(), torch.ones(4).int()),
        (torch.ones(2, 4), torch.ones(4, device="meta")),
    ],
)
def test_mismatches_are_refused(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(x, weight, 1e-5)
