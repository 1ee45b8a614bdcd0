"""Checkpoints of a true shape with random weights, made in memory: for speed the values do not matter, only the shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.bench.hybrid_shapes import HYBRID_SHAPES
from rimuru_cli.bench.packed import QUANTS, RandomPages, random_codes
from rimuru_kernels.packed_weights import Codes, PackedFormat, pack
from rimuru_models.config import ModelConfig
from rimuru_models.dense import cut, stack
from rimuru_models.layout import dense_shapes, stays_packed
from rimuru_models.quantization.formats import WeightFormats
from rimuru_models.weights import ExpertTensors

SMALL_SHAPE = "tiny"
"""A shape that runs anywhere."""

SMALL_SHAPES = (SMALL_SHAPE, "tiny-hybrid")
"""All that do."""

_BLOCK = 1 << 22
_BLOCK_ROWS = 1024
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

_QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
}

SHAPES: dict[str, dict[str, Any]] = HYBRID_SHAPES | {
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    # The same kinds of layers, small enough for a laptop's processor: for trying the bench itself.
    "tiny": {
        **_QWEN3_30B,
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 32,
        "max_position_embeddings": 4096,
    },
}
# A third of the layers, for a GPU that is at hand for a minute only: as much work a layer, and as many sequences in a third of the memory.
SHAPES["qwen1.5-moe-8-layers"] = SHAPES["qwen1.5-moe-a2.7b"] | {"num_hidden_layers": 8}


class SyntheticReader:
    """Looks like an open checkpoint of a shape, with random weights.

    Args:
        shape: a key of `SHAPES`.
        top_k: experts per token instead of the shape's own.
        dtype: of all weights that are not packed.
        quant: a key of `QUANTS`: what the experts are packed as; None: plain numbers.
        dense: likewise the dense matrices, all but routers.
    """

    def __init__(
        self,
        shape: str,
        *,
        top_k: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        quant: str | None = None,
        dense: str | None = None,
    ) -> None:
        config = ModelConfig.from_dict(SHAPES[shape], where=shape)
        self.config = config if top_k is None else replace(config, top_k=top_k)
        self.expert_dtype = dtype
        self._shapes = dense_shapes(self.config)
        self._block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
        experts = None if quant is None else QUANTS[quant]
        self.compute_dtype = dtype
        name = _DTYPE_NAMES[dtype]
        fmt = None if dense is None else QUANTS[dense].gate_up
        kept = {n: fmt for n, s in self._shapes.items() if fmt is not None and len(s) == 2 and stays_packed(self.config, n, fmt)}
        self.formats = WeightFormats(dict.fromkeys(self.config.moe_layers, experts), kept, name, name)
        self._pages = None if experts is None else RandomPages(experts, self.config.expert_intermediate, self.config.hidden_size)

    def dense_view(self, name: str) -> Tensor:
        """A dense tensor: norms are ones, all else repeats one random block."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.expert_dtype)
        return self._repeat(shape)

    def dense_codes(self, name: str) -> tuple[Codes, PackedFormat] | None:
        """See `WeightReader.dense_codes`: a random block of codes, again and again."""
        fmt = self.formats.dense.get(name)
        if fmt is None:
            return None
        rows, columns = self._shapes[name]
        block = -(-_BLOCK_ROWS // fmt.group_rows) * fmt.group_rows
        codes = random_codes(fmt, min(rows, block), columns, 0)
        repeats = -(-rows // block)
        return cut(stack([codes] * repeats), fmt, 0, rows), fmt

    def dense_page(self, name: str) -> Tensor:
        """See `WeightReader.dense_page`."""
        held = self.dense_codes(name)
        assert held is not None, "only quantised matrices are pages"
        return pack(*held)

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """One expert: parts of the random block at an offset of its own."""
        f, d = self.config.expert_intermediate, self.config.hidden_size
        start = (layer * 131 + expert * 17) * 64 % max(1, _BLOCK - f * d)
        part = self._block[start : start + f * d]
        return ExpertTensors(part.view(f, d), part.view(f, d), part.view(d, f))

    def expert_packed(self, layer: int, expert: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        """See `WeightReader.expert_packed`."""
        assert self._pages is not None, "the experts of this shape are plain"
        self._pages.write(layer * 131 + expert, pages, tiles)

    def check_tied(self) -> None:
        """Nothing to check: there is no second output matrix."""

    def close(self) -> None:
        """Nothing to give up."""

    def _repeat(self, shape: Sequence[int]) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        return self._block.repeat(-(-count // _BLOCK))[:count].view(tuple(shape))
