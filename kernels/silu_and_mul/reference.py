"""Plain torch SwiGLU activation."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """See `rimuru_kernels.silu_and_mul.silu_and_mul`; arguments are taken as checked."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate, inplace=True).mul_(up)
