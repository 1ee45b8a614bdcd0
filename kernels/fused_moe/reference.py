"""Mixture-of-experts feed-forward in plain torch; weights stay wherever the caller's views point.

Letters: T tokens, k experts per token, d hidden size, f expert intermediate size. An expert computes

    y = W_down ( silu(W_gate x) * (W_up x) )        W_gate, W_up [f, d]; W_down [d, f]

and a token's result is the sum of weight * y over its k experts. Everything is float32 arithmetic on float32 activations.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One expert over some tokens: x [R, d], gate and up [f, d], down [d, f], weights [R] -> [R, d]."""
    hidden = torch.nn.functional.silu(x @ gate.t())
    hidden *= x @ up.t()
    out = hidden @ down.t()
    out *= weights.unsqueeze(1)
    return out


def gathered_moe(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One token over its gathered experts.

    Args:
        x: [1, d].
        gate_up: [2, k, f, d], gates of the k experts, then their ups.
        down: [k, d, f].
        weights: [k].

    Returns:
        [1, d]; contributions are summed in the order of the k experts.
    """
    _, k, f, d = gate_up.shape
    projected = torch.mv(gate_up.view(2 * k * f, d), x.view(d)).view(2, k, f)
    hidden = torch.nn.functional.silu(projected[0])
    hidden *= projected[1]
    hidden *= weights.unsqueeze(1)
    return torch.bmm(down, hidden.unsqueeze(2)).view(k, d).sum(0, keepdim=True)
