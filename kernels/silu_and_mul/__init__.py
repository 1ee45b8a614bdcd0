"""The gated activation of SwiGLU."""

from __future__ import annotations

from torch import Tensor

from rimuru_kernels.silu_and_mul.reference import silu_and_mul_reference


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :f]) * x[..., f:] with silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202).

    Args:
        x: [..., 2f] floating point: gate, then up. Its gate half is overwritten.

    Returns:
        [..., f], possibly a view of x.

    Raises:
        ValueError: an odd last dimension, or not floating point.
    """
    if x.ndim < 1 or x.shape[-1] % 2 or not x.dtype.is_floating_point:
        raise ValueError(f"silu_and_mul: need floating-point [..., 2f], got {x.dtype} {list(x.shape)}")
    return silu_and_mul_reference(x)
