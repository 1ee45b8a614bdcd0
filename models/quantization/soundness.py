"""A look at all scales of a model, a small part of its bytes: one that is no finite number makes NaN of all that follows. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru_kernels.packed_weights.format import Scale
from rimuru_models.config import ModelConfig
from rimuru_models.gguf.files import GGUFFiles
from rimuru_models.gguf.kinds import BY_NAME, PACKED
from rimuru_models.gguf.sound import wild_scales
from rimuru_models.index import CheckpointIndex, open_index
from rimuru_models.quantization.scheme import ARRAY_DTYPES, FLOAT_SCALES, all_finite

_AT_ONCE = 16 << 20
_KINDS: dict[str, Scale] = FLOAT_SCALES | {"F8_E8M0": "e8m0", "U8": "e8m0", "F8_E4M3": "e4m3"}


def unsound_scales(model: Path) -> Iterator[tuple[Path, str]]:
    """File and name of every tensor of a model's files that has such a scale.

    Raises:
        CheckpointError, NotFoundError: it is no model that can be read.
    """
    index = open_index(model)
    yield from _blocks(index.gguf) if index.gguf is not None else _tensors(index)


def _tensors(index: CheckpointIndex) -> Iterator[tuple[Path, str]]:
    quantization = ModelConfig.from_dir(index.model_dir).quantization
    suffixes = {scheme.parts(64, 64)["scale"].suffix for scheme in (quantization.schemes if quantization is not None else ())}
    # All experts of a layer in one tensor may be named without `.weight`.
    endings = tuple(suffixes | {suffix.removeprefix(".weight") for suffix in suffixes})
    for name, (path, info) in index.tensors.items():
        if endings and name.endswith(endings) and info.dtype in _KINDS:
            dtype, start = ARRAY_DTYPES[info.dtype], index.headers[path].data_offset + info.start
            if any(not all_finite(part.view(dtype), _KINDS[info.dtype]) for part in _read(path, start, info.stop - info.start, _AT_ONCE)):
                yield path, name


def _blocks(files: GGUFFiles) -> Iterator[tuple[Path, str]]:
    for name, (path, tensor) in files.tensors.items():
        if tensor.kind in PACKED:
            piece = _AT_ONCE // BY_NAME[tensor.kind].num_bytes * BY_NAME[tensor.kind].num_bytes
            if any(wild_scales(tensor.kind, part) for part in _read(path, tensor.start, tensor.stop - tensor.start, piece)):
                yield path, name


def _read(path: Path, start: int, num_bytes: int, piece: int) -> Iterator[NDArray[Any]]:
    """Bytes of a file, `piece` at a time."""
    with path.open("rb") as file:
        file.seek(start)
        while num_bytes:
            data = file.read(min(piece, num_bytes))
            if not data:
                return  # it shrank, which others say
            num_bytes -= len(data)
            yield np.frombuffer(data, np.uint8)
