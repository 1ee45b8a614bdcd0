"""Which tensors a model needs, by name and shape, and where a checkpoint keeps them. No torch: sizes come from headers and config alone.

Canonical names are the ones below; a checkpoint may differ in two ways, and both are read:
  block   Mixtral files say `block_sparse_moe` where all others (and re-saved Mixtral files) say `mlp`
  experts one tensor a projection (`mlp.experts.7.up_proj.weight`; Mixtral: w1 = gate, w3 = up, w2 = down), or fused per layer:
          `mlp.experts.gate_up_proj` [E, 2f, d] (gate rows first) and `mlp.experts.down_proj` [E, d, f], with or without `.weight`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.headers import TensorInfo
from rimuru_models.index import CheckpointIndex

Shape = tuple[int, ...]

FLOAT_DTYPES = ("F32", "F16", "BF16")
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_MIXTRAL_BLOCK = "block_sparse_moe"
_OURS = re.compile(r"model\.(layers\.|embed_tokens\.|norm\.)|lm_head\.")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # old exports carry this table; it follows from rope_theta


def dense_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor that is not a routed expert, in load order. Tied embeddings count once."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            shapes[f"{attention}.{name}.weight"] = (rows, hidden)
            if config.attention_bias:
                shapes[f"{attention}.{name}.bias"] = (rows,)
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            shapes[f"{attention}.q_norm.weight"] = (head_dim if per_head else q_rows,)
            shapes[f"{attention}.k_norm.weight"] = (head_dim if per_head else kv_rows,)
        shapes[f"{attention}.o_proj.weight"] = (hidden, q_rows)
        if config.output_bias:
            shapes[f"{attention}.o_proj.bias"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if layer in config.moe_layers:
            shapes[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
            if config.shared_intermediate is not None:
                shapes |= _mlp_shapes(f"{prefix}.mlp.shared_expert", hidden, config.shared_intermediate)
                shapes[f"{prefix}.mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            assert config.dense_intermediate is not None
            shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, config.dense_intermediate)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def dense_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes that `load_model` allocates: all dense weights at `itemsize` bytes an element, and the float32 rotary frequencies."""
    return sum(map(_numel, dense_shapes(config).values())) * itemsize + config.head_dim // 2 * 4


def expert_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one expert: gate, up and down at `itemsize` bytes an element."""
    return 3 * config.expert_intermediate * config.hidden_size * itemsize


def num_parameters(config: ModelConfig) -> int:
    """All parameters, dense and routed."""
    routed = len(config.moe_layers) * config.num_experts * expert_bytes(config, 1)
    return sum(map(_numel, dense_shapes(config).values())) + routed


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of one layer's experts on disk. fused: (gate_up, down); otherwise one (gate, up, down) an expert."""

    fused: tuple[str, str] | None
    per_expert: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class TensorMap:
    """Where a checkpoint keeps what the model needs.

    Attributes:
        dense: canonical name -> name on disk.
        experts: layer -> ExpertNames, for every sparse layer.
        expert_dtype: the one safetensors dtype of all routed experts.
        ignored: tensors of the checkpoint that the model does not use, sorted.
        lm_head_copy: name on disk of a second output matrix although embeddings are tied, or None; it must equal the embeddings.
    """

    dense: dict[str, str]
    experts: dict[int, ExpertNames]
    expert_dtype: str
    ignored: tuple[str, ...]
    lm_head_copy: str | None


def resolve(index: CheckpointIndex, config: ModelConfig) -> TensorMap:
    """Find and check every tensor from the headers alone.

    Raises:
        CheckpointError: a tensor is missing, has another shape or no float dtype, the experts mix dtypes, or tensors are there that
            the config knows nothing of (more layers, more experts, other modules); names file and tensor.
    """
    return _Resolver(index, config).resolve()


