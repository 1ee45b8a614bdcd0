"""Blocks of a decoder layer: attention and MLPs. Plain classes holding tensors; one token's decode is a handful of torch calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rimuru_kernels.rms_norm import add_rms_norm, rms_norm
from rimuru_kernels.rotary import rotary
from rimuru_kernels.silu_and_mul import silu_and_mul
from rimuru_models.dense import Matrix, product
from rimuru_models.interfaces import ForwardContext

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


class Attention:
    """Grouped-query attention with rotary embeddings (where the model knows positions): o(attend(rope(q x), rope(k x), v x)).

    q, k and v are one matrix [(H + 2 Hkv) D, d] (rows of q, then k, then v), biases likewise.
    """

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        config = loader.config
        prefix = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.qkv, self.qkv_bias = self.load_projection(loader, prefix)
        self.output = loader.matrix(f"{prefix}.o_proj.weight")
        self.output_bias = loader.tensor(f"{prefix}.o_proj.bias") if config.output_bias else None
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.attention_scale
        self.turns = config.rotary_dim > 0
        self.window = config.window(layer)
        self.eps = config.rms_eps
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        self._all_heads = (-1, self.heads + 2 * self.kv_heads, self.head_dim)
        self._qk_and_v = (self.heads + self.kv_heads, self.kv_heads)
        self._q_and_k = (self.heads, self.kv_heads)
        self._flat = (-1, self.heads * self.head_dim)

    def load_projection(self, loader: DenseLoader, prefix: str) -> tuple[Matrix, Tensor | None]:
        """The matrix of q, k and v, and its bias."""
        parts = [f"{prefix}.{name}_proj" for name in ("q", "k", "v")]
        bias = loader.tensor(*(f"{part}.bias" for part in parts)) if loader.config.attention_bias else None
        return loader.matrix(*(f"{part}.weight" for part in parts)), bias

    def project(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, (H + 2 Hkv) D]; norms over a whole projection are part of it."""
        return product(x, self.qkv, self.qkv_bias)

    def qk_v(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Split [T, (H + 2 Hkv) D] into qk [T, H + Hkv, D] and v [T, Hkv, D], each head normalised where the family does that."""
        qk, v = qkv.view(self._all_heads).split_with_sizes(self._qk_and_v, 1)
        return qk, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, d], rotary tables [T, 1, R] -> [T, d]."""
        out = self.attend(self.project(x), cos, sin, context)
        return product(out.reshape(self._flat), self.output, self.output_bias)

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """qkv [T, (H + 2 Hkv) D], which may be strided, rotary tables [T, 1, R] -> [T, H, D]."""
        if context.projected is not None:
            return context.projected.attend_projection(
                self.layer,
                qkv,
                cos,
                sin,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                eps=self.eps,
                scale=self.scale,
                sliding_window=self.window,
            )
        qk, v = self.qk_v(qkv)
        q, k = (rotary(qk, cos, sin) if self.turns else qk).split_with_sizes(self._q_and_k, 1)
        return context.kv.attend(self.layer, q, k, v, scale=self.scale, sliding_window=self.window)


class HeadNormAttention(Attention):
    """Attention with an RMSNorm over each head of q and of k before rotary (weights [D])."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        super().__init__(loader, layer)
        prefix = f"model.layers.{layer}.self_attn"
        self.q_norm = loader.norm(f"{prefix}.q_norm.weight")
        self.k_norm = loader.norm(f"{prefix}.k_norm.weight")

    def qk_v(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """As `Attention.qk_v`, with q and k normalised."""
        assert self.q_norm is not None and self.k_norm is not None, "a family of this class has both norms"
        q, k, v = qkv.view(self._all_heads).split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)
        return torch.cat((rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)), 1), v


class FullNormAttention(Attention):
    """Attention with an RMSNorm over the whole projection of q [H D] and of k [Hkv D], then an optional clamp of q, k and v."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        super().__init__(loader, layer)
        prefix = f"model.layers.{layer}.self_attn"
        self._whole_q_norm = loader.tensor(f"{prefix}.q_norm.weight")
        self._whole_k_norm = loader.tensor(f"{prefix}.k_norm.weight")
        self.clip = loader.config.clip_qkv
        self._widths = tuple(count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads))

    def project(self, x: Tensor) -> Tensor:
        """As `Attention.project`, with q and k normalised and all three clamped."""
        q, k, v = super().project(x).split_with_sizes(self._widths, 1)
        qkv = torch.cat((rms_norm(q, self._whole_q_norm, self.eps), rms_norm(k, self._whole_k_norm, self.eps), v), 1)
        return qkv if self.clip is None else qkv.clamp_(-self.clip, self.clip)


class DenseMLP:
    """SwiGLU: down(silu(gate x) * (up x)); gate and up are one matrix [2f, d]."""

    def __init__(self, loader: DenseLoader, prefix: str) -> None:
        self.gate_up = loader.matrix(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.down = loader.matrix(f"{prefix}.down_proj.weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, d]."""
        return product(silu_and_mul(product(x, self.gate_up)), self.down)

    def forward_residual(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """As `SparseMoe.forward_residual`."""
        hidden, normed = add_rms_norm(x, residual, norm, eps)
        return hidden, self.forward(normed)
