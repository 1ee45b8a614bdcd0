"""Mixture-of-experts feed-forward in plain torch; weights stay wherever the caller's views point.

Letters: T tokens, k experts per token, d hidden size, f expert intermediate size. An expert computes

    y = W_down ( silu(W_gate x) * (W_up x) )        W_gate, W_up [f, d]; W_down [d, f]

and a token's result is the sum of weight * y over its k experts. Everything is float32 arithmetic on float32 activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One expert over some tokens: x [R, d], gate and up [f, d], down [d, f], weights [R] -> [R, d]."""
    hidden = torch.nn.functional.silu(x @ gate.t())
    hidden *= x @ up.t()
    out = hidden @ down.t()
    out *= weights.unsqueeze(1)
    return out


def token_moe(x: Tensor, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Tensor) -> Tensor:
    """One token over its experts, each where it lies.

    Args:
        x: [1, d].
        gate_ups: k matrices [2f, d], an expert's gate rows, then its up rows.
        downs: k matrices [d, f].
        weights: [k].

    Returns:
        [1, d]; contributions are summed in the order of the k experts.
    """
    row, k, f = x.view(-1), len(downs), downs[0].shape[1]
    projected = torch.empty(k, 2 * f)
    for out, matrix in zip(projected.unbind(0), gate_ups, strict=True):
        torch.mv(matrix, row, out=out)
    hidden = torch.nn.functional.silu(projected[:, :f])
    hidden *= projected[:, f:]
    hidden *= weights.unsqueeze(1)
    parts = torch.empty(k, row.shape[0])
    for out, matrix, column in zip(parts.unbind(0), downs, hidden.unbind(0), strict=True):
        torch.mv(matrix, column, out=out)
    return parts.sum(0, keepdim=True)


def paged_moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, pool: Tensor, entries: Tensor, f: int, out: Tensor) -> Tensor:
    """One layer whose expert weights lie in pages of the pool; see the op's `paged_moe` for shapes. Sums in float32, slots ascending."""
    d = x.shape[1]
    t = entries.shape[1] // 3
    typed = pool.view(x.dtype)
    unit = 256 // x.element_size()

    def projection(expert: int, part: int, rows: int, columns: int) -> Tensor:
        tiles = entries[expert, part * t : (part + 1) * t].tolist()
        size = rows * columns // t
        return torch.cat([typed[e * unit : e * unit + size].view(rows // t, columns) for e in tiles]).float()

    y = torch.zeros(*topk_ids.shape, d, device=x.device)
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if expert >= 0:
            token, slot = torch.where(topk_ids == expert)
            gate, up, down = projection(expert, 0, f, d), projection(expert, 1, f, d), projection(expert, 2, d, f)
            y[token, slot] = expert_ffn(x[token].float(), gate, up, down, topk_weights[token, slot])
    return out.copy_(y.sum(1))