class _Resolver:
    def __init__(self, index: CheckpointIndex, config: ModelConfig) -> None:
        self.index = index
        self.config = config
        self.used: set[str] = set()
        self.blocks = (_MIXTRAL_BLOCK, "mlp") if config.model_type == "mixtral" else ("mlp",)

    def resolve(self) -> TensorMap:
        dense = {name: self.find_dense(name, shape) for name, shape in dense_shapes(self.config).items()}
        experts = {layer: self.find_experts(layer) for layer in self.config.moe_layers}
        lm_head_copy = None
        if self.config.tie_word_embeddings and LM_HEAD in self.index.tensors and LM_HEAD not in self.used:
            self.check(LM_HEAD, (self.config.vocab_size, self.config.hidden_size))
            lm_head_copy = LM_HEAD
        return TensorMap(dense, experts, self.one_expert_dtype(experts), self.leftovers(), lm_head_copy)

    def files(self) -> str:
        names = sorted(path.name for path in self.index.headers)
        return f"{self.index.model_dir} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"

    def check(self, name: str, shape: Shape) -> None:
        path, info = self.index.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(info.shape)}, but config.json makes it {list(shape)}.",
                hint="config.json and weights are not of the same model: download both again.",
            )
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} is stored as {info.dtype}; only {', '.join(FLOAT_DTYPES)} can be computed with."
            )
        self.used.add(name)

    def require(self, candidates: list[str], shape: Shape) -> str:
        for name in candidates:
            if name in self.index.tensors:
                self.check(name, shape)
                return name
        also = f" (nor {', '.join(map(repr, candidates[1:]))})" if len(candidates) > 1 else ""
        raise CheckpointError(
            f"{self.files()} lacks tensor {candidates[0]!r}{also} of shape {list(shape)}.",
            hint="The download is incomplete, or config.json belongs to another model.",
        )

    def find_dense(self, name: str, shape: Shape) -> str:
        candidates = [name]
        if name.endswith(".mlp.gate.weight"):
            candidates = [name.replace(".mlp.", f".{block}.") for block in self.blocks]
        elif name == EMBEDDING and self.config.tie_word_embeddings:
            candidates = [EMBEDDING, LM_HEAD]
        return self.require(candidates, shape)

    def find_experts(self, layer: int) -> ExpertNames:
        config, tensors = self.config, self.index.tensors
        hidden, width, count = config.hidden_size, config.expert_intermediate, config.num_experts
        for block in self.blocks:
            for suffix in ("", ".weight"):
                gate_up, down = (f"model.layers.{layer}.{block}.experts.{part}{suffix}" for part in ("gate_up_proj", "down_proj"))
                if gate_up in tensors:
                    self.check(gate_up, (count, 2 * width, hidden))
                    return ExpertNames((gate_up, self.require([down], (count, hidden, width))), ())
        gate, up, down = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        found = []
        for expert in range(count):
            candidates = [f"model.layers.{layer}.{block}.experts.{expert}" for block in self.blocks]
            parts = ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width)))
            names = [self.require([f"{prefix}.{part}.weight" for prefix in candidates], shape) for part, shape in parts]
            found.append((names[0], names[1], names[2]))
        return ExpertNames(None, tuple(found))

    def one_expert_dtype(self, experts: dict[int, ExpertNames]) -> str:
        first: tuple[str, Path, TensorInfo] | None = None
        for names in experts.values():
            for name in names.fused or [part for parts in names.per_expert for part in parts]:
                path, info = self.index.tensors[name]
                if first is None:
                    first = name, path, info
                elif info.dtype != first[2].dtype:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is {info.dtype}, but {first[0]!r} in {first[1].name} is {first[2].dtype}; "
                        "all experts of a model must have one dtype."
                    )
        assert first is not None
        return first[2].dtype

    def leftovers(self) -> tuple[str, ...]:
        """Unused tensors that are none of the model's business; any inside its own modules mean that the config is wrong."""
        ignored = sorted(self.index.tensors.keys() - self.used)
        for name in ignored:
            if not _OURS.match(name) or _DERIVED.search(name) or (name == LM_HEAD and self.config.tie_word_embeddings):
                continue
            where = f"{self.index.tensors[name][0]}: tensor {name[:200]!r}"
            layer, expert = _LAYER.match(name), _EXPERT.search(name)
            if layer and int(layer[1]) >= self.config.num_layers:
                raise CheckpointError(
                    f"{where} belongs to a layer that config.json does not have (num_hidden_layers {self.config.num_layers})."
                )
            if layer and int(layer[1]) not in self.config.moe_layers and ".experts." in name:
                raise CheckpointError(f"{where} is an expert, but config.json makes layer {layer[1]} a dense layer.")
            if expert and int(expert[1]) >= self.config.num_experts:
                raise CheckpointError(f"{where} is an expert that config.json does not have ({self.config.num_experts} experts a layer).")
            raise CheckpointError(f"{where} has no place in a {self.config.architecture} as config.json describes it.")
        return tuple(ignored)
