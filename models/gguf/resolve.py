"""Every tensor that a model needs, found in a GGUF file and checked from its header alone; and what is stored how. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.files import GGUFFiles
from rimuru_models.gguf.kinds import BY_NAME, FLOATS, PACKED, SUPPORTED
from rimuru_models.gguf.names import ExpertSource, Order, Source, belongs_to_no_layer, dense_sources, expert_source
from rimuru_models.layout import Shape, dense_shapes
from rimuru_models.quantization.formats import LayerFormats, WeightFormats

if TYPE_CHECKING:
    from rimuru_models.tensor_map import Piece, TensorMap


@dataclass(frozen=True)
class GGUFMap:
    """Where a GGUF file keeps what the model needs.

    Attributes:
        dense: canonical name -> Source.
        experts: layer -> ExpertSource, for every sparse layer.
        formats: what is stored how.
        ignored: tensors that the model does not use, sorted.
    """

    dense: dict[str, Source]
    experts: dict[int, ExpertSource]
    formats: WeightFormats
    ignored: tuple[str, ...]


def resolve_gguf(files: GGUFFiles, config: ModelConfig) -> GGUFMap:
    """Find and check every tensor.

    Raises:
        CheckpointError: a tensor is missing, has another shape or a type that is not computed with, or tensors are there that have no place
            in such a model; names file and tensor.
    """
    present = frozenset(files.tensors)
    dense = dense_sources(config, present)
    shapes = dense_shapes(config)
    for name, source in dense.items():
        _check_dense(files, source, shapes[name])
    experts: dict[int, ExpertSource] = {}
    for layer in config.moe_layers:
        experts[layer] = expert_source(config, layer, present)
        _check_experts(files, experts[layer], config)
    used = {name for found in dense.values() for name in found.names} | {name for routed in experts.values() for name in routed.names}
    return GGUFMap(dense, experts, _formats(files, dense, experts, shapes), _leftovers(files, used, config))


def _check_dense(files: GGUFFiles, source: Source, shape: Shape) -> None:
    found = [_require(files, name, shape) for name in source.names]
    matrix = len(shape) == 2 and shape[0] > 1
    if matrix:
        fits = all(len(one) == 2 and one[1] == shape[1] for one in found) and sum(one[0] for one in found) == shape[0]
    else:
        # Vectors may have dimensions of 1, or be cut into groups; the convolution has lost its dimension of 1.
        fits = sum(map(math.prod, found)) == math.prod(shape) and (len(shape) < 3 or found[0][-1] == shape[-1])
    if not fits:
        raise _wrong_shape(files, source.names[0], shape)


def _check_experts(files: GGUFFiles, source: ExpertSource, config: ModelConfig) -> None:
    width, hidden, count = config.expert_intermediate, config.hidden_size, config.num_experts
    up, down = (width, hidden), (hidden, width)
    shapes: list[Shape] = [up, up, down]
    if source.stacked:
        shapes = [(count, *shape) for shape in ([(2 * width, hidden), down] if len(source.stacked) == 2 else shapes)]
    for names in (source.stacked,) if source.stacked else source.single:
        for name, shape in zip(names, shapes, strict=True):
            if _require(files, name, shape) != shape:
                raise _wrong_shape(files, name, shape)


def _require(files: GGUFFiles, name: str, shape: Shape) -> Shape:
    if name not in files.tensors:
        raise CheckpointError(
            f"{files.path} lacks tensor {name!r} of shape {list(shape)}.",
            hint="The file is incomplete, or its metadata is of another model.",
        )
    path, tensor = files.tensors[name]
    if tensor.kind not in SUPPORTED:
        raise CheckpointError(
            f"{path}: tensor {name!r} is stored as {tensor.kind}, which cannot be computed with.",
            hint=f"Supported: {', '.join(SUPPORTED)}.",
        )
    return tensor.shape


def _wrong_shape(files: GGUFFiles, name: str, shape: Shape) -> CheckpointError:
    path, tensor = files.tensors[name]
    return CheckpointError(
        f"{path}: tensor {name!r} has shape {list(tensor.shape)}, but its metadata makes it {list(shape)}.",
        hint="The file contradicts itself: get it from elsewhere.",
    )


def _leftovers(files: GGUFFiles, used: set[str], config: ModelConfig) -> tuple[str, ...]:
    """Tensors of layers that guess further tokens are none of the model's business; any others mean that something is not understood."""
    ignored = sorted(files.tensors.keys() - used)
    for name in ignored:
        if not belongs_to_no_layer(name, config):
            raise CheckpointError(
                f"{files.tensors[name][0]}: tensor {name[:200]!r} has no place in a {config.architecture} as its metadata describes it."
            )
    return tuple(ignored)


