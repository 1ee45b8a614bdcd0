"""Qwen3.5-MoE and Qwen3.6-MoE (35B-A3B, 122B-A10B, 397B-A17B): the text model of the multimodal checkpoints.

As Qwen3-Next (qwen3_next.py), but for these:

    router      always rescales
    layers      all sparse
    DeltaNet    separate projections in_proj_qkv (q, then k, then v), in_proj_z, in_proj_b, in_proj_a
    positions   the three positions of a token (time, height, width) are equal in text, so the interleaved multimodal embedding is the plain
                partial one

config.json nests the text model under `text_config`, and its tensors lie under `model.language_model.`; a text model saved alone has
neither. Released files have fused experts (`mlp.experts.gate_up_proj` [E, 2f, d], `mlp.experts.down_proj` [E, d, f]), quantised and
re-saved ones one tensor a projection. `model.visual.*` and `mtp.*` are not used. Checked against transformers 5.24, models/qwen3_5_moe.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder
from rimuru_models.delta_net import GatedDeltaNet
from rimuru_models.gated_attention import GatedAttention
from rimuru_models.moe import SharedSparseMoe


class Qwen3_5MoeForCausalLM(MoeDecoder):
    """The shared decoder with gated attention, Gated DeltaNet and a gated shared expert."""

    attention_class = GatedAttention
    recurrent_class = GatedDeltaNet
    moe_class = SharedSparseMoe


Qwen3_5MoeForConditionalGeneration = Qwen3_5MoeForCausalLM
