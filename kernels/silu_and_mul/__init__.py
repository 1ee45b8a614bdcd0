"""The gated activation of SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.silu_and_mul.reference import silu_and_mul_reference


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :f]) * x[..., f:] with silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202).

    Args:
        x: [..., 2f] floating point: gate, then up. Its gate half may be overwritten.

    Returns:
        [..., f], possibly a view of x; on a GPU contiguous.

    Raises:
        ValueError: an odd last dimension, or not floating point.
    """
    if x.ndim < 1 or x.shape[-1] % 2 or not x.dtype.is_floating_point:
        raise ValueError(f"silu_and_mul: need floating-point [..., 2f], got {x.dtype} {list(x.shape)}")
    if x.is_cuda and x.numel() and x.dtype is not torch.float64:
        from rimuru_kernels.silu_and_mul import kernel

        rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty((rows.shape[0], rows.shape[1] // 2), dtype=x.dtype, device=x.device)
        kernel.silu_and_mul(rows, out)
        return out.view(*x.shape[:-1], -1)
    return silu_and_mul_reference(x)
