"""The sparse half of a decoder layer: router, routed experts (computed by whoever provides them), optional shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from rimuru_kernels.rms_norm import add_rms_norm
from rimuru_kernels.shared_gate import add_shared
from rimuru_kernels.silu_and_mul import silu_and_mul
from rimuru_kernels.topk_gating import topk_gating
from rimuru_models.dense import product
from rimuru_models.interfaces import ExpertProvider, ForwardContext
from rimuru_models.layers import DenseMLP

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """x [T, d] and router [E, d], of one dtype -> x router^T [T, E] in float32.

    Never rounded to a 2-byte dtype: that makes ties of near ties, and then other experts answer (see docs/results, agreement).
    """
    if x.dtype.itemsize >= 4:
        return linear(x, router)
    if x.is_cuda:
        return torch.mm(x, router.t(), out_dtype=torch.float32)
    return linear(x.float(), router.float())


class SparseMoe:
    """sum over the top-k experts e of p_e * expert_e(x), p = softmax(router x) over all experts, rescaled if the config says so."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        self.layer = layer
        self.router = loader.tensor(f"model.layers.{layer}.mlp.gate.weight")
        self.top_k = loader.config.top_k
        self.renormalize = loader.config.norm_topk_prob

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, d] -> weights [T, k] float32, expert ids [T, k] int64 ascending within a row."""
        return topk_gating(router_logits(x, self.router), self.top_k, self.renormalize)

    def forward(self, x: Tensor, experts: ExpertProvider) -> Tensor:
        """x [T, d] -> [T, d]."""
        weights, ids = self.route(x)
        return self._with_shared(x, experts.forward(self.layer, x, ids, weights))

    def forward_residual(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """h = residual + x [T, d] and this block over h normed with `norm` [d]; residual may be written to."""
        if context.routed is None:
            hidden, normed = add_rms_norm(x, residual, norm, eps)
            return hidden, self.forward(normed, context.experts)
        hidden, normed, out = context.routed.forward_routed(
            self.layer, x, residual, norm=norm, eps=eps, router=self.router, top_k=self.top_k, renormalize=self.renormalize
        )
        return hidden, self._with_shared(normed, out)

    def _with_shared(self, x: Tensor, routed: Tensor) -> Tensor:
        """What else the block adds for x [T, d] to the routed experts' sum [T, d], which may be written to."""
        return routed


class SummedSparseMoe(SparseMoe):
    """SparseMoe plus a shared SwiGLU expert that every token uses, simply added; its gate and up are one matrix on disk too."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        super().__init__(loader, layer)
        prefix = f"model.layers.{layer}.shared_mlp"
        self.shared_in = loader.matrix(f"{prefix}.input_linear.weight")
        self.shared_out = loader.matrix(f"{prefix}.output_linear.weight")

    def _with_shared(self, x: Tensor, routed: Tensor) -> Tensor:
        return routed.add_(product(silu_and_mul(product(x, self.shared_in)), self.shared_out))


class SharedSparseMoe(SparseMoe):
    """SparseMoe plus an expert that every token uses, scaled by sigmoid(w_g · x), one scalar a token."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        super().__init__(loader, layer)
        self.shared = DenseMLP(loader, f"model.layers.{layer}.mlp.shared_expert")
        self.shared_gate = loader.tensor(f"model.layers.{layer}.mlp.shared_expert_gate.weight")

    def _with_shared(self, x: Tensor, routed: Tensor) -> Tensor:
        return add_shared(x, self.shared_gate, self.shared.forward(x), routed)
