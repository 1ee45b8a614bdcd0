"""Rotary position embedding, half-rotation form, over the whole head."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.rotary.reference import rotary_reference, rotary_tables_reference


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
    """Rotate every head: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of D (Su et al. 2021, arXiv 2104.09864).

    Args:
        x: [T, H, D], any strides.
        cos, sin: [T, 1, D] from `rotary_tables`, in x's dtype.

    Returns:
        [T, H, D] new tensor.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    shape = x.shape
    if len(shape) != 3 or shape[2] % 2 or cos.shape != (shape[0], 1, shape[2]) or sin.shape != cos.shape:
        raise ValueError(f"rotary: tables {list(cos.shape)}, {list(sin.shape)} do not fit x {list(shape)}")
    if x.dtype is not cos.dtype or x.dtype is not sin.dtype:
        raise ValueError(f"rotary: x is {x.dtype}, tables are {cos.dtype} and {sin.dtype}")
    return rotary_reference(x, cos, sin)
