"""RMSNorm and a silu gate, in either order; on a GPU one Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.gated_rms_norm.reference import gated_rms_norm_reference


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, norm_before_gate: bool) -> Tensor:
    """norm(x) silu(gate) where the norm comes first (Gated DeltaNet), norm(x silu(gate)) where it does not (Mamba-2).

    The mean runs over the last dimension; to norm groups, pass x as [..., groups, n].

    Args:
        x: [..., n] floating point, any strides; gate: the same shape and dtype.
        weight: [n] or [groups, n], dtype and device of x.
        eps: added to the mean square.

    Returns:
        [..., n] new tensor in x's dtype. Half-precision inputs are computed in float32; the norm is rounded before it is scaled by weight.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if x.ndim < 1 or gate.shape != x.shape or not 1 <= weight.ndim <= x.ndim or weight.shape != x.shape[x.ndim - weight.ndim :]:
        shapes = [list(t.shape) for t in (x, gate, weight)]
        raise ValueError(f"gated_rms_norm: x, gate and weight of shapes {shapes} do not go together")
    parts = (x, gate, weight)
    if not x.dtype.is_floating_point or any(t.dtype is not x.dtype or t.device != x.device for t in parts):
        raise ValueError(f"gated_rms_norm: dtypes {[t.dtype for t in parts]}; need one floating dtype and device")
    # Rows of weights are those of the last dimensions but one, so three dimensions say it all.
    if x.is_cuda and x.numel() and x.dtype is not torch.float64 and weight.ndim <= 2:
        return _launch(x, gate, weight, eps, norm_before_gate)
    return gated_rms_norm_reference(x, gate, weight, eps, norm_before_gate)


def _launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_before_gate: bool) -> Tensor:
    from rimuru_kernels.gated_rms_norm import kernel

    shape = (-1, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])
    rows, gates = (t.reshape(shape) for t in (x, gate))
    rows, gates = (t if t.stride(2) == 1 else t.contiguous() for t in (rows, gates))
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    kernel.gated_rms_norm(rows, gates, weight.contiguous(), eps, out, norm_before_gate)
    return out.view(x.shape)
