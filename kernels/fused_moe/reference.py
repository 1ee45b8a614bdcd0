"""Mixture-of-experts feed-forward in plain torch; weights stay wherever the caller's views point.

Letters: T tokens, k experts per token, d hidden size, f expert intermediate size. An expert computes

    y = W_down ( silu(W_gate x) * (W_up x) )        W_gate, W_up [f, d]; W_down [d, f]

and a token's result is the sum of weight * y over its k experts. Everything is float32 arithmetic on float32 activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.packed_weights import PackedFormat, dequantize, page_bytes, tile_rows, unpack


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """One expert over some tokens: x [R, d], gate and up [f, d], down [d, f], weights [R] -> [R, d]."""
    hidden = torch.nn.functional.silu(x @ gate.t())
    hidden *= x @ up.t()
    out = hidden @ down.t()
    out *= weights.unsqueeze(1)
    return out


class TokenWorkspace:
    """Intermediate results of `token_moe`, and views of their rows: making those anew in every layer would cost as much as a product.

    Args:
        k: experts of a token; f: expert intermediate size; d: hidden size.
    """

    def __init__(self, k: int, f: int, d: int) -> None:
        self.projected = torch.empty(k, 2 * f)
        self.hidden = torch.empty(k, f)
        self.parts = torch.empty(k, d)
        self.gate, self.up = self.projected[:, :f], self.projected[:, f:]
        self.projected_rows, self.hidden_rows, self.part_rows = (t.unbind(0) for t in (self.projected, self.hidden, self.parts))


def token_moe(x: Tensor, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Tensor, space: TokenWorkspace) -> Tensor:
    """One token over its experts, each where it lies.

    Args:
        x: [1, d].
        gate_ups: k matrices [2f, d], an expert's gate rows, then its up rows.
        downs: k matrices [d, f].
        weights: [k].
        space: for these sizes.

    Returns:
        [1, d]; contributions are summed in the order of the k experts.
    """
    row, mv = x.view(-1), torch.mv
    for matrix, out in zip(gate_ups, space.projected_rows, strict=True):
        mv(matrix, row, out=out)
    torch.ops.aten.silu.out(space.gate, out=space.hidden)
    space.hidden.mul_(space.up).mul_(weights.unsqueeze(1))
    for matrix, column, out in zip(downs, space.hidden_rows, space.part_rows, strict=True):
        mv(matrix, column, out=out)
    return space.parts.sum(0, keepdim=True)


def paged_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    pool: Tensor,
    entries: Tensor,
    f: int,
    out: Tensor,
    formats: tuple[PackedFormat, PackedFormat] | None = None,
    tiles: tuple[int, int] | None = None,
) -> Tensor:
    """One layer whose expert weights lie in pages of the pool; see the op's `paged_moe` for shapes. Sums in float32, slots ascending."""
    d = x.shape[1]
    wide, tall = (entries.shape[1] // 3,) * 2 if tiles is None else tiles
    ends = (0, wide, 2 * wide, 2 * wide + tall)
    typed = pool.view(x.dtype) if formats is None else pool
    unit = 256 // typed.element_size()

    def projection(expert: int, part: int, rows: int, columns: int) -> Tensor:
        places = entries[expert, ends[part] : ends[part + 1]].tolist()
        if formats is None:
            height = rows // len(places)
            size = height * columns
            return torch.cat([typed[e * unit : e * unit + size].view(height, columns) for e in places]).float()
        fmt = formats[part // 2]
        height = tile_rows(rows, len(places), fmt.group_rows)
        size = page_bytes(fmt, height, columns)
        pages = [unpack(pool[e * unit : e * unit + size], fmt, height, columns) for e in places]
        return torch.cat([dequantize(codes, fmt) for codes in pages])[:rows]

    y = torch.zeros(*topk_ids.shape, d, device=x.device)
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if expert >= 0:
            token, slot = torch.where(topk_ids == expert)
            gate, up, down = projection(expert, 0, f, d), projection(expert, 1, f, d), projection(expert, 2, d, f)
            y[token, slot] = expert_ffn(x[token].float(), gate, up, down, topk_weights[token, slot])
    return out.copy_(y.sum(1))
