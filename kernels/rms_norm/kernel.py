"""Triton RMSNorm, with or without adding to the residual stream first."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalize_row(x, weight, eps, N: tl.constexpr, dtype: tl.constexpr):
    """weight * x / sqrt(mean(x^2) + eps) of one row x float32 [block] (zero beyond N); the quotient is rounded to `dtype` first."""
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    return scaled.to(dtype).to(tl.float32) * weight


@triton.jit
def _rms_norm(x, residual, weight, out, residual_out, eps, x_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < N
    dtype: tl.constexpr = out.dtype.element_ty
    scale = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + i, mask=mask, other=0.0)
    if residual is not None:
        value = (value.to(tl.float32) + tl.load(residual + row * N + i, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_out + row * N + i, value, mask=mask)
    tl.store(out + row * N + i, normalize_row(value.to(tl.float32), scale, eps, N, weight.dtype.element_ty).to(dtype), mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None, residual_out: Tensor | None = None
) -> None:
    """Rows of x [R, N] (rows may be strided) into out [R, N]; with `residual` [R, N], residual_out = x + residual is normalised instead.

    residual_out may be residual itself.
    """
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    _rms_norm[(rows,)](
        x, residual, weight, out, residual_out, eps, x.stride(0), N=n, BLOCK=block, num_warps=max(1, min(8, block // 512))
    )  # fmt: skip
