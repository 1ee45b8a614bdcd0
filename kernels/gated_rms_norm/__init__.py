"""RMSNorm and a silu gate, in either order."""

from __future__ import annotations

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
    return gated_rms_norm_reference(x, gate, weight, eps, norm_before_gate)
