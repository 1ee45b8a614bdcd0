"""The state space against its recurrence in float64, row by row and head by head, however a text is cut."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rimuru_kernels.mamba2 import state_space, time_steps


class Inputs(NamedTuple):
    """Per-row tensors first; a_log and d belong to the model."""

    x: Tensor
    dt: Tensor
    a_log: Tensor
    b: Tensor
    c: Tensor
    d: Tensor

    def rows(self, start: int, stop: int) -> Inputs:
        part = slice(start, stop)
        return Inputs(self.x[part], self.dt[part], self.a_log, self.b[part], self.c[part], self.d)


def inputs(tokens: int, *, heads: int = 4, groups: int = 2, width: int = 6, state: int = 5, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, width, generator=generator)
    b, c = (torch.randn(tokens, groups, state, generator=generator) for _ in range(2))
    dt = torch.rand(tokens, heads, generator=generator)
    return Inputs(x, dt, torch.rand(heads, generator=generator) - 1.0, b, c, torch.randn(heads, generator=generator))


def start_state(heads: int = 4, width: int = 6, state: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(heads, width, state, generator=torch.Generator().manual_seed(seed))


def by_hand(i: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state, in float64."""
    tokens, heads, width = i.x.shape
    ratio = heads // i.b.shape[1]
    out, end = torch.empty(tokens, heads, width, dtype=torch.float64), state.double().clone()
    for head in range(heads):
        for t in range(tokens):
            dt, x = float(i.dt[t, head]), i.x[t, head].double()
            b, c = i.b[t, head // ratio].double(), i.c[t, head // ratio].double()
            end[head] = end[head] * math.exp(-dt * math.exp(float(i.a_log[head]))) + dt * torch.outer(x, b)
            out[t, head] = end[head] @ c + float(i.d[head]) * x
    return out, end


def run(i: Inputs, state: Tensor, cuts: tuple[int, ...]) -> Tensor:
    return torch.cat([state_space(*i.rows(a, b), [state], [0, b - a]) for a, b in pairwise(cuts)])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(0, 1), (0, 63), (0, 64), (0, 65), (0, 1, 64, 128, 193), (0, 63, 127, 128, 193), (0, 65, 66, 193)])
def test_every_cut_gives_the_recurrence(cuts: tuple[int, ...], groups: int) -> None:
    i, state = inputs(cuts[-1], groups=groups), start_state()
    expected, end = by_hand(i, state)
    assert expected.std() > 0.1
    torch.testing.assert_close(run(i, state, cuts).double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(state.double(), end, atol=2e-5, rtol=1e-5)


def test_float64_is_computed_in_float64() -> None:
    i, state = Inputs(*(t.double() for t in inputs(130))), start_state().double()
    expected, end = by_hand(i, state)
    torch.testing.assert_close(run(i, state, (0, 1, 129, 130)), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, end, atol=1e-12, rtol=1e-12)


def test_sequences_of_one_call_do_not_see_each_other() -> None:
    i = inputs(140)
    cu_seqlens = [0, 1, 1, 66, 67, 140]
    states = [start_state(seed=seed) for seed in range(5)]
    resting = states[1].clone()
    expected = [by_hand(i.rows(a, b), state) for state, (a, b) in zip(states, pairwise(cu_seqlens), strict=True)]
    out = state_space(*i, states, cu_seqlens)
    torch.testing.assert_close(out.double(), torch.cat([o for o, _ in expected]), atol=2e-5, rtol=1e-5)
    for state, (_, end) in zip(states, expected, strict=True):
        torch.testing.assert_close(state.double(), end, atol=2e-5, rtol=1e-5)
    assert torch.equal(states[1], resting)


def test_no_step_and_huge_steps() -> None:
    """dt = 0 leaves the state alone; 64 steps of -1000 each must neither overflow nor turn to NaN."""
    for dt in (0.0, 1000.0):
        i = inputs(100)._replace(dt=torch.full((100, 4), dt), a_log=torch.zeros(4))
        state = start_state()
        expected, end = by_hand(i, state)
        torch.testing.assert_close(run(i, state, (0, 99, 100)).double(), expected, atol=1e-2 if dt else 1e-5, rtol=1e-5)
        torch.testing.assert_close(state.double(), end, atol=1e-2 if dt else 1e-5, rtol=1e-5)


def test_half_precision_rows_with_a_float32_state() -> None:
    i = inputs(70)
    half = i._replace(x=i.x.bfloat16(), b=i.b.bfloat16(), c=i.c.bfloat16())
    state = start_state()
    expected, end = by_hand(half, state)
    out = run(half, state, (0, 66, 67, 70))
    assert out.dtype is torch.bfloat16 and state.dtype is torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=2**-7)  # rounded once, at the end
    torch.testing.assert_close(state.double(), end, atol=2e-5, rtol=1e-5)


def test_steps_are_softplus_within_limits() -> None:
    dt, bias = 3 * torch.randn(6, 4), torch.randn(4)
    dt[0] = 60.0  # where softplus is the identity
    exact = torch.log1p(torch.exp(dt.double() + bias.double()))
    torch.testing.assert_close(time_steps(dt, bias, (0.0, math.inf)).double(), exact, atol=1e-5, rtol=1e-5)
    limited = time_steps(dt, bias, (0.4, 2.0))
    torch.testing.assert_close(limited.double(), exact.clamp(0.4, 2.0), atol=1e-5, rtol=1e-5)
    assert limited.min() == pytest.approx(0.4) and limited.max() == 2.0
    assert time_steps(dt.bfloat16(), bias, (0.0, 1.0)).dtype is torch.float32


def test_mismatches_are_refused() -> None:
    i, state = inputs(4), start_state()
    calls = [(*i, [bad], [0, 4]) for bad in (state[:3], state.double(), torch.zeros(4, 5, 6).transpose(1, 2), state.transpose(1, 2))]
    calls += [(*i, [state], [0, 3]), (*i, [], [0]), (*i, [state, state], [0, 4])]
    calls += [(*i._replace(b=i.b[:, :1]), [state], [0, 4]), (*i._replace(x=i.x[:, :3]), [state], [0, 4])]
    calls += [(*i._replace(d=i.d[:3]), [state], [0, 4]), (*i._replace(dt=i.dt[:3]), [state], [0, 4])]
    calls += [(*i._replace(a_log=i.a_log.double()), [state], [0, 4]), (*i._replace(c=i.c.bfloat16()), [state], [0, 4])]
    for call in calls:
        with pytest.raises(ValueError, match="state_space"):
            state_space(*call)  # type: ignore[arg-type]
    good = torch.ones(3, 2), torch.ones(2)
    for wrong in [(good[0][0], good[1], (0.0, 1.0)), (good[0], good[1].bfloat16(), (0.0, 1.0)), (*good, (2.0, 1.0)), (*good, (-1.0, 1.0))]:
        with pytest.raises(ValueError, match="time_steps"):
            time_steps(*wrong)
