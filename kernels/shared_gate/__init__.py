"""What a shared expert adds to the routed ones, scaled by a gate of its own, one number a token."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.shared_gate.reference import add_shared_reference


def add_shared(x: Tensor, gate: Tensor, shared: Tensor, routed: Tensor) -> Tensor:
    """routed + sigmoid(w · x) shared, row by row.

    Args:
        x: [T, d] floating point; gate: [1, d], its w.
        shared, routed: [T, d]; all four of one dtype and device, rows contiguous. Both may be overwritten.

    Returns:
        [T, d]. On a GPU computed in float32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    parts = (x, gate, shared, routed)
    if x.ndim != 2 or gate.shape != (1, x.shape[1]) or shared.shape != x.shape or routed.shape != x.shape:
        raise ValueError(f"add_shared: x, gate, shared and routed of shapes {[list(t.shape) for t in parts]} do not go together")
    if not x.dtype.is_floating_point or any(t.dtype is not x.dtype or t.device != x.device for t in parts):
        raise ValueError(f"add_shared: dtypes {[t.dtype for t in parts]}; need one floating dtype and device")
    if x.is_cuda and x.numel() and x.dtype is not torch.float64:
        from rimuru_kernels.shared_gate import kernel

        x, shared, routed = (t if t.stride(1) == 1 else t.contiguous() for t in (x, shared, routed))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel.add_shared(x, gate.contiguous(), shared, routed, out)
        return out
    return add_shared_reference(x, gate, shared, routed)
