"""The gated delta rule against its recurrence in float64, row by row and head by head, however a text is cut."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rimuru_kernels.gated_delta_rule import delta_gates, gated_delta_rule


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


def inputs(tokens: int, *, key_heads: int = 2, value_heads: int = 4, dk: int = 8, dv: int = 6, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    q, k = (3 * torch.randn(tokens, key_heads, dk, generator=generator) for _ in range(2))
    v = torch.randn(tokens, value_heads, dv, generator=generator)
    decay = -2 * torch.rand(tokens, value_heads, generator=generator) ** 4
    return Inputs(q, k, v, decay, torch.rand(tokens, value_heads, generator=generator))


def start_state(heads: int, dk: int, dv: int, seed: int = 1) -> Tensor:
    return torch.randn(heads, dk, dv, generator=torch.Generator().manual_seed(seed))


def by_hand(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state, in float64."""
    tokens, value_heads, dv = x.v.shape
    dk, ratio = x.q.shape[2], value_heads // x.q.shape[1]
    out, end = torch.empty(tokens, value_heads, dv, dtype=torch.float64), state.double().clone()
    for head in range(value_heads):
        s = end[head]
        for t in range(tokens):
            q, k = x.q[t, head // ratio].double(), x.k[t, head // ratio].double()
            q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(dk)
            k = k / math.sqrt(float(k @ k) + 1e-6)
            s *= math.exp(float(x.log_decay[t, head]))
            u = float(x.beta[t, head]) * (x.v[t, head].double() - s.T @ k)
            s += torch.outer(k, u)
            out[t, head] = s.T @ q
    return out, end


def run(x: Inputs, state: Tensor, cuts: tuple[int, ...]) -> Tensor:
    parts = [gated_delta_rule(*(t[a:b] for t in x), [state], [0, b - a]) for a, b in pairwise(cuts)]
    return torch.cat(parts)


@pytest.mark.parametrize("dims", [(8, 6), (5, 16), (16, 16)])
@pytest.mark.parametrize("cuts", [(0, 1), (0, 63), (0, 64), (0, 65), (0, 1, 64, 128, 193), (0, 63, 127, 128, 193), (0, 65, 66, 193)])
def test_every_cut_gives_the_recurrence(cuts: tuple[int, ...], dims: tuple[int, int]) -> None:
    x, state = inputs(cuts[-1], dk=dims[0], dv=dims[1]), start_state(4, *dims)
    expected, end = by_hand(x, state)
    assert expected.std() > 0.05
    out = run(x, state, cuts)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(state.double(), end, atol=2e-5, rtol=1e-5)


def test_float64_is_computed_in_float64() -> None:
    x = Inputs(*(t.double() for t in inputs(130)))
    state = start_state(4, 8, 6).double()
    expected, end = by_hand(x, state)
    torch.testing.assert_close(run(x, state, (0, 1, 129, 130)), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, end, atol=1e-12, rtol=1e-12)


def test_sequences_of_one_call_do_not_see_each_other() -> None:
    x = inputs(140)
    cu_seqlens = [0, 1, 1, 66, 67, 140]
    states = [start_state(4, 8, 6, seed) for seed in range(5)]
    expected = [by_hand(Inputs(*(t[a:b] for t in x)), state) for state, (a, b) in zip(states, pairwise(cu_seqlens), strict=True)]
    resting = states[1].clone()
    out = gated_delta_rule(*x, states, cu_seqlens)
    torch.testing.assert_close(out.double(), torch.cat([o for o, _ in expected]), atol=2e-5, rtol=1e-5)
    for state, (_, end) in zip(states, expected, strict=True):
        torch.testing.assert_close(state.double(), end, atol=2e-5, rtol=1e-5)
    assert torch.equal(states[1], resting)


def test_nothing_forgotten_and_everything_forgotten() -> None:
    """The ends of the decay: sums of 64 differences of ±1000 must neither overflow nor turn to NaN."""
    for decay in (0.0, -1000.0):
        x = inputs(100)._replace(log_decay=torch.full((100, 4), decay))
        state = start_state(4, 8, 6)
        expected, end = by_hand(x, state)
        torch.testing.assert_close(run(x, state, (0, 99, 100)).double(), expected, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(state.double(), end, atol=5e-5, rtol=1e-5)


def test_a_zero_key_reads_and_writes_nothing() -> None:
    x = inputs(3)
    x.k[1] = 0
    state = start_state(4, 8, 6)
    _, end = by_hand(x, state)
    run(x, state, (0, 3))
    torch.testing.assert_close(state.double(), end, atol=1e-5, rtol=1e-5)


def test_half_precision_rows_with_a_float32_state() -> None:
    x = inputs(70)
    half = x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16())
    state = start_state(4, 8, 6)
    expected, end = by_hand(half, state)
    out = run(half, state, (0, 66, 67, 70))
    assert out.dtype is torch.bfloat16 and state.dtype is torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=2**-7)  # rounded once, at the end
    torch.testing.assert_close(state.double(), end, atol=2e-5, rtol=1e-5)


def test_gates() -> None:
    a, b = 3 * torch.randn(2, 5, 4)
    a[0, 0] = 60.0  # where softplus is the identity
    a_log, dt_bias = torch.rand(4) * 3, torch.randn(4)
    log_decay, beta = delta_gates(a, b, a_log, dt_bias)
    expected = -a_log.double().exp() * torch.log1p(torch.exp(a.double() + dt_bias.double()))
    torch.testing.assert_close(log_decay.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(beta.double(), 1 / (1 + torch.exp(-b.double())), atol=1e-6, rtol=1e-6)
    half, rounded = delta_gates(a.bfloat16(), b.bfloat16(), a_log, dt_bias)
    assert half.dtype is rounded.dtype is torch.float32
    assert torch.equal(rounded.bfloat16().float(), rounded), "β is rounded to the model's dtype, the decay is not"
    assert not torch.equal(half.bfloat16().float(), half)


def test_mismatches_are_refused() -> None:
    x, state = inputs(4), start_state(4, 8, 6)
    bad_states = [state[:3], state.double(), state.transpose(1, 2), torch.zeros(4, 6, 8).transpose(1, 2)]
    calls = [(*x, [bad], [0, 4]) for bad in bad_states]
    calls += [(*x, [state], [0, 3]), (*x, [], [0]), (*x, [state, state], [0, 4])]
    calls += [(*x._replace(k=x.k[:, :1]), [state], [0, 4]), (*x._replace(v=x.v[:, :3]), [state], [0, 4])]
    calls += [(*x._replace(beta=x.beta[:, :3]), [state], [0, 4]), (*x._replace(log_decay=x.log_decay[:3]), [state], [0, 4])]
    calls += [(*x._replace(beta=x.beta.double()), [state], [0, 4]), (*x._replace(v=x.v.bfloat16()), [state], [0, 4])]
    for call in calls:
        with pytest.raises(ValueError, match="gated_delta_rule"):
            gated_delta_rule(*call)  # type: ignore[arg-type]
    a, gates = torch.ones(3, 2), torch.ones(2)
    for wrong in [(a, a[:2], gates, gates), (a, a, gates[:1], gates), (a, a, gates.bfloat16(), gates), (a, a.double(), gates, gates)]:
        with pytest.raises(ValueError, match="delta_gates"):
            delta_gates(*wrong)
