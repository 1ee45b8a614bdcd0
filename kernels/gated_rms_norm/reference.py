"""Plain torch RMSNorm with a gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_before_gate: bool) -> Tensor:
    """See `rimuru_kernels.gated_rms_norm.gated_rms_norm`; arguments are taken as checked."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value, opening = x.to(wide), silu(gate.to(wide))
    if not norm_before_gate:
        value = value * opening
    normed = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return normed if not norm_before_gate else (normed * opening).to(x.dtype)
