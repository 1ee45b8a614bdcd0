"""Weights of a GGUF file as numpy arrays, for the building of the demonstration model: tensors of type F32, Q4_1 and Q8_0 as float32.

The header is read by `rimuru_models.gguf`, which trusts nothing in it; what converts blocks there needs torch, which the hub does without.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rimuru_models.gguf import GGUFTensor
from rimuru_models.gguf.header import GGUFHeader, read_gguf_header

_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
# name of a type -> (dtype of one block, values in a block)
_KINDS = {"F32": (np.dtype("<f4"), 1), "Q4_1": (_Q4_1, 32), "Q8_0": (_Q8_0, 32)}


class GGUFFile:
    """An open GGUF file: metadata, `tensors`, and `read` for the weights. Use it as a context manager.

    Raises:
        CheckpointError: anything malformed, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header: GGUFHeader = read_gguf_header(path)
        self._header = header
        self.integer, self.number, self.string = header.integer, header.number, header.string
        self.strings, self.integers = header.strings, header.integers
        self.tensors: dict[str, GGUFTensor] = header.tensors
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Arrays from `read` are copies and stay valid."""
        # After an interrupted `read`, its view of the mapping lives on in the traceback; the mapping then goes when that does.
        with contextlib.suppress(BufferError):
            self._data.close()

    def tensor(self, name: str) -> GGUFTensor:
        """Where tensor `name` lies. Raises CheckpointError when the file lacks it."""
        if name not in self.tensors:
            raise self._header.broken(f"tensor {name!r} is missing")
        return self.tensors[name]

    def read(self, name: str, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `first` up to `last` (exclusive; None: to the end) of the slowest dimension, float32, a copy."""
        tensor = self.tensor(name)
        if tensor.kind not in _KINDS:
            raise self._header.broken(f"tensor {name!r} is stored as {tensor.kind}; only {', '.join(_KINDS)} are read here")
        last = tensor.shape[0] if last is None else last
        assert 0 <= first < last <= tensor.shape[0], (name, first, last)
        shape = (last - first, *tensor.shape[1:])
        block, per_block = _KINDS[tensor.kind]
        row_values = math.prod(tensor.shape[1:])
        # A one-dimensional quantised tensor is one row of blocks: it is only ever read whole.
        assert row_values % per_block == 0 or shape == tensor.shape, (name, first, last)
        start = tensor.start + first * row_values // per_block * block.itemsize
        blocks = np.frombuffer(self._data, block, math.prod(shape) // per_block, start)
        return _dequantise(blocks, tensor.kind).reshape(shape)


def _dequantise(blocks: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float32]:
    """Blocks as float32, flat. Q8_0: w = scale·q, 32 signed bytes a block. Q4_1: w = scale·q + minimum, 32 values a block:
    the low nibbles of 16 bytes are values 0 to 15, the high nibbles values 16 to 31."""
    if kind == "F32":
        values: npt.NDArray[np.float32] = blocks.astype(np.float32)
        return values
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == "Q8_0":
        scaled: npt.NDArray[np.float32] = scale * blocks["values"]
        return scaled.reshape(-1)
    quants = np.empty((len(blocks), 32), np.float32)
    quants[:, :16] = blocks["nibbles"] & 15
    quants[:, 16:] = blocks["nibbles"] >> 4
    quants *= scale
    quants += blocks["minimum"].astype(np.float32)[:, None]
    return quants.reshape(-1)
