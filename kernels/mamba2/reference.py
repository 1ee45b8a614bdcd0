"""Plain torch state space: one step, and chunks of steps as matrix products.

In a chunk with s_i = Σ_{j<=i} dt_j A and L_ij = exp(s_i - s_j) for i >= j (state space duality, arXiv 2405.21060 §6):

    y = ( (c bᵀ) ⊙ L ⊙ dt_j ) x + e^s (c Sᵀ) + D x
    S <- e^{s_last} S + Σ_j e^{s_last - s_j} dt_j x_j b_jᵀ
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64


def time_steps(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """See `rimuru_kernels.mamba2.time_steps`; arguments are taken as checked."""
    return torch.nn.functional.softplus(dt.to(dt_bias.dtype) + dt_bias).clamp_(*limits)


def state_space(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    states: Sequence[Tensor],
    cu_seqlens: Sequence[int],
) -> Tensor:
    """See `rimuru_kernels.mamba2.state_space`; arguments are taken as checked."""
    wide = dt.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, b, c = x.to(wide), b.to(wide), c.to(wide)
    skip = x * d.view(-1, 1)
    log_decay = dt * -a_log.exp()
    # Heads first: [H, T, ...] and [G, T, ...], so that every product is batched over heads.
    x, b, c, dt, log_decay = x.transpose(0, 1), b.transpose(0, 1), c.transpose(0, 1), dt.t(), log_decay.t()
    scaled = x * dt.unsqueeze(2)
    for state, (start, stop) in zip(states, pairwise(cu_seqlens), strict=True):
        if stop - start == 1:
            out[start] = skip[start] + _step(scaled[:, start], log_decay[:, start], b[:, start], c[:, start], state)
            continue
        for first in range(start, stop, CHUNK):
            rows = slice(first, min(first + CHUNK, stop))
            y = _chunk(scaled[:, rows], log_decay[:, rows], b[:, rows], c[:, rows], state)
            out[rows] = skip[rows] + y.transpose(0, 1)
    return out


def _step(scaled: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One row: dt x [H, P], log decay [H], b, c [G, N], state [H, P, N] in place -> [H, P]."""
    ratio = len(scaled) // len(b)
    state.mul_(log_decay.exp().view(-1, 1, 1))
    state.addcmul_(scaled.unsqueeze(2), _per_head(b, ratio).unsqueeze(1))
    return torch.bmm(state, _per_head(c, ratio).unsqueeze(2)).squeeze(2)


def _chunk(scaled: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Up to CHUNK rows: dt x [H, l, P], log decay [H, l], b, c [G, l, N], state in place -> [H, l, P]."""
    length, ratio = scaled.shape[1], len(scaled) // len(b)
    total = log_decay.cumsum(1)
    # Above the diagonal the differences are positive and might overflow.
    above = torch.ones(length, length, dtype=torch.bool, device=scaled.device).triu_(1)
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill_(above, float("-inf")).exp_()
    scores = _per_head(torch.bmm(c, b.transpose(1, 2)), ratio)
    out = torch.bmm(_per_head(c, ratio), state.transpose(1, 2)).mul_(total.exp().unsqueeze(2))
    out.baddbmm_(decay.mul_(scores), scaled)
    last = total[:, -1:]
    state.mul_(last.exp().unsqueeze(2))
    state.baddbmm_((scaled * (last - total).exp().unsqueeze(2)).transpose(1, 2), _per_head(b, ratio))
    return out


def _per_head(grouped: Tensor, ratio: int) -> Tensor:
    return grouped if ratio == 1 else grouped.repeat_interleave(ratio, 0)
