"""Where a checkpoint keeps the tensors of a model, found and checked from the headers alone. No torch.

Canonical names are those of `layout.py`; a checkpoint may differ in these ways, and all are read:
  prefix  the text model of a multimodal checkpoint lies under `model.language_model.`, or where it always does (re-saved alone)
  block   Mixtral files say `block_sparse_moe` where all others (and re-saved Mixtral files) say `mlp`
  experts one tensor a projection (`mlp.experts.7.up_proj.weight`; Mixtral: w1 = gate, w3 = up, w2 = down), or fused per layer:
          `mlp.experts.gate_up_proj` [E, 2f, d] (gate rows first) and `mlp.experts.down_proj` [E, d, f], with or without `.weight`;
          Granite: `block_sparse_moe.input_linear.weight` and `.output_linear.weight`, of the same shapes
  weights numbers, or quantised matrices of several tensors each (see `quantization`), matrix by matrix
  router  `mlp.gate.weight`; Granite: `block_sparse_moe.router.layer.weight`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.resolve import gguf_tensor_map
from rimuru_models.headers import TensorInfo
from rimuru_models.index import CheckpointIndex
from rimuru_models.layout import EMBEDDING, FINAL_NORM, LM_HEAD, Shape, dense_shapes
from rimuru_models.quantization.formats import LayerFormats, WeightFormats
from rimuru_models.quantization.precision import format_name
from rimuru_models.quantization.stored import Found, Stored, find

FLOAT_DTYPES = ("F32", "F16", "BF16")

_MIXTRAL_BLOCK = "block_sparse_moe"
_NESTED = "model.language_model."
_OURS = re.compile(r"model\.(language_model\.)?(layers\.|embed_tokens\.|norm\.)|lm_head\.")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # old exports carry this table; it follows from rope_theta
_KV_SCALE = re.compile(r"\.self_attn\.(?:[qkv]_proj\.)?(?:[qkv]|prob)_(?:scale|zero_point)$")  # of a quantised cache, which ours is not
_QUANTISED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_UNUSED_PARTS = (
    ("the part that reads images", ("model.visual.", "visual.")),
    ("the head that guesses several tokens at once", ("mtp.", "blk.")),
)


Piece = str | Stored
"""A matrix of a checkpoint: the name of a plain tensor, or a quantised one."""


def names_of(piece: Piece) -> tuple[str, ...]:
    """Names of all tensors that a matrix is kept in."""
    return (piece,) if isinstance(piece, str) else tuple(piece.names.values())


@dataclass(frozen=True)
class LayerExperts:
    """Where one layer's experts lie on disk.

    Attributes:
        fused: names of (gate_up, down), plain tensors of all experts (GGUF: or gate, up, down, of any type); then `per_expert` is empty.
        per_expert: otherwise one (gate, up, down) an expert.
    """

    fused: tuple[str, ...] | None
    per_expert: tuple[tuple[Piece, Piece, Piece], ...]

    def pieces(self) -> Iterator[Piece]:
        """All matrices."""
        yield from self.fused or ()
        for pieces in self.per_expert:
            yield from pieces

    def formats(self) -> LayerFormats | None:
        """How all of them are quantised; None unless all are, gate and up of all experts alike and down of all experts alike."""
        gate_up = {piece.fmt if isinstance(piece, Stored) else None for gate, up, _ in self.per_expert for piece in (gate, up)}
        down = {piece.fmt if isinstance(piece, Stored) else None for _, _, piece in self.per_expert}
        if len(gate_up) != 1 or len(down) != 1:
            return None
        first, second = gate_up.pop(), down.pop()
        return None if first is None or second is None else LayerFormats(first, second)


@dataclass(frozen=True)
class TensorMap:
    """Where a checkpoint keeps what the model needs.

    Attributes:
        dense: canonical name -> where it is on disk.
        experts: layer -> LayerExperts, for every sparse layer.
        formats: what all of it is stored as.
        ignored: tensors of the checkpoint that the model does not use, sorted.
        lm_head_copy: name on disk of a second output matrix although embeddings are tied, or None; it must equal the embeddings.
    """

    dense: dict[str, Piece]
    experts: dict[int, LayerExperts]
    formats: WeightFormats
    ignored: tuple[str, ...]
    lm_head_copy: str | None


def unused_parts(ignored: Sequence[str]) -> tuple[str, ...]:
    """What of a checkpoint is not used, in words for a person: one phrase a part, with the number of its tensors."""
    counts = [(words, sum(name.startswith(prefixes) for name in ignored)) for words, prefixes in _UNUSED_PARTS]
    return tuple(f"{words} ({count} tensors)" for words, count in counts if count)


def resolve(index: CheckpointIndex, config: ModelConfig) -> TensorMap:
    """Find and check every tensor from the headers alone.

    Raises:
        CheckpointError: a tensor is missing, has another shape or a dtype that its format does not have, plain experts mix dtypes, or
            tensors are there that the config knows nothing of (more layers, more experts, other modules); names file and tensor.
    """
    if index.gguf is not None:
        return gguf_tensor_map(index.gguf, config)
    return _Resolver(index, config).resolve()


class _Resolver:
    def __init__(self, index: CheckpointIndex, config: ModelConfig) -> None:
        self.index = index
        self.config = config
        self.schemes = () if config.quantization is None else config.quantization.schemes
        self.used: set[str] = set()
        self.known: dict[PackedFormat, PackedFormat] = {}
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
        return TensorMap(dense, experts, self.formats(dense, experts), self.leftovers(), lm_head_copy)

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
                f"{path}: tensor {name!r} is stored as {info.dtype}; only {', '.join(FLOAT_DTYPES)} can be computed with"
                f"{'' if self.schemes else ', unless quantization_config in config.json says what it means'}."
            )
        self.used.add(name)

    def require(self, candidates: list[str], shape: Shape) -> Piece:
        for name in candidates:
            entry = self.index.tensors.get(name)
            if self.schemes and len(shape) == 2 and (entry is None or entry[1].dtype not in FLOAT_DTYPES) and name.endswith(".weight"):
                found = find(self.index, self.schemes, name.removesuffix(".weight"), *shape)
                if found is not None:
                    return self.stored(found, *shape)
            if entry is not None:
                self.check(name, shape)
                return name
        also = f" (nor {', '.join(map(repr, candidates[1:]))})" if len(candidates) > 1 else ""
        hint = "The download is incomplete, or config.json belongs to another model."
        base = candidates[0].removesuffix(".weight")
        if not self.schemes and any(base + suffix in self.index.tensors for suffix in _QUANTISED):
            hint = "It seems to be quantised, but config.json has no quantization_config that would say how."
        raise CheckpointError(f"{self.files()} lacks tensor {candidates[0]!r}{also} of shape {list(shape)}.", hint=hint)

    def stored(self, found: Found, rows: int, columns: int, first: int = 0, unaligned: int = 0, index: int | None = None) -> Stored:
        """A quantised matrix of which all tensors were found. `unaligned`: the row at which a sibling of the same format begins."""
        self.used.update(found.names.values(), found.extras)
        fmt = found.scheme.packed(rows, columns, found.dtypes, first or unaligned)
        return Stored(found.scheme, self.known.setdefault(fmt, fmt), rows, columns, found.names, first, index)

    def find_dense(self, name: str, shape: Shape) -> Piece:
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

    def find_experts(self, layer: int) -> LayerExperts:
        config = self.config
        hidden, width, count = config.hidden_size, config.expert_intermediate, config.num_experts
        for gate_up, down in self.fused_names(f"{self.prefix}layers.{layer}"):
            fused = self.find_fused(gate_up, down)
            if fused is not None:
                return fused
        gate, up, down = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        found = []
        for expert in range(count):
            candidates = [f"{self.prefix}layers.{layer}.{block}.experts.{expert}" for block in self.blocks]
            parts = ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width)))
            pieces = [self.require([f"{prefix}.{part}.weight" for prefix in candidates], shape) for part, shape in parts]
            found.append((pieces[0], pieces[1], pieces[2]))
        return LayerExperts(None, tuple(found))

    def find_fused(self, gate_up: str, down: str) -> LayerExperts | None:
        """All experts of a layer in two tensors, or in two quantised matrices an expert that lie in few tensors."""
        hidden, width, count = self.config.hidden_size, self.config.expert_intermediate, self.config.num_experts
        entry = self.index.tensors.get(gate_up)
        if entry is not None and (not self.schemes or entry[1].dtype in FLOAT_DTYPES):
            self.check(gate_up, (count, 2 * width, hidden))
            second = self.require([down], (count, hidden, width))
            assert isinstance(second, str)
            return LayerExperts((gate_up, second), ())
        both = find(self.index, self.schemes, gate_up.removesuffix(".weight"), 2 * width, hidden, count)
        if both is None:
            return None
        last = find(self.index, self.schemes, down.removesuffix(".weight"), hidden, width, count)
        if last is None:
            raise CheckpointError(f"{self.files()} lacks the quantised experts {down!r}, although {gate_up!r} is there.")
        # gate and up have one format, so gate gives up whole blocks of rows where up begins inside one
        return LayerExperts(
            None,
            tuple(
                (
                    self.stored(both, width, hidden, unaligned=width, index=expert),
                    self.stored(both, width, hidden, first=width, index=expert),
                    self.stored(last, hidden, width, index=expert),
                )
                for expert in range(count)
            ),
        )

    def fused_names(self, layer: str) -> list[tuple[str, str]]:
        if self.config.model_type == "granitemoehybrid":
            block = f"{layer}.block_sparse_moe"
            linear = f"{block}.input_linear.weight", f"{block}.output_linear.weight"
            return [linear, (f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")]
        starts = [(f"{layer}.{block}.experts", suffix) for block in self.blocks for suffix in ("", ".weight")]
        return [(f"{start}.gate_up_proj{suffix}", f"{start}.down_proj{suffix}") for start, suffix in starts]

    def formats(self, dense: dict[str, Piece], experts: dict[int, LayerExperts]) -> WeightFormats:
        plain = next((piece for name in (EMBEDDING, FINAL_NORM) if isinstance(piece := dense[name], str)), None)
        assert plain is not None, "a vector is never quantised"
        layers = {layer: pieces.formats() for layer, pieces in experts.items()}
        dtype = self.one_expert_dtype(experts)
        if dtype is None or all(layers.values()):
            dtype = self.index.tensors[plain][1].dtype
        return WeightFormats(
            experts=layers,
            dense={name: piece.fmt for name, piece in dense.items() if isinstance(piece, Stored)},
            expert_dtype=dtype,
            compute_dtype=dtype,
            mixed={layer: ways for layer, pieces in experts.items() if layers[layer] is None and (ways := self.ways(pieces))},
            others={
                name: own
                for name, piece in dense.items()
                if isinstance(piece, str) and (own := self.index.tensors[piece][1].dtype) != dtype
            },
        )

    def ways(self, experts: LayerExperts) -> tuple[str, ...]:
        """What the ways are called in which experts are kept; none where they are plain numbers."""
        packed = {piece.fmt for piece in experts.pieces() if isinstance(piece, Stored)}
        plain = {self.index.tensors[piece][1].dtype for piece in experts.pieces() if isinstance(piece, str)}
        return tuple(sorted({*map(format_name, packed), *plain})) if packed else ()

    def one_expert_dtype(self, experts: dict[int, LayerExperts]) -> str | None:
        """The dtype of plain experts; None if there are none."""
        first: tuple[str, Path, TensorInfo] | None = None
        for pieces in experts.values():
            for name in pieces.pieces():
                if isinstance(name, Stored):
                    continue
                path, info = self.index.tensors[name]
                if first is None:
                    first = name, path, info
                elif info.dtype != first[2].dtype:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is {info.dtype}, but {first[0]!r} in {first[1].name} is {first[2].dtype}; "
                        "all experts of a model that are not quantised must have one dtype."
                    )
        return None if first is None else first[2].dtype

    def leftovers(self) -> tuple[str, ...]:
        """Unused tensors that are none of the model's business; any inside its own modules mean that the config is wrong."""
        ignored = sorted(self.index.tensors.keys() - self.used)
        for name in ignored:
            if not _OURS.match(name) or _DERIVED.search(name) or (name == LM_HEAD and self.config.tie_word_embeddings):
                continue
            if self.schemes and _KV_SCALE.search(name):
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
