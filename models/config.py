"""What a checkpoint says it is: `ModelConfig`, read from config.json and validated. No torch.

Whatever would make our result differ from the reference is refused, never ignored. `families.py` knows how each family words its fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rimuru_models.config_pieces import refuse_what_we_cannot_compute
from rimuru_models.errors import CheckpointError
from rimuru_models.families import FAMILIES
from rimuru_models.fields import Fields
from rimuru_models.gguf import gguf_of, open_gguf
from rimuru_models.gguf.config import config_values
from rimuru_models.index import read_json_file
from rimuru_models.quantization.table import Quantization, read_quantization
from rimuru_models.recurrent_config import RecurrentConfig


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a supported MoE decoder. All sizes are counts of elements, never bytes.

    Attributes:
        architecture: class name in config.json, a key of `rimuru_models.ARCHITECTURES`.
        model_type: family as config.json names it.
        head_dim: width of one attention head; num_heads * head_dim need not equal hidden_size.
        rotary_dim: leading dimensions of each head that the rotary embedding turns; 0: the model knows no positions.
        attention_scale: factor on q·k.
        max_positions: longest context the model was made for, in tokens.
        moe_layers: indices of the layers with routed experts, ascending; the others have a dense MLP of `dense_intermediate`.
        expert_intermediate: f; expert matrices are gate, up [f, hidden_size] and down [hidden_size, f].
        norm_topk_prob: whether the top-k router weights are rescaled to sum to 1.
        shared_intermediate: width of the always-active shared expert, or None.
        dense_intermediate: width of the dense MLP, or None if every layer is sparse.
        attention_bias: q, k and v projections have biases; `output_bias`: so does the output projection.
        qk_norm: RMSNorm on q and k: none, over each head, or over the full projection.
        sliding_window: key j is visible to query i iff 0 <= i - j < sliding_window, in the layers of `sliding_layers`; None: no window.
        sliding_layers: indices of the layers that use the window.
        clip_qkv: q, k and v are clamped to [-clip_qkv, clip_qkv] (after any q/k norm), or None.
        gated_attention: the output of attention is multiplied by sigmoid(gate); the gate is the second half of each head of q_proj.
        shared_gate: the shared expert is multiplied by sigmoid(w_g · x).
        zero_centred_norms: norms multiply by 1 + weight, in float32, before rounding (all but the gated norm of recurrent layers).
        recurrent_layers: indices of the layers with a recurrent mixer in place of attention; `recurrent`: its shape, or None.
        embedding_multiplier, residual_multiplier: factors on the embeddings and on each branch before it is added.
        logits_divisor: the logits are divided by it.
        quantization: how matrices may be stored that are quantised; None: all are plain numbers.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rotary_dim: int
    attention_scale: float
    max_positions: int
    tie_word_embeddings: bool
    num_experts: int
    top_k: int
    expert_intermediate: int
    norm_topk_prob: bool
    moe_layers: tuple[int, ...]
    shared_intermediate: int | None = None
    dense_intermediate: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    clip_qkv: float | None = None
    gated_attention: bool = False
    shared_gate: bool = True
    zero_centred_norms: bool = False
    recurrent_layers: tuple[int, ...] = ()
    recurrent: RecurrentConfig | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    quantization: Quantization | None = None

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with keys and values, ascending."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent_layers)

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, or None for full attention."""
        return self.sliding_window if layer in self.sliding_layers else None

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelConfig:
        """Read `model_dir`/config.json, or what a GGUF file says instead.

        Raises:
            CheckpointError: unreadable, unsupported or contradictory; names the file and the field.
        """
        gguf = gguf_of(Path(model_dir))
        if gguf is not None:
            return cls.from_dict(config_values(open_gguf(gguf)), where=str(gguf))
        path = Path(model_dir) / "config.json"
        values = read_json_file(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is not a JSON object.")
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the dict of a config.json; `where` names it in errors.

        Raises:
            CheckpointError: as `from_dir`.
        """
        fields = Fields(values, where)
        architectures = fields.list_of("architectures", str, 16)
        if not architectures:
            raise fields.error("it names no architecture, so it cannot be loaded.", hint=f"Supported: {', '.join(FAMILIES)}.")
        if len(architectures) != 1 or architectures[0] not in FAMILIES:
            raise fields.error(
                f"the architecture {', '.join(architectures)[:200]} is not supported.", hint=f"Supported: {', '.join(FAMILIES)}."
            )
        architecture = architectures[0]
        family = FAMILIES[architecture]
        _check_type(fields, family.model_type, architecture)
        refuse_what_we_cannot_compute(fields)
        quantization, text = read_quantization(fields), fields
        if family.nested is not None:
            name, model_type = family.nested
            if not fields.present(name):
                raise fields.error(f"the field {name!r}, which describes the text model, is missing.")
            text = Fields(fields.mapping(name), f"{where}: {name}")
            _check_type(text, model_type, architecture)
            refuse_what_we_cannot_compute(text)
            inner = read_quantization(text)
            if quantization is not None and inner not in (None, quantization):
                raise text.error("its quantization_config contradicts the one of the whole model.")
            quantization = quantization or inner
        values = family.read(text)
        if fields.present("tie_word_embeddings"):
            values["tie_word_embeddings"] = fields.flag("tie_word_embeddings", False)
        return cls(architecture=architecture, model_type=family.model_type, quantization=quantization, **values)


def _check_type(fields: Fields, expected: str, architecture: str) -> None:
    if fields.text("model_type", expected) != expected:
        raise fields.error(f"model_type {fields.text('model_type')[:80]!r} contradicts the architecture {architecture} ({expected!r}).")
