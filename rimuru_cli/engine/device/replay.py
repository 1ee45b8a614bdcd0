"""Replaying a recorded routing: what the routers of every step and layer are made to choose."""

from __future__ import annotations

import torch
from torch import Tensor


class ReplayedRouting:
    """A recording on the device, of which every forward pass uses the next step; after the last one it begins again.

    Args:
        ids: int64 [steps, num_layers, T, k], ascending in a row.
        weights: float32, same shape.

    Attributes:
        ids, weights: the present step's, [num_layers, T, k], always at the same place: captured graphs read them.
        at: int64 [1], number of the next step.
    """

    def __init__(self, ids: Tensor, weights: Tensor, device: torch.device) -> None:
        self._ids, self._weights = ids.to(device), weights.to(device)
        self.ids, self.weights = self._ids[0].clone(), self._weights[0].clone()
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """Take the next step; part of every forward pass, so that a graph does it by itself."""
        self.ids.copy_(self._ids.index_select(0, self.at)[0])
        self.weights.copy_(self._weights.index_select(0, self.at)[0])
        self.at.add_(1).remainder_(len(self._ids))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """ids and weights [T, k] of a layer in the present step."""
        return self.ids[index], self.weights[index]
