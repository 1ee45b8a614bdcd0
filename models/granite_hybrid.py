"""Granite 4.0 H (tiny, small): Mamba-2 layers with a few of attention, and a shared expert that is simply added.

    h           = embedding_multiplier * embed[ids];  each branch is multiplied by residual_multiplier before it is added
    mixers      Mamba-2 (mamba2.py) or attention, as layer_types says; attention has scale attention_multiplier and mostly no positions
    router      softmax over the k largest logits, which is the softmax over all, rescaled
    layer       routed(x) + shared(x), both of the same normed x
    logits      lm_head(h) / logits_scaling

Tensors of layer N: `mamba.{in_proj,conv1d,norm,out_proj}.weight`, `mamba.conv1d.bias`, `mamba.{A_log,D,dt_bias}` or
`self_attn.{q,k,v,o}_proj.weight`; `block_sparse_moe.input_linear.weight` [E, 2f, d] (gate rows first), `.output_linear.weight` [E, d, f],
`.router.layer.weight` [E, d]; `shared_mlp.input_linear.weight` [2s, d], `shared_mlp.output_linear.weight` [d, s]. Checked against
transformers 5.24, models/granitemoehybrid.
"""

from __future__ import annotations

from rimuru_models.decoder import MoeDecoder
from rimuru_models.mamba2 import Mamba2Mixer
from rimuru_models.moe import SummedSparseMoe


class GraniteMoeHybridForCausalLM(MoeDecoder):
    """The shared decoder with Mamba-2 and a summed shared expert."""

    recurrent_class = Mamba2Mixer
    moe_class = SummedSparseMoe
