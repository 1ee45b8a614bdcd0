"""Mixtral (8x7B, 8x22B): every layer sparse, no shared expert, no biases, no q/k norm.

    attention   q, k, v, o without bias; rotary over the whole head; optional sliding window on all layers
    router      p = softmax(W_r x) over all experts; top-k; always rescaled to sum 1
    expert      w2(silu(w1 x) * (w3 x))

Tensors of layer N: `self_attn.{q,k,v,o}_proj.weight`, `block_sparse_moe.gate.weight`, `block_sparse_moe.experts.E.w{1,2,3}.weight`
(or under `mlp.`, fused: see layout). Formulas checked against transformers 5.17, models/mixtral.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder


class MixtralForCausalLM(MoeDecoder):
    """The shared decoder as it is; `norm_topk_prob` is true in every Mixtral config that is read."""
