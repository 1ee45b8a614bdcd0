"""Plain torch rotary embedding: swapping the halves and a signed sine table leave one multiply and one multiply-add."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_kernels.paged_attention.reference import store_by_entries
from rimuru_kernels.rms_norm.reference import rms_norm_reference


def rotary_tables_reference(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `rimuru_kernels.rotary.rotary_tables`; arguments are taken as checked."""
    angles = positions.to(torch.float32).view(-1, 1, 1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rimuru_kernels.rotary.rotary`; arguments are taken as checked."""
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotary_reference(x[..., :rotated], cos, sin), x[..., rotated:]), -1)
    return torch.mul(x, cos).addcmul_(x.roll(rotated // 2, -1), sin)


def rotary_store_reference(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    block_table: Tensor,
    positions: Tensor,
    token_seqs: Tensor | None,
    layout: KVLayout,
    heads: int,
    eps: float,
    clip: float | None,
) -> Tensor:
    """See `rimuru_kernels.rotary.rotary_store`; arguments are taken as checked."""
    rows = qkv.reshape(qkv.shape[0], -1, layout.head_dim)
    q, k, v = rows.split_with_sizes((heads, layout.kv_heads, layout.kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    if clip is not None:
        q, k, v = q.clamp(-clip, clip), k.clamp(-clip, clip), v.clamp(-clip, clip)
    if cos.shape[-1]:
        q, k = (rotary_reference(x.to(cos.dtype), cos, sin).to(qkv.dtype) for x in (q, k))
    store_by_entries(k, v, pool, block_table, positions, token_seqs, layout)
    return q.contiguous()
