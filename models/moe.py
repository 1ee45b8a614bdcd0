"""The sparse half of a decoder layer: router, routed experts (computed by whoever provides them), optional shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import linear

from rimuru_kernels.topk_gating import topk_gating
from rimuru_models.interfaces import ExpertProvider
from rimuru_models.layers import DenseMLP

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


class SparseMoe:
    """sum over the top-k experts e of p_e * expert_e(x), p = softmax(router x) over all experts, rescaled if the config says so."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        self.layer = layer
        self.router = loader.tensor(f"model.layers.{layer}.mlp.gate.weight")
        self.top_k = loader.config.top_k
        self.renormalize = loader.config.norm_topk_prob

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, d] -> weights [T, k] float32, expert ids [T, k] int64 ascending within a row."""
        return topk_gating(linear(x, self.router), self.top_k, self.renormalize)

    def forward(self, x: Tensor, experts: ExpertProvider) -> Tensor:
        """x [T, d] -> [T, d]."""
        weights, ids = self.route(x)
        return experts.forward(self.layer, x, ids, weights)


class SharedSparseMoe(SparseMoe):
    """SparseMoe plus an expert that every token uses, scaled by sigmoid(w_g · x), one scalar a token."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        super().__init__(loader, layer)
        self.shared = DenseMLP(loader, f"model.layers.{layer}.mlp.shared_expert")
        self.shared_gate = loader.tensor(f"model.layers.{layer}.mlp.shared_expert_gate.weight")

    def forward(self, x: Tensor, experts: ExpertProvider) -> Tensor:
        """x [T, d] -> [T, d]."""
        shared = self.shared.forward(x).mul_(linear(x, self.shared_gate).sigmoid_())
        return shared.add_(super().forward(x, experts))
