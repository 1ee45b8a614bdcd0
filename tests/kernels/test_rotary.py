"""Rotary embeddings against complex rotation in float64."""

from __future__ import annotations

import pytest
import torch

from rimuru_kernels.rotary import rotary, rotary_tables


def inv_freq(head_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def by_hand(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = (positions.float()[:, None, None] * frequencies).double()  # the angles themselves are float32 by contract
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 2), (1, 12, 64), (5, 3, 6), (7, 1, 128), (0, 2, 8)])
@pytest.mark.parametrize("first", [0, 1, 4095, 1_000_000])
def test_formula(tokens: int, heads: int, head_dim: int, first: int) -> None:
    x = torch.randn(tokens, heads + 1, head_dim)[:, 1:]  # a view, as q and k are
    kept = x.clone()
    positions = torch.arange(first, first + tokens).flip(0)
    cos, sin = rotary_tables(positions, inv_freq(head_dim), torch.float32)
    assert cos.shape == sin.shape == (tokens, 1, head_dim)
    out = rotary(x, cos, sin)
    torch.testing.assert_close(out.double(), by_hand(x, positions, inv_freq(head_dim)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, kept)


def test_partial_rotation_leaves_the_other_dimensions() -> None:
    x = torch.randn(5, 3, 20)[..., 2:]
    cos, sin = rotary_tables(torch.arange(7, 12), inv_freq(6), torch.float32)
    out = rotary(x, cos, sin)
    torch.testing.assert_close(out[..., :6].double(), by_hand(x[..., :6], torch.arange(7, 12), inv_freq(6)), atol=1e-5, rtol=1e-5)
    assert torch.equal(out[..., 6:], x[..., 6:]) and not torch.allclose(out[..., :6], x[..., :6])


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(2, 3, 16)
    assert torch.equal(rotary(x, *rotary_tables(torch.zeros(2, dtype=torch.int64), inv_freq(16), torch.float32)), x)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)
    frequencies = inv_freq(32)

    def score(i: int, j: int) -> float:
        a, b = (rotary(x, *rotary_tables(torch.tensor([p]), frequencies, torch.float64)) for x, p in ((q, i), (k, j)))
        return float((a * b).sum())

    assert score(12, 5) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(12, 5) != pytest.approx(score(12, 6), abs=1e-3)


def test_mismatches_are_refused() -> None:
    cos, sin = rotary_tables(torch.arange(3), inv_freq(8), torch.float32)
    for x in (torch.ones(3, 8), torch.ones(2, 1, 8), torch.ones(3, 1, 6), torch.ones(3, 1, 8).double()):
        with pytest.raises(ValueError, match="rotary"):
            rotary(x, cos, sin)
    with pytest.raises(ValueError, match="rotary"):
        rotary(torch.ones(3, 1, 8), cos, sin[:2])
    with pytest.raises(ValueError, match="rotary"):
        rotary(torch.ones(1, 1, 3), torch.ones(1, 1, 3), torch.ones(1, 1, 3))
    for positions, frequencies in [
        (torch.ones(3), inv_freq(8)),
        (torch.arange(4).view(2, 2), inv_freq(8)),
        (torch.arange(3), inv_freq(8).double()),
    ]:
        with pytest.raises(ValueError, match="rotary_tables"):
            rotary_tables(positions, frequencies, torch.float32)
