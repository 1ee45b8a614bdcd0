"""Plain torch gate of a shared expert."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def add_shared_reference(x: Tensor, gate: Tensor, shared: Tensor, routed: Tensor) -> Tensor:
    """See `rimuru_kernels.shared_gate.add_shared`; arguments are taken as checked."""
    return shared.mul_(linear(x, gate).sigmoid_()).add_(routed)
