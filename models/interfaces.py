"""What a model needs from whoever runs it. Models know neither pool nor offload; resident.py and the engine both satisfy these.

Notation: T tokens of this step (rows of all sequences, one after the other), H query heads, Hkv key/value heads, D head_dim,
d hidden size, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rimuru_models.config import ModelConfig


class KVCache(Protocol):
    """Past keys and values of the sequences in this step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
        """Store this step's k and v, then causal attention of each row over its own sequence.

        Args:
            layer: model layer index.
            q: [T, H, D] after rotary; k, v: [T, Hkv, D], k after rotary. They may be views of one larger tensor (not contiguous).
            scale: factor on q·k.
            sliding_window: key j is visible to query i iff 0 <= i - j < sliding_window; None: every j <= i.

        Returns:
            [T, H, D], in q's dtype.
        """
        ...


class ProjectedAttention(Protocol):
    """Attention straight from the fused projection: head norms, rotary, storing and attending in as few launches as the device allows."""

    def attend_projection(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """What `KVCache.attend` gives for q, k, v made from the projection.

        Args:
            layer: model layer index.
            qkv: [T, (H + 2 Hkv) D], each row q heads, then k heads, then v heads.
            cos, sin: [T, 1, D] rotary tables.
            q_norm, k_norm: [D], weights of an RMSNorm over each head before rotary, both or neither; eps: its epsilon.
            scale, sliding_window: as for `KVCache.attend`.

        Returns:
            [T, H, D].
        """
        ...


class ExpertProvider(Protocol):
    """Routed SwiGLU experts: expert(x) = down(silu(gate x) * (up x))."""

    def forward(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        Args:
            layer: model layer index, a member of config.moe_layers.
            x: [T, d].
            topk_ids: [T, k] int64, ascending within a row.
            topk_weights: [T, k] float32.

        Returns:
            [T, d], in x's dtype; the caller may write to it.
        """
        ...


class RoutedExperts(Protocol):
    """The sparse half of a layer straight from attention's output: add, norm, router, gating and experts in as few launches as possible."""

    def forward_routed(
        self, layer: int, x: Tensor, residual: Tensor, *, norm: Tensor, eps: float, router: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `ExpertProvider.forward` gives for the norm of residual + x and the experts that the router chooses for it.

        Args:
            layer: model layer index, a member of config.moe_layers.
            x, residual: [T, d]; residual may be written to.
            norm: [d], the weight of the RMSNorm before the router; eps: its epsilon.
            router: [E, d].
            top_k, renormalize: as for `topk_gating`.

        Returns:
            residual + x, its norm, and the weighted sum of the experts, [T, d] each; the caller may write to all three.
        """
        ...


class RecurrentState(Protocol):
    """Memory of the recurrent layers: for each sequence in this step the states of all texts so far, updated in place.

    A step's rows belong to the same sequences, in the same order, as those of the KV cache. Each layer calls `convolve` once and then the
    method of its kind once; both see the rows of a sequence as the continuation of what the same layer saw before.
    """

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal convolution and silu of each sequence's rows; the last K - 1 rows of x are kept for the next step.

        Args:
            layer: model layer index, a member of config.recurrent_layers.
            x: [T, C]; may be strided.
            weight: [K, C]; bias: [C] or None.

        Returns:
            [T, C], in x's dtype; see `rimuru_kernels.causal_conv1d`.
        """
        ...

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule over each sequence's rows.

        Args:
            layer: model layer index.
            q, k: [T, Hk, dk], not yet normalised; v: [T, Hv, dv]; any strides.
            log_decay, beta: [T, Hv], see `rimuru_kernels.gated_delta_rule.delta_gates`.

        Returns:
            [T, Hv, dv], in v's dtype.
        """
        ...

    def state_space(self, layer: int, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Mamba-2's state space over each sequence's rows.

        Args:
            layer: model layer index.
            x: [T, H, P]; b, c: [T, G, N]; any strides.
            dt: [T, H], see `rimuru_kernels.mamba2.time_steps`; a_log, d: [H].

        Returns:
            [T, H, P], in x's dtype.
        """
        ...


@dataclass(slots=True)
class ForwardContext:
    """Everything of one step besides the token ids.

    Attributes:
        positions: [T] int64, position of each row in its own sequence.
        kv: attention over past and present tokens.
        experts: routed experts.
        projected: attention from the fused projection, used instead of `kv` where given.
        routed: router and experts in one, used instead of `experts` where given.
        recurrent: states of the recurrent layers; None where the model has none.
    """

    positions: Tensor
    kv: KVCache
    experts: ExpertProvider
    projected: ProjectedAttention | None = None
    routed: RoutedExperts | None = None
    recurrent: RecurrentState | None = None


class CausalLM(Protocol):
    """A decoder with a language-model head."""

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        ...

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights that the model itself holds."""
        ...

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """token_ids [T] int64 -> final hidden states [T, d] (after the last norm)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d] -> float32 [R, vocab_size]."""
        ...
