"""Where a checkpoint keeps the tensors of a model, found and checked from the headers alone. No torch.

Canonical names are those of `layout.py`; a checkpoint may differ in these ways, and all are read:
  prefix  the text model of a multimodal checkpoint lies under `model.language_model.`, or where it always does (re-saved alone)
  block   Mixtral files say `block_sparse_moe` where all others (and re-saved Mixtral files) say `mlp`
  experts one tensor a projection (`mlp.experts.7.up_proj.weight`; Mixtral: w1 = gate, w3 = up, w2 = down), or fused per layer:
          `mlp.experts.gate_up_proj` [E, 2f, d] (gate rows first) and `mlp.experts.down_proj` [E, d, f], with or without `.weight`;
          Granite: `block_sparse_moe.input_linear.weight` and `.output_linear.weight`, of the same shapes
  router  `mlp.gate.weight`; Granite: `block_sparse_moe.router.layer.weight`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.headers import TensorInfo
from rimuru_models.index import CheckpointIndex
from rimuru_models.layout import EMBEDDING, LM_HEAD, Shape, dense_shapes

FLOAT_DTYPES = ("F32", "F16", "BF16")

_MIXTRAL_BLOCK = "block_sparse_moe"
_NESTED = "model.language_model."
_OURS = re.compile(r"model\.(language_model\.)?(layers\.|embed_tokens\.|norm\.)|lm_head\.")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # old exports carry this table; it follows from rope_theta
_UNUSED_PARTS = (
    ("the part that reads images", ("model.visual.", "visual.")),
    ("the head that guesses several tokens at once", ("mtp.",)),
)


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


def unused_parts(ignored: Sequence[str]) -> tuple[str, ...]:
    """What of a checkpoint is not used, in words for a person: one phrase a part, with the number of its tensors."""
    counts = [(words, sum(name.startswith(prefixes) for name in ignored)) for words, prefixes in _UNUSED_PARTS]
    return tuple(f"{words} ({count} tensors)" for words, count in counts if count)


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
        nested = config.model_type.startswith("qwen3_5_moe") and f"{_NESTED}embed_tokens.weight" in index.tensors
        self.prefix = _NESTED if nested else "model."

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
        name = self.prefix + name.removeprefix("model.") if name.startswith("model.") else name
        candidates = [name]
        if name.endswith(".mlp.gate.weight"):
            candidates = [name.replace(".mlp.", f".{block}.") for block in self.blocks]
            if self.config.model_type == "granitemoehybrid":
                router = name.replace(".mlp.gate.", ".block_sparse_moe.router.")
                candidates = [router.replace(".weight", ".layer.weight"), router]
        elif name == self.prefix + EMBEDDING.removeprefix("model.") and self.config.tie_word_embeddings:
            candidates = [name, LM_HEAD]
        return self.require(candidates, shape)

    def find_experts(self, layer: int) -> ExpertNames:
        config, tensors = self.config, self.index.tensors
        hidden, width, count = config.hidden_size, config.expert_intermediate, config.num_experts
        for gate_up, down in self.fused_names(f"{self.prefix}layers.{layer}"):
            if gate_up in tensors:
                self.check(gate_up, (count, 2 * width, hidden))
                return ExpertNames((gate_up, self.require([down], (count, hidden, width))), ())
        gate, up, down = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        found = []
        for expert in range(count):
            candidates = [f"{self.prefix}layers.{layer}.{block}.experts.{expert}" for block in self.blocks]
            parts = ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width)))
            names = [self.require([f"{prefix}.{part}.weight" for prefix in candidates], shape) for part, shape in parts]
            found.append((names[0], names[1], names[2]))
        return ExpertNames(None, tuple(found))

    def fused_names(self, layer: str) -> list[tuple[str, str]]:
        if self.config.model_type == "granitemoehybrid":
            block = f"{layer}.block_sparse_moe"
            linear = f"{block}.input_linear.weight", f"{block}.output_linear.weight"
            return [linear, (f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")]
        starts = [(f"{layer}.{block}.experts", suffix) for block in self.blocks for suffix in ("", ".weight")]
        return [(f"{start}.gate_up_proj{suffix}", f"{start}.down_proj{suffix}") for start, suffix in starts]

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
