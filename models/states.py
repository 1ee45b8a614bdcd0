"""Recurrent layers over states that lie somewhere in memory: who says where, has a `RecurrentState`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from rimuru_kernels.causal_conv1d import causal_conv1d
from rimuru_kernels.gated_delta_rule import gated_delta_rule
from rimuru_kernels.mamba2 import state_space


class StatesInPlace(ABC):
    """`interfaces.RecurrentState` over views of the states, in plain memory or in pages of a pool.

    A subclass gives the views and sets `cu_seqlens` before each forward: 0, then the end of each sequence's rows.
    """

    cu_seqlens: Sequence[int] = (0,)

    @abstractmethod
    def recurrent(self, layer: int) -> Sequence[Tensor]:
        """Each sequence's recurrent state of a layer, [Hv, dk, dv] ([H, P, N] for Mamba-2), written to in place."""

    @abstractmethod
    def convolution(self, layer: int) -> Sequence[Tensor]:
        """Each sequence's convolution state of a layer, [K - 1, C], written to in place."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `interfaces.RecurrentState.convolve`."""
        return causal_conv1d(x, weight, bias, self.convolution(layer), self.cu_seqlens)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """See `interfaces.RecurrentState.delta_rule`."""
        return gated_delta_rule(q, k, v, log_decay, beta, self.recurrent(layer), self.cu_seqlens)

    def state_space(self, layer: int, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """See `interfaces.RecurrentState.state_space`."""
        return state_space(x, dt, a_log, b, c, d, self.recurrent(layer), self.cu_seqlens)
