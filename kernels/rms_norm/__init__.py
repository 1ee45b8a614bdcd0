"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

from torch import Tensor

from rimuru_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    Args:
        x: [..., n] floating point, any strides.
        weight: [n], dtype and device of x.
        eps: added to the mean square.

    Returns:
        [..., n] new tensor in x's dtype. Half-precision inputs are normalised in float32, rounded, then scaled by weight.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: weight {list(weight.shape)} does not fit the last dimension of x {list(x.shape)}")
    if x.dtype is not weight.dtype or x.device != weight.device or not x.dtype.is_floating_point:
        raise ValueError(
            f"rms_norm: x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}; need one floating dtype and device"
        )
    return rms_norm_reference(x, weight, eps)
