"""Shape of a recurrent mixer: what stands in place of attention in most layers of a hybrid model. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

STATE_ITEMSIZE = 4
"""Recurrent states are float32 whatever the model's dtype: errors would pile up from token to token."""


@dataclass(frozen=True)
class RecurrentConfig:
    """A mixer whose memory of a text has one size, however long the text is.

    Attributes:
        kind: "delta" (Gated DeltaNet) or "mamba2".
        key_heads: key heads Hk; for Mamba-2 the groups G that share b and c.
        value_heads: value heads Hv, a multiple of key_heads; for Mamba-2 the heads H.
        key_dim: elements dk of a key; for Mamba-2 the state size N.
        value_dim: elements dv of a value; for Mamba-2 the head size P.
        kernel: rows K that the convolution before the recurrence sees; its state keeps K - 1.
        conv_bias: the convolution has a bias; projection_bias: so have the projections into and out of the mixer.
        step_limits: Mamba-2's least and largest step.
    """

    kind: Literal["delta", "mamba2"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    conv_bias: bool = False
    projection_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels C of the convolution: values, and keys and queries (Mamba-2: b and c)."""
        return self.inner + 2 * self.key_heads * self.key_dim

    @property
    def conv_rows(self) -> int:
        """Rows m of [C] that the convolution's state keeps."""
        return self.kernel - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Recurrent state of one layer and sequence: [Hv, dk, dv]; for Mamba-2 [H, P, N]."""
        width = (self.key_dim, self.value_dim) if self.kind == "delta" else (self.value_dim, self.key_dim)
        return (self.value_heads, *width)

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's recurrent state of one sequence."""
        return math.prod(self.state_shape) * STATE_ITEMSIZE

    def conv_row_bytes(self, itemsize: int) -> int:
        """Bytes of one row of the convolution's state, in the model's own dtype."""
        return self.channels * itemsize
