"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): q and k normalised per head, no shared expert.

    attention   q = norm_q(W_q x), k = norm_k(W_k x) with RMSNorm over each head's D, then rotary; D is explicit (H D != d);
                biases on q, k, v and o only if attention_bias
    router      p = softmax(W_r x) over all experts; top-k; rescaled if norm_topk_prob (true in the released models)
    layer       SwiGLU experts; layers outside decoder_sparse_step or in mlp_only_layers: dense SwiGLU

Tensors of layer N: `self_attn.{q,k,v,o}_proj.weight`, `self_attn.{q,k}_norm.weight` [D], `mlp.gate.weight`,
`mlp.experts.E.{gate,up,down}_proj.weight`. Formulas checked against transformers 5.17, models/qwen3_moe.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder
from rimuru_models.layers import HeadNormAttention


class Qwen3MoeForCausalLM(MoeDecoder):
    """The shared decoder with per-head q/k norms."""

    attention_class = HeadNormAttention
