"""Plain torch rotary embedding: swapping the halves and a signed sine table leave one multiply and one multiply-add."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables_reference(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `rimuru_kernels.rotary.rotary_tables`; arguments are taken as checked."""
    angles = positions.to(torch.float32).view(-1, 1, 1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rimuru_kernels.rotary.rotary`; arguments are taken as checked."""
    return torch.mul(x, cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
