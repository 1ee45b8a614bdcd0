"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    Args:
        x: [..., n] floating point, any strides.
        weight: [n], on the device of x and of its dtype, or float32.
        eps: added to the mean square.

    Returns:
        [..., n] new tensor in x's dtype. Half-precision inputs are normalised in float32. With a weight of their dtype they are rounded,
        then scaled by it; with a float32 weight they are scaled by it first (as the norms of Qwen3-Next are).

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: weight {list(weight.shape)} does not fit the last dimension of x {list(x.shape)}")
    if not _goes_with(weight, x):
        raise ValueError(
            f"rms_norm: x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}; need one floating dtype and device"
        )
    if x.is_cuda and x.numel() and x.dtype is not torch.float64:
        return _launch(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h = residual + x and its norm, in one pass.

    Args:
        x, residual: [T, n], one dtype and device; residual contiguous.
        weight, eps: as for `rms_norm`.

    Returns:
        h [T, n] and rms_norm(h) [T, n]. On a GPU h is `residual`, updated in place; elsewhere too.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if x.ndim != 2 or residual.shape != x.shape or residual.dtype is not x.dtype or not residual.is_contiguous():
        raise ValueError(f"add_rms_norm: x {x.dtype} {list(x.shape)} and residual {residual.dtype} {list(residual.shape)} must match")
    if weight.shape != x.shape[1:] or not _goes_with(weight, x) or residual.device != x.device:
        raise ValueError(f"add_rms_norm: weight {weight.dtype} {list(weight.shape)} does not fit x {x.dtype} {list(x.shape)}")
    if x.is_cuda and x.numel() and x.dtype is not torch.float64:
        return residual, _launch(x, weight, eps, residual)
    residual += x
    return residual, rms_norm_reference(residual, weight, eps)


def _goes_with(weight: Tensor, x: Tensor) -> bool:
    same = weight.dtype is x.dtype or (weight.dtype is torch.float32 and x.dtype.itemsize < 4)
    return same and weight.device == x.device and x.dtype.is_floating_point


def _launch(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    from rimuru_kernels.rms_norm import kernel

    rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    kernel.rms_norm(rows, weight.contiguous(), eps, out, residual, residual)
    return out.view(x.shape)
