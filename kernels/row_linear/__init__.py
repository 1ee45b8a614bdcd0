"""Products of few rows with a large matrix: reading the matrix is all that costs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

MAX_ROWS = 4
"""Up to this many rows the kernel is used on a GPU; with more, matrix units win."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `torch.nn.functional.linear`, whose part this is wherever there are many rows or no GPU.

    Args:
        x: [T, k] floating point.
        weight: [n, k] in x's dtype, on its device.
        bias: [n] or None, likewise.

    Returns:
        [T, n] new tensor in x's dtype; products of half-precision numbers are summed in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if not x.is_cuda or x.shape[0] > MAX_ROWS or x.shape[0] == 0 or x.dtype not in _DTYPES:
        return linear(x, weight, bias)
    others = [weight] if bias is None else [weight, bias]
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [list(t.shape) for t in (x, *others)]
        raise ValueError(f"row_linear: x, weight and bias of shapes {shapes} do not go together")
    if any(t.dtype is not x.dtype or t.device != x.device for t in others):
        kinds = [f"{t.dtype} on {t.device}" for t in (x, *others)]
        raise ValueError(f"row_linear: x, weight and bias are {kinds}; need one dtype and device")
    from rimuru_kernels.row_linear import kernel

    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    kernel.row_linear(x.contiguous(), weight.contiguous(), bias, out)
    return out
