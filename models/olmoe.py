"""OLMoE (1B-7B): q and k normalised over the whole projection, every layer sparse.

    attention   q = norm_q(W_q x) over all H D, k = norm_k(W_k x) over all Hkv D, v = W_v x; all clamped to +-clip_qkv if that is set;
                then rotary
    router      p = softmax(W_r x) over all experts; top-k; rescaled only if norm_topk_prob (false in the released models)

Tensors of layer N: `self_attn.{q,k,v,o}_proj.weight`, `self_attn.q_norm.weight` [H D], `self_attn.k_norm.weight` [Hkv D],
`mlp.gate.weight`, `mlp.experts.E.{gate,up,down}_proj.weight`. Formulas checked against transformers 5.17, models/olmoe.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder
from rimuru_models.layers import FullNormAttention


class OlmoeForCausalLM(MoeDecoder):
    """The shared decoder with q/k norms over the whole projection."""

    attention_class = FullNormAttention
