"""The causal convolution against its sum in float64, however a text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rimuru_kernels.causal_conv1d import causal_conv1d


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    """silu of the sum for every row, one multiplication at a time."""
    kernel = len(weight)
    rows = torch.cat((before.double(), x.double()))
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=torch.float64) if bias is None else bias.double().clone()
        for i in range(kernel):
            total += weight[i].double() * rows[t + i]
        out[t] = total / (1 + torch.exp(-total))
    return out


def inputs(tokens: int, channels: int, kernel: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, channels), (kernel, channels), (channels,), (kernel - 1, channels))
    x, weight, bias, before = (torch.randn(*shape, generator=generator) for shape in shapes)
    return x, weight, bias, before


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cuts", [(0, 1), (0, 2), (0, 63, 64, 65, 70), (0, 65), (0, *range(1, 12))])
def test_every_cut_gives_the_sum_and_the_last_rows(kernel: int, biased: bool, cuts: tuple[int, ...]) -> None:
    x, weight, bias, before = inputs(cuts[-1], 10, kernel)
    state = before.clone()
    parts = [causal_conv1d(x[a:b], weight, bias if biased else None, [state], [0, b - a]) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts).double(), by_hand(x, weight, bias if biased else None, before), atol=1e-5, rtol=1e-5)
    assert torch.equal(state, torch.cat((before, x))[-(kernel - 1) :])


def test_sequences_do_not_see_each_other_and_resting_ones_keep_their_state() -> None:
    x, weight, bias, _ = inputs(9, 6, 4)
    pool = torch.randn(4, 5, 6)  # states are views with rows further apart than C elements
    states = [pool[:3, i] for i in range(4)]
    before = [state.clone() for state in states]
    cu_seqlens = [0, 1, 1, 7, 9]
    out = causal_conv1d(x, weight, bias, states, cu_seqlens)
    for i, (start, stop) in enumerate(pairwise(cu_seqlens)):
        torch.testing.assert_close(out[start:stop].double(), by_hand(x[start:stop], weight, bias, before[i]), atol=1e-5, rtol=1e-5)
        assert torch.equal(states[i], torch.cat((before[i], x[start:stop]))[-3:])
    assert torch.equal(states[1], before[1])


def test_strided_rows_and_half_precision() -> None:
    base = torch.randn(7, 3, 8).bfloat16()
    x, weight, bias = base[:, 1], torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    state = torch.randn(3, 8).bfloat16()
    expected = by_hand(x, weight, bias, state)
    out = causal_conv1d(x, weight, bias, [state], [0, 7])
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=2**-7)  # one rounding, at the end
    assert torch.equal(state, x[-3:])


def test_mismatches_are_refused() -> None:
    x, weight, bias, state = inputs(4, 6, 4)
    for bad in [
        (x, weight, bias, [state], [0, 3]),
        (x, weight, bias, [state], [1, 4]),
        (x, weight, bias, [state, state], [0, 5, 4]),
        (x, weight, bias, [], [0, 4]),
        (x[:, :5], weight, bias, [state], [0, 4]),
        (x, weight[:1], bias, [state[:0]], [0, 4]),
        (x, weight, bias[:5], [state], [0, 4]),
        (x, weight.double(), bias, [state], [0, 4]),
        (x, weight, bias, [state[:2]], [0, 4]),
        (x, weight, bias, [state.int()], [0, 4]),
    ]:
        with pytest.raises(ValueError, match="causal_conv1d"):
            causal_conv1d(*bad)  # type: ignore[arg-type]
