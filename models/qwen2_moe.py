"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): shared expert beside the routed ones, biases on q, k and v.

    attention   q, k, v with bias (qkv_bias), o without; rotary over the whole head; sliding window only where the config turns it on
    router      p = softmax(W_r x) over all experts; top-k; rescaled only if norm_topk_prob
    layer       routed(x) + sigmoid(w_g · x) * shared(x), both SwiGLU;
                layers outside decoder_sparse_step or in mlp_only_layers: dense SwiGLU

Tensors of layer N: `self_attn.{q,k,v}_proj.{weight,bias}`, `self_attn.o_proj.weight`, `mlp.gate.weight`,
`mlp.experts.E.{gate,up,down}_proj.weight`, `mlp.shared_expert.{gate,up,down}_proj.weight`, `mlp.shared_expert_gate.weight` [1, d];
dense layers `mlp.{gate,up,down}_proj.weight`. Formulas checked against transformers 5.17, models/qwen2_moe.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder
from rimuru_models.moe import SharedSparseMoe


class Qwen2MoeForCausalLM(MoeDecoder):
    """The shared decoder with a gated shared expert in its sparse layers."""

    moe_class = SharedSparseMoe
