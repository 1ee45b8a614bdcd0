"""Gated DeltaNet: linear attention with a state that forgets and corrects itself, in place of attention.

q, k, v     = silu(conv( W_qkv x )), split into Hk heads of dk, Hk of dk, Hv of dv
β           = sigmoid(W_b x);  log decay = -exp(A_log) softplus(W_a x + dt_bias)
o           = gated delta rule, see rimuru_kernels.gated_delta_rule
out         = W_out( norm(o) * silu(W_z x) )          norm over each head's dv, a plain weight [dv] (not centred on zero)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rimuru_kernels.gated_delta_rule import delta_gates
from rimuru_kernels.gated_rms_norm import gated_rms_norm
from rimuru_models.dense import product
from rimuru_models.interfaces import ForwardContext
from rimuru_models.layout import recurrent_prefix

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader
    from rimuru_models.recurrent_config import RecurrentConfig


class GatedDeltaNet:
    """One layer's mixer; all five projections of x are one matrix (rows of q, k, v, z, b, a)."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        mixer = loader.config.recurrent
        assert mixer is not None and mixer.kind == "delta"
        prefix = recurrent_prefix(loader.config, layer)
        self.layer = layer
        self.projection = loader.matrix_rows(self.pieces(prefix, mixer))
        self.taps = loader.taps(f"{prefix}.conv1d.weight")
        self.a_log = loader.vector(f"{prefix}.A_log")
        self.dt_bias = loader.vector(f"{prefix}.dt_bias")
        self.norm = loader.vector(f"{prefix}.norm.weight")
        self.output = loader.matrix(f"{prefix}.out_proj.weight")
        self.eps = loader.config.rms_eps
        self._parts = (mixer.channels, mixer.inner, mixer.value_heads, mixer.value_heads)
        keys = mixer.key_heads * mixer.key_dim
        self._qkv = (keys, keys, mixer.inner)
        self._key_heads, self._value_heads = (-1, mixer.key_heads, mixer.key_dim), (-1, mixer.value_heads, mixer.value_dim)

    @staticmethod
    def pieces(prefix: str, mixer: RecurrentConfig) -> list[tuple[str, int, int]]:
        """Where the rows of q, k, v, z, b and a lie in the checkpoint: (name, first row, row after the last)."""
        rows = (("qkv", mixer.channels), ("z", mixer.inner), ("b", mixer.value_heads), ("a", mixer.value_heads))
        return [(f"{prefix}.in_proj_{name}.weight", 0, count) for name, count in rows]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, d] -> [T, d]. The rotary tables are not used: mixers are called alike."""
        states = context.recurrent
        assert states is not None, "a model with recurrent layers needs states"
        mixed, z, b, a = product(x, self.projection).split_with_sizes(self._parts, 1)
        q, k, v = states.convolve(self.layer, mixed, self.taps, None).split_with_sizes(self._qkv, 1)
        gates = delta_gates(a, b, self.a_log, self.dt_bias)
        out = states.delta_rule(self.layer, q.view(self._key_heads), k.view(self._key_heads), v.view(self._value_heads), *gates)
        out = gated_rms_norm(out, z.view(self._value_heads), self.norm, self.eps, norm_before_gate=True)
        return product(out.flatten(1), self.output)
