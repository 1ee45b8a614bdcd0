"""The decoder that all families share; each family chooses its attention, its sparse block and what stands in attention's place.

h = embed[ids];  each layer: h += mixer(norm1(h)); h += mlp(norm2(h));  hidden = norm(h);  logits = lm_head hidden

Granite multiplies the embeddings and each branch by constants, and divides the logits by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.nn.functional import linear

from rimuru_kernels.rms_norm import add_rms_norm, rms_norm
from rimuru_kernels.rotary import rotary_tables
from rimuru_models.delta_net import GatedDeltaNet
from rimuru_models.dense import product, rows_of
from rimuru_models.interfaces import ForwardContext
from rimuru_models.layers import Attention, DenseMLP
from rimuru_models.layout import EMBEDDING, FINAL_NORM
from rimuru_models.mamba2 import Mamba2Mixer
from rimuru_models.moe import SparseMoe

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


class DecoderLayer:
    """Weights of one layer."""

    def __init__(self, model: type[MoeDecoder], loader: DenseLoader, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self.mixer_norm = loader.norm(f"{prefix}.input_layernorm.weight")
        mixer_class = model.recurrent_class if layer in loader.config.recurrent_layers else model.attention_class
        assert mixer_class is not None, "a family whose config names recurrent layers has a class for them"
        self.mixer = mixer_class(loader, layer)
        self.mlp_norm = loader.norm(f"{prefix}.post_attention_layernorm.weight")
        sparse = layer in loader.config.moe_layers
        self.mlp: SparseMoe | DenseMLP = model.moe_class(loader, layer) if sparse else DenseMLP(loader, f"{prefix}.mlp")


class MoeDecoder:
    """A pre-norm mixture-of-experts decoder; see `interfaces.CausalLM`.

    Attributes:
        config: the model's architecture.
        dense_bytes: bytes of the weights held here.
    """

    attention_class: ClassVar[type[Attention]] = Attention
    recurrent_class: ClassVar[type[GatedDeltaNet] | type[Mamba2Mixer] | None] = None
    moe_class: ClassVar[type[SparseMoe]] = SparseMoe

    def __init__(self, loader: DenseLoader) -> None:
        self.config = loader.config
        self.dtype = loader.dtype
        self.embedding = loader.matrix(EMBEDDING)
        self.layers = [DecoderLayer(type(self), loader, layer) for layer in range(self.config.num_layers)]
        self.norm = loader.norm(FINAL_NORM)
        self._next_norms = [*(layer.mixer_norm for layer in self.layers[1:]), self.norm]
        self.output = loader.output_matrix(self.embedding)
        self.inv_freq = loader.inv_freq()
        self.dense_bytes = loader.loaded_bytes

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Run all layers over the tokens of one step.

        Args:
            token_ids: [T] int64, each below vocab_size.
            context: positions [T], KV cache, experts and, for recurrent layers, states. Call under torch.inference_mode().

        Returns:
            [T, d] after the final norm, in the model's dtype.
        """
        eps, factor = self.config.rms_eps, self.config.residual_multiplier
        cos, sin = rotary_tables(context.positions, self.inv_freq, self.dtype)
        hidden = rows_of(self.embedding, token_ids, self.dtype)
        if self.config.embedding_multiplier != 1.0:
            hidden.mul_(self.config.embedding_multiplier)
        normed = rms_norm(hidden, self.layers[0].mixer_norm, eps)
        # Each sublayer's output is added and normed for the next one in one pass.
        for layer, next_norm in zip(self.layers, self._next_norms, strict=True):
            mixed = layer.mixer.forward(normed, cos, sin, context)
            if factor != 1.0:
                mixed.mul_(factor)
            hidden, out = layer.mlp.forward_residual(mixed, hidden, layer.mlp_norm, eps, context)
            if factor != 1.0:
                out.mul_(factor)
            hidden, normed = add_rms_norm(out, hidden, next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d] -> float32 [R, vocab_size]."""
        output = self.output
        out = (linear(hidden, output) if isinstance(output, Tensor) else product(hidden, output)).float()
        return out if self.config.logits_divisor == 1.0 else out.div_(self.config.logits_divisor)
