"""Qwen3-Next (80B-A3B, Coder-Next): three Gated DeltaNet layers to one of gated attention, and a shared expert.

    mixers      layer i is attention where (i + 1) % 4 == 0 (or as layer_types says), else Gated DeltaNet (delta_net.py)
    attention   gated_attention.py; the first 0.25 D dimensions of each head turn
    norms       all multiply by 1 + w in float32, then round; only the gated norm of DeltaNet has a plain weight
    router      p = softmax(W_r x) over all experts; top-k; rescaled if norm_topk_prob (true in the released models)
    layer       routed(x) + sigmoid(w_g · x) * shared(x)

DeltaNet's projections lie in two matrices, ordered by key head (r = Hv / Hk value heads to each):

    in_proj_qkvz    per key head: q dk rows, k dk, v r dv, z r dv
    in_proj_ba      per key head: b r rows, a r

Tensors of layer N: `linear_attn.{in_proj_qkvz,in_proj_ba,conv1d,norm,out_proj}.weight`, `linear_attn.{A_log,dt_bias}` or
`self_attn.{q,k,v,o}_proj.weight`, `self_attn.{q,k}_norm.weight` [D]; `mlp.gate.weight`, `mlp.experts.E.{gate,up,down}_proj.weight`,
`mlp.shared_expert.{gate,up,down}_proj.weight`, `mlp.shared_expert_gate.weight`. `mtp.*` is not used. Checked against transformers 5.24,
models/qwen3_next.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder
from rimuru_models.delta_net import GatedDeltaNet
from rimuru_models.gated_attention import GatedAttention
from rimuru_models.moe import SharedSparseMoe
from rimuru_models.recurrent_config import RecurrentConfig


class InterleavedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet whose projections are stored key head by key head."""

    @staticmethod
    def pieces(prefix: str, mixer: RecurrentConfig) -> list[tuple[str, int, int]]:
        """As `GatedDeltaNet.pieces`."""
        qkvz, ba = f"{prefix}.in_proj_qkvz.weight", f"{prefix}.in_proj_ba.weight"
        ratio = mixer.value_heads // mixer.key_heads
        q = k = mixer.key_dim
        v = z = ratio * mixer.value_dim
        pieces = []
        for name, before, count, stride in (
            (qkvz, 0, q, q + k + v + z),
            (qkvz, q, k, q + k + v + z),
            (qkvz, q + k, v, q + k + v + z),
            (qkvz, q + k + v, z, q + k + v + z),
            (ba, 0, ratio, 2 * ratio),
            (ba, ratio, ratio, 2 * ratio),
        ):
            starts = (before + head * stride for head in range(mixer.key_heads))
            pieces += [(name, start, start + count) for start in starts]
        return pieces


class Qwen3NextForCausalLM(MoeDecoder):
    """The shared decoder with gated attention, Gated DeltaNet and a gated shared expert."""

    attention_class = GatedAttention
    recurrent_class = InterleavedDeltaNet
    moe_class = SharedSparseMoe
