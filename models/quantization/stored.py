"""Where a quantised matrix lies in a checkpoint, found and checked from the headers alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.errors import CheckpointError
from rimuru_models.index import CheckpointIndex
from rimuru_models.quantization.scheme import Part, Scheme, Shape


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised matrix, or a piece of one.

    Attributes:
        scheme: how it is kept.
        fmt: what it is in a page.
        rows, columns: its shape.
        names: role of a part -> name of the tensor.
        first: row of the stored matrix at which it begins: not 0 for up, where gate and up are stored as one.
        index: which matrix of the tensors [E, ...], where all experts of a layer are stored as one; else None.
    """

    scheme: Scheme
    fmt: PackedFormat
    rows: int
    columns: int
    names: Mapping[str, str]
    first: int = 0
    index: int | None = None


@dataclass(frozen=True)
class Found:
    """Tensors that together are a quantised matrix, or one for each expert of a layer.

    names: role -> name. dtypes: role -> safetensors dtype. extras: tensors that belong to it and are not needed.
    """

    scheme: Scheme
    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    extras: tuple[str, ...]


def find(index: CheckpointIndex, schemes: Iterable[Scheme], base: str, rows: int, columns: int, experts: int | None = None) -> Found | None:
    """Look for a quantised matrix.

    Args:
        base: name of the module, without `.weight`.
        rows, columns: its shape.
        experts: look for the matrices of so many experts in one tensor.

    Returns:
        None if no tensor is there that would show one.

    Raises:
        CheckpointError: one is there, but none of the schemes fits; names file and tensor.
    """
    problem: CheckpointError | None = None
    for scheme in schemes:
        if experts is not None and not scheme.fused:
            continue
        parts = _parts(scheme, rows, columns)
        for short in (False,) if experts is None else (True, False):
            found = _fit(index, scheme, parts, base, experts, short)
            if isinstance(found, Found):
                return found
            problem = problem or found
    if problem is not None:
        raise problem
    return None


@cache
def _parts(scheme: Scheme, rows: int, columns: int) -> dict[str, Part]:
    return scheme.parts(rows, columns)


def _fit(
    index: CheckpointIndex, scheme: Scheme, parts: Mapping[str, Part], base: str, experts: int | None, short: bool
) -> Found | CheckpointError | None:
    """The parts if all fit, what is wrong if the first one is there, None if it is not. `short`: names lack `.weight`."""
    names: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for role, part in parts.items():
        name = base + (part.suffix.replace(".weight", "", 1) if short else part.suffix)
        entry = index.tensors.get(name)
        if entry is None:
            if not names:
                return None
            if part.optional:
                continue
            first = index.tensors[next(iter(names.values()))][0]
            return CheckpointError(
                f"{first}: the quantised matrix {base!r} lacks its tensor {name!r}.",
                hint="The download is incomplete, or quantization_config in config.json belongs to another model.",
            )
        path, info = entry
        shapes = part.shapes if experts is None else tuple((experts, *shape) for shape in part.shapes)
        if info.dtype not in part.dtypes:
            return CheckpointError(f"{path}: tensor {name!r} is stored as {info.dtype}, expected {' or '.join(part.dtypes)}.")
        if info.shape not in shapes:
            return CheckpointError(
                f"{path}: tensor {name!r} has shape {list(info.shape)}, but config.json makes it {_either(shapes)}.",
                hint="config.json and weights are not of the same model: download both again.",
            )
        names[role], dtypes[role] = name, info.dtype
    extras = tuple(base + suffix for suffix in scheme.extras if base + suffix in index.tensors)
    return Found(scheme, names, dtypes, extras)


def _either(shapes: tuple[Shape, ...]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)
