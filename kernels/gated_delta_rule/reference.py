"""Plain torch gated delta rule: one step, and chunks of steps as matrix products.

In a chunk with b_i = Σ_{j<=i} log_decay_j and D_ij = exp(b_i - b_j) for i >= j, the corrections u of all its rows depend on one another
only through keys, so they come out of one triangular system (the WY form, arXiv 2412.06464 §3):

    (I + tril( (β k̂) k̂ᵀ ⊙ D, -1 )) u = β (v - e^b (k̂ S))
    o = e^b (q̂ S) + (q̂ k̂ᵀ ⊙ D) u
    S <- e^{b_last} S + (e^{b_last - b} k̂)ᵀ u
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64
_EPS = 1e-6


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `rimuru_kernels.gated_delta_rule.delta_gates`; arguments are taken as checked."""
    log_decay = torch.nn.functional.softplus(a.to(a_log.dtype) + dt_bias).mul_(a_log.exp()).neg_()
    return log_decay, b.sigmoid().to(a_log.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Sequence[Tensor], cu_seqlens: Sequence[int]
) -> Tensor:
    """See `rimuru_kernels.gated_delta_rule.gated_delta_rule`; arguments are taken as checked."""
    wide = log_decay.dtype
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    q, k = _unit(q.to(wide)) * q.shape[2] ** -0.5, _unit(k.to(wide))
    ratio = v.shape[1] // q.shape[1]
    if ratio > 1:
        q, k = q.repeat_interleave(ratio, 1), k.repeat_interleave(ratio, 1)
    # Heads first: [Hv, T, ...], so that every product is batched over heads.
    q, k, v, log_decay, beta = q.transpose(0, 1), k.transpose(0, 1), v.to(wide).transpose(0, 1), log_decay.t(), beta.t()
    for state, (start, stop) in zip(states, pairwise(cu_seqlens), strict=True):
        if stop - start == 1:
            out[start] = _step(q[:, start], k[:, start], v[:, start], log_decay[:, start], beta[:, start], state)
            continue
        for first in range(start, stop, CHUNK):
            rows = slice(first, min(first + CHUNK, stop))
            out[rows] = _chunk(q[:, rows], k[:, rows], v[:, rows], log_decay[:, rows], beta[:, rows], state).transpose(0, 1)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One row: q, k [Hv, dk], v [Hv, dv], gates [Hv], state [Hv, dk, dv] in place -> [Hv, dv]."""
    state.mul_(log_decay.exp().view(-1, 1, 1))
    u = (v - torch.bmm(k.unsqueeze(1), state).squeeze(1)).mul_(beta.unsqueeze(1))
    state.baddbmm_(k.unsqueeze(2), u.unsqueeze(1))
    return torch.bmm(q.unsqueeze(1), state).squeeze(1)


def _chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Up to CHUNK rows: q, k [Hv, c, dk], v [Hv, c, dv], gates [Hv, c], state in place -> [Hv, c, dv]."""
    length = q.shape[1]
    total = log_decay.cumsum(1)
    # Above the diagonal the differences are positive and might overflow.
    above = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill_(above, float("-inf")).exp_()
    keys = k.transpose(1, 2)
    grown = total.exp().unsqueeze(2)
    system = torch.bmm(k * beta.unsqueeze(2), keys).mul_(decay)  # its diagonal is taken as 1, what is above it as 0
    wanted = (v - torch.bmm(k, state).mul_(grown)).mul_(beta.unsqueeze(2))
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = torch.bmm(q, state).mul_(grown)
    out.baddbmm_(torch.bmm(q, keys).mul_(decay), u)
    last = total[:, -1:]
    state.mul_(last.exp().unsqueeze(2))
    state.baddbmm_((k * (last - total).exp().unsqueeze(2)).transpose(1, 2), u)
    return out
