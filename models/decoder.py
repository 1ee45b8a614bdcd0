"""The decoder that all four families share; each family chooses its attention and its sparse block.

h = embed[ids];  each layer: h += attention(norm1(h)); h += mlp(norm2(h));  hidden = norm(h);  logits = lm_head hidden
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.nn.functional import embedding, linear

from rimuru_kernels.rms_norm import add_rms_norm, rms_norm
from rimuru_kernels.rotary import rotary_tables
from rimuru_models.interfaces import ForwardContext
from rimuru_models.layers import Attention, DenseMLP
from rimuru_models.layout import EMBEDDING, FINAL_NORM
from rimuru_models.moe import SparseMoe

if TYPE_CHECKING:
    from rimuru_models.loader import DenseLoader


class DecoderLayer:
    """Weights of one layer."""

    def __init__(self, model: type[MoeDecoder], loader: DenseLoader, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self.attention_norm = loader.tensor(f"{prefix}.input_layernorm.weight")
        self.attention = model.attention_class(loader, layer)
        self.mlp_norm = loader.tensor(f"{prefix}.post_attention_layernorm.weight")
        sparse = layer in loader.config.moe_layers
        self.mlp: SparseMoe | DenseMLP = model.moe_class(loader, layer) if sparse else DenseMLP(loader, f"{prefix}.mlp")


class MoeDecoder:
    """A pre-norm mixture-of-experts decoder; see `interfaces.CausalLM`.

    Attributes:
        config: the model's architecture.
        dense_bytes: bytes of the weights held here.
    """

    attention_class: ClassVar[type[Attention]] = Attention
    moe_class: ClassVar[type[SparseMoe]] = SparseMoe

    def __init__(self, loader: DenseLoader) -> None:
        self.config = loader.config
        self.dtype = loader.dtype
        self.embedding = loader.tensor(EMBEDDING)
        self.layers = [DecoderLayer(type(self), loader, layer) for layer in range(self.config.num_layers)]
        self.norm = loader.tensor(FINAL_NORM)
        self._next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        self.output = loader.output_matrix(self.embedding)
        self.inv_freq = loader.inv_freq()
        self.dense_bytes = loader.loaded_bytes

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Run all layers over the tokens of one step.

        Args:
            token_ids: [T] int64, each below vocab_size.
            context: positions [T], KV cache and experts. Call under torch.inference_mode().

        Returns:
            [T, d] after the final norm, in the model's dtype.
        """
        eps, experts = self.config.rms_eps, context.experts
        cos, sin = rotary_tables(context.positions, self.inv_freq, self.dtype)
        hidden = embedding(token_ids, self.embedding)
        normed = rms_norm(hidden, self.layers[0].attention_norm, eps)
        # Each sublayer's output is added and normed for the next one in one pass.
        for layer, next_norm in zip(self.layers, self._next_norms, strict=True):
            hidden, normed = add_rms_norm(layer.attention.forward(normed, cos, sin, context), hidden, layer.mlp_norm, eps)
            hidden, normed = add_rms_norm(layer.mlp.forward(normed, experts), hidden, next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d] -> float32 [R, vocab_size]."""
        return linear(hidden, self.output).float()
