"""Mamba-2 mixer: a state space with steps chosen by the input, in place of attention.

    z, xBC, dt  = W_in x;  x, B, C = silu(conv(xBC) + bias), split into H heads of P and twice G groups of N
    dt          = softplus(dt + dt_bias), clamped to the model's limits
    y           = state space, see rimuru_kernels.mamba2
    out         = W_out norm( y * silu(z) )                 the gate comes first; norm over each of the G groups of H P / G

The limits hold in every step. (transformers 5.24 clamps prompts but not single tokens; no released model has limits.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rimuru_kernels.gated_rms_norm import gated_rms_norm
from rimuru_kernels.mamba2 import time_steps
from rimuru_models.dense import product
from rimuru_models.interfaces import ForwardContext
from rimuru_models.layout import recurrent_prefix

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


class Mamba2Mixer:
    """One layer's mixer."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        mixer = loader.config.recurrent
        assert mixer is not None and mixer.kind == "mamba2"
        prefix = recurrent_prefix(loader.config, layer)
        biased = mixer.projection_bias
        self.layer = layer
        self.projection = loader.matrix(f"{prefix}.in_proj.weight")
        self.projection_bias = loader.tensor(f"{prefix}.in_proj.bias") if biased else None
        self.taps = loader.taps(f"{prefix}.conv1d.weight")
        self.conv_bias = loader.tensor(f"{prefix}.conv1d.bias") if mixer.conv_bias else None
        self.a_log = loader.vector(f"{prefix}.A_log")
        self.skip = loader.vector(f"{prefix}.D")
        self.dt_bias = loader.vector(f"{prefix}.dt_bias")
        self.norm = loader.vector(f"{prefix}.norm.weight").view(mixer.key_heads, -1)
        self.output = loader.matrix(f"{prefix}.out_proj.weight")
        self.output_bias = loader.tensor(f"{prefix}.out_proj.bias") if biased else None
        self.eps, self.limits = loader.config.rms_eps, mixer.step_limits
        shared = mixer.key_heads * mixer.key_dim
        self._parts = (mixer.inner, mixer.channels, mixer.value_heads)
        self._xbc = (mixer.inner, shared, shared)
        self._heads, self._groups = (-1, mixer.value_heads, mixer.value_dim), (-1, mixer.key_heads, mixer.key_dim)
        self._normed = (-1, *self.norm.shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, d] -> [T, d]. The rotary tables are not used: mixers are called alike."""
        states = context.recurrent
        assert states is not None, "a model with recurrent layers needs states"
        gate, mixed, dt = product(x, self.projection, self.projection_bias).split_with_sizes(self._parts, 1)
        inner, b, c = states.convolve(self.layer, mixed, self.taps, self.conv_bias).split_with_sizes(self._xbc, 1)
        steps = time_steps(dt, self.dt_bias, self.limits)
        out = states.state_space(
            self.layer, inner.view(self._heads), steps, self.a_log, b.view(self._groups), c.view(self._groups), self.skip
        )
        out = gated_rms_norm(out.view(self._normed), gate.view(self._normed), self.norm, self.eps, norm_before_gate=False)
        return product(out.flatten(1), self.output, self.output_bias)