def _formats(files: GGUFFiles, dense: dict[str, Source], experts: dict[int, ExpertSource], shapes: dict[str, Shape]) -> WeightFormats:
    packed_dense = {name: packed for name, source in dense.items() if (packed := dense_format(files, source, shapes[name])) is not None}
    layers = {layer: _layer_formats(files, source) for layer, source in experts.items()}
    compute = _compute_dtype(files, [*dense.values(), *experts.values()])
    plain = {files.tensors[name][1].kind for layer, source in experts.items() if layers[layer] is None for name in source.names}
    expert_dtype = compute
    if plain:  # F32 is what blocks mean, where a layer keeps its experts in several ways
        expert_dtype = next(iter(plain)) if len(plain) == 1 and plain <= set(FLOATS) else "F32"
    kinds = {PACKED[kind]: kind for kind in PACKED}
    mixed = {layer: tuple(sorted(_kinds(files, experts[layer]))) for layer in layers if layers[layer] is None}
    others = {name: " and ".join(sorted(_kinds(files, source))) for name, source in dense.items() if name not in packed_dense}
    return WeightFormats(
        experts=layers,
        dense=packed_dense,
        expert_dtype=expert_dtype,
        compute_dtype=compute,
        names=kinds,
        mixed={layer: ways for layer, ways in mixed.items() if not set(ways) <= set(FLOATS)},
        others={name: kind for name, kind in others.items() if kind != compute},
    )


def _kinds(files: GGUFFiles, source: Source | ExpertSource) -> set[str]:
    return {files.tensors[name][1].kind for name in source.names}


def _layer_formats(files: GGUFFiles, source: ExpertSource) -> LayerFormats | None:
    """None where gate and up differ, or are not all quantised: such experts become plain numbers when they are read."""
    rows = (source.stacked,) if source.stacked else source.single
    first = [{files.tensors[name][1].kind for name in names[:-1]} for names in rows]
    last = {files.tensors[names[-1]][1].kind for names in rows}
    gate_up = set().union(*first)
    if len(gate_up) != 1 or len(last) != 1 or not gate_up | last <= PACKED.keys():
        return None
    return LayerFormats(PACKED[gate_up.pop()], PACKED[last.pop()])


def dense_format(files: GGUFFiles, source: Source, shape: Shape) -> PackedFormat | None:
    """What a page of a dense matrix would hold; None for vectors, plain numbers, and what cannot be moved in whole blocks."""
    kinds = {files.tensors[name][1].kind for name in source.names}
    kind = kinds.pop()
    if kinds or kind not in PACKED or source.change != "none" or len(shape) != 2 or shape[0] == 1:
        return None
    if source.columns is not None and block_columns(source.columns(), BY_NAME[kind].weights) is None:
        return None
    return PACKED[kind]


def block_columns(columns: Order, weights: int) -> Order | None:
    """The order of whole blocks of `weights` columns that an order of columns comes down to; None if it tears blocks apart."""
    firsts = columns.reshape(-1, weights)
    whole = bool((firsts[:, 0] % weights == 0).all()) and bool((firsts == firsts[:, :1] + np.arange(weights)).all())
    return firsts[:, 0] // weights if whole else None


def _compute_dtype(files: GGUFFiles, sources: list[Source | ExpertSource]) -> str:
    """F32 or F16 where all matrices are; otherwise BF16, which models are trained in and which has room for every scale."""
    kinds = {tensor.kind for source in sources for name in source.names if len((tensor := files.tensors[name][1]).shape) > 1}
    matrices = {kind for kind in kinds if kind != "F32"} or {"F32"}
    return matrices.pop() if matrices in ({"F16"}, {"F32"}) else "BF16"


@dataclass(frozen=True)
class Joined:
    """Tensors of a file that a canonical tensor is made of; `names` as of `quantization.stored.Stored`."""

    names: Mapping[str, str]


def gguf_tensor_map(files: GGUFFiles, config: ModelConfig) -> TensorMap:
    """What `tensor_map.resolve` says of safetensors, for those who count bytes and name formats.

    Raises:
        CheckpointError: as `resolve_gguf`.
    """
    from rimuru_models.tensor_map import LayerExperts, TensorMap

    found = resolve_gguf(files, config)
    dense = {
        name: source.names[0] if len(source.names) == 1 else Joined({str(i): n for i, n in enumerate(source.names)})
        for name, source in found.dense.items()
    }
    experts = {layer: LayerExperts(source.stacked or None, source.single) for layer, source in found.experts.items()}
    return TensorMap(cast("dict[str, Piece]", dense), experts, found.formats, found.ignored, None)
