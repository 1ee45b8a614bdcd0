"""Rotary position embedding, half-rotation form, over the whole head or its first dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_kernels.rotary.reference import rotary_reference, rotary_store_reference, rotary_tables_reference


def rotary_tables(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of each token, once a step for all layers.

    Args:
        positions: [T] integer.
        inv_freq: [D / 2] float32, theta^(-2j / D).
        dtype: dtype of the result; the angles are float32.

    Returns:
        cos, sin: [T, 1, D] each; both halves of D hold the same angles, and the first half of sin is negated.

    Raises:
        ValueError: wrong ranks or dtypes.
    """
    if positions.ndim != 1 or inv_freq.ndim != 1 or positions.is_floating_point() or inv_freq.dtype is not torch.float32:
        raise ValueError(
            f"rotary_tables: need integer positions [T] and float32 inv_freq [D/2], got {list(positions.shape)}, {list(inv_freq.shape)}"
        )
    return rotary_tables_reference(positions, inv_freq, dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of R (Su et al. 2021, arXiv 2104.09864).

    Args:
        x: [T, H, D], any strides.
        cos, sin: [T, 1, R] from `rotary_tables`, in x's dtype; where R < D, the dimensions from R on are left as they are.

    Returns:
        [T, H, D] new tensor.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    shape = x.shape
    rotated = cos.shape[-1] if cos.ndim == 3 else 0
    fits = len(shape) == 3 and cos.shape == (shape[0], 1, rotated) and sin.shape == cos.shape
    if not fits or rotated % 2 or not 0 < rotated <= shape[2]:
        raise ValueError(f"rotary: tables {list(cos.shape)}, {list(sin.shape)} do not fit x {list(shape)}")
    if x.dtype is not cos.dtype or x.dtype is not sin.dtype:
        raise ValueError(f"rotary: x is {x.dtype}, tables are {cos.dtype} and {sin.dtype}")
    return rotary_reference(x, cos, sin)


def rotary_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    block_table: Tensor,
    positions: Tensor,
    layout: KVLayout,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    clip: float | None = None,
    token_seqs: Tensor | None = None,
) -> Tensor:
    """From the fused projection to attention's inputs in one launch: head norms, clamp, rotary, and k and v stored in their pages.

    Args:
        qkv: [T, (H + 2 Hkv) D], each row q heads, then k heads, then v heads; rows may be strided.
        cos, sin: [T, 1, R] from `rotary_tables`, R <= D, float32 or qkv's dtype; dimensions from R on are left as they are (R = 0: all).
        pool, block_table, positions, layout, token_seqs: as for `paged_attention.store_kv_entries`.
        q_norm, k_norm: [D], weights of an RMSNorm over each head with `eps`, of qkv's dtype or float32 (see `rms_norm`); both or neither.
        clip: q, k and v are clamped to -clip .. clip (after the norm, before the rotation).

    Returns:
        q [T, H, D] contiguous, rotated.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    tokens, width = qkv.shape
    heads = width // layout.head_dim - 2 * layout.kv_heads
    if heads < 1 or width % layout.head_dim or heads % layout.kv_heads or layout.head_dim % 2 or qkv.stride(1) != 1:
        raise ValueError(f"rotary_store: rows of {width} elements (strides {qkv.stride()}) do not fit {layout}")
    turned = cos.shape[-1] if cos.ndim == 3 else -1
    shape = (tokens, 1, turned)
    if cos.shape != shape or sin.shape != shape or cos.dtype is not sin.dtype or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"rotary_store: tables {list(cos.shape)}, {list(sin.shape)} must be contiguous [{tokens}, 1, R]")
    if turned % 2 or not 0 <= turned <= layout.head_dim:
        raise ValueError(f"rotary_store: {turned} dimensions cannot turn in heads of {layout.head_dim}")
    if (q_norm is None) is not (k_norm is None) or any(t is not None and t.shape != (layout.head_dim,) for t in (q_norm, k_norm)):
        raise ValueError(f"rotary_store: norms of q and k go together and hold {layout.head_dim} weights each")
    if (
        positions.shape != (tokens,)
        or positions.is_floating_point()
        or block_table.dtype is not torch.int32
        or pool.dtype is not torch.uint8
    ):
        raise ValueError(f"rotary_store: {tokens} integer positions, an int32 block table and a pool of uint8 are needed")
    if tokens == 0:
        return qkv.new_empty((0, heads, layout.head_dim))
    if qkv.is_cuda:
        from rimuru_kernels.rotary import kernel

        q = torch.empty((tokens, heads, layout.head_dim), dtype=qkv.dtype, device=qkv.device)
        kernel.rotary_store(qkv, q_norm, k_norm, cos, sin, q, pool, block_table, positions, token_seqs, layout, eps, clip)
        return q
    return rotary_store_reference(qkv, q_norm, k_norm, cos, sin, pool, block_table, positions, token_seqs, layout, heads, eps, clip)
