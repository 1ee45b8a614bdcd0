"""Attention whose output passes a gate: each head of q_proj holds a query and, after it, the gate for that head's output.

out = W_o( attend(q, k, v) * sigmoid(gate) )            q and k normed per head, then partly turned
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rimuru_models.dense import Matrix, product
from rimuru_models.interfaces import ForwardContext
from rimuru_models.layers import HeadNormAttention

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


class GatedAttention(HeadNormAttention):
    """Head-normed attention with a gate. The rows of q_proj are put in order when they are loaded: all queries, k, v, then all gates."""

    def __init__(self, loader: DenseLoader, layer: int) -> None:
        super().__init__(loader, layer)
        queries = self.heads * self.head_dim
        self._qkv_and_gate = (queries + 2 * self.kv_heads * self.head_dim, queries)

    def load_projection(self, loader: DenseLoader, prefix: str) -> tuple[Matrix, Tensor | None]:
        """The matrix of q, k, v and gate, and its bias."""
        config = loader.config
        size, kv_rows = config.head_dim, config.num_kv_heads * config.head_dim

        def pieces(kind: str) -> list[tuple[str, int, int]]:
            q, k, v = (f"{prefix}.{name}_proj.{kind}" for name in ("q", "k", "v"))
            starts = [2 * size * head for head in range(config.num_heads)]
            queries = [(q, start, start + size) for start in starts]
            gates = [(q, start + size, start + 2 * size) for start in starts]
            return [*queries, (k, 0, kv_rows), (v, 0, kv_rows), *gates]

        bias = loader.rows(pieces("bias")) if config.attention_bias else None
        return loader.matrix_rows(pieces("weight")), bias

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """As `Attention.forward`."""
        qkv, gate = self.project(x).split_with_sizes(self._qkv_and_gate, 1)
        out = self.attend(qkv, cos, sin, context).reshape(self._flat)
        return product(out * torch.sigmoid(gate), self.output, self.output_bias)
