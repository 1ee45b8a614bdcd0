"""A small GGUF reader (versions 2 and 3): metadata, and tensors of type F32, Q4_1 and Q8_0 as float32.

Layout, little endian: magic "GGUF", u32 version, u64 tensor count, u64 metadata count; metadata (string key, u32 type, value);
tensor infos (string name, u32 number of dimensions, u64 dimensions with the fastest first, u32 type, u64 offset); padding to
`general.alignment`; tensor data. A string is a u64 length and UTF-8 bytes. Formulas of the quantised blocks are in `_dequantise`.

Nothing in the file is trusted: every count and length is checked against the bytes that are there before it is used.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rimuru_models.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 16
_MAX_DIMENSIONS = 4

_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
_F32 = np.dtype("<f4")
# GGML type number -> (name, dtype of one block, values in a block)
_KINDS = {0: ("F32", _F32, 1), 3: ("Q4_1", _Q4_1, 32), 8: ("Q8_0", _Q8_0, 32)}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. shape: row major (slowest dimension first); start, stop: byte positions in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int
    stop: int


class _Cursor:
    """Reads forward through the mapped file and refuses to leave it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    def broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name} is not a usable GGUF file: {why}.")

    def take(self, length: int, what: str) -> int:
        """Move over `length` bytes and return where they start."""
        start = self.position
        if length > self.size - start:
            raise self.broken(f"{what} at byte {start} needs {length} bytes, the file has {self.size - start} left")
        self.position = start + length
        return start

    def scalar(self, code: str, what: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, limit: int) -> int:
        value = int(self.scalar("Q", what))
        if value > limit:
            raise self.broken(f"{what} is {value}, more than the {limit} that are possible")
        return value

    def text(self, what: str) -> str:
        length = int(self.scalar("Q", what))
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} at byte {start} is not UTF-8") from error

    def value(self, key: str) -> Any:
        """One metadata value: a number, a bool, a string, or a list of one of them."""
        kind = int(self.scalar("I", f"type of {key!r}"))
        if kind == _STRING:
            return self.text(f"value of {key!r}")
        if kind != _ARRAY:
            return self.scalar(self._code(kind, key), f"value of {key!r}")
        element, what = int(self.scalar("I", f"element type of {key!r}")), f"array {key!r}"
        if element == _STRING:
            length = self.count(f"length of {what}", (self.size - self.position) // 8)
            return [self.text(what) for _ in range(length)]
        code = self._code(element, key)
        width = struct.calcsize("<" + code)
        length = self.count(f"length of {what}", (self.size - self.position) // width)
        return list(struct.unpack_from(f"<{length}{code}", self.data, self.take(length * width, what)))

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self.broken(f"metadata {key!r} has the unknown or unsupported type {kind}")
        return _SCALARS[kind]


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors`, and `read` for the weights. Use it as a context manager.

    Raises CheckpointError for anything malformed, OSError when the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CheckpointError(f"{path.name} is not a usable GGUF file: it is empty.") from error
        self._cursor = _Cursor(self._data, path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Arrays from `read` are copies and stay valid."""
        # After an interrupted `read`, its view of the mapping lives on in the traceback; the mapping then goes when that does.
        with contextlib.suppress(BufferError):
            self._data.close()

    def _parse(self) -> None:
        cursor = self._cursor
        magic = cursor.take(4, "magic")
        if self._data[magic : magic + 4] != b"GGUF":
            raise cursor.broken("it does not start with GGUF")
        version = int(cursor.scalar("I", "version"))
        if version not in (2, 3):
            raise cursor.broken(f"version {version} is not 2 or 3")
        num_tensors = cursor.count("number of tensors", _MAX_ENTRIES)
        for _ in range(cursor.count("number of metadata entries", _MAX_ENTRIES)):
            key = cursor.text("metadata key")
            if key in self.metadata:
                raise cursor.broken(f"metadata {key!r} is there twice")
            self.metadata[key] = cursor.value(key)
        relative: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = cursor.text("tensor name")
            if name in relative:
                raise cursor.broken(f"tensor {name!r} is there twice")
            dimensions = int(cursor.scalar("I", f"number of dimensions of {name!r}"))
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise cursor.broken(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(int(cursor.scalar("Q", f"shape of {name!r}")) for _ in range(dimensions))[::-1]
            relative[name] = (shape, int(cursor.scalar("I", f"type of {name!r}")), int(cursor.scalar("Q", f"offset of {name!r}")))
        self._place(relative)

    def _place(self, relative: dict[str, tuple[tuple[int, ...], int, int]]) -> None:
        """Turn offsets into byte ranges of the file; they must lie inside it, aligned and apart from each other."""
        cursor = self._cursor
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise cursor.broken(f"general.alignment {alignment!r} is not a power of two")
        base = -(-cursor.position // alignment) * alignment
        for name, (shape, kind, offset) in relative.items():
            if kind not in _KINDS:
                raise cursor.broken(f"tensor {name!r} has type {kind}; only F32 (0), Q4_1 (3) and Q8_0 (8) are read")
            _, block, per_block = _KINDS[kind]
            if shape[-1] % per_block or not all(shape):
                raise cursor.broken(f"tensor {name!r} has shape {shape}, which its type cannot hold")
            start = base + offset
            stop = start + math.prod(shape) // per_block * block.itemsize
            if offset % alignment or stop > cursor.size:
                raise cursor.broken(f"tensor {name!r} lies at bytes {start} to {stop}, the file has {cursor.size}")
            self.tensors[name] = GGUFTensor(shape, kind, start, stop)
        end, previous = base, ""
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise cursor.broken(f"tensors {previous!r} and {name!r} overlap")
            end, previous = tensor.stop, name

    def tensor(self, name: str) -> GGUFTensor:
        """Where tensor `name` lies. Raises CheckpointError when the file lacks it."""
        if name not in self.tensors:
            raise self._cursor.broken(f"tensor {name!r} is missing")
        return self.tensors[name]

    def read(self, name: str, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `first` up to `last` (exclusive; None: to the end) of the slowest dimension, float32, a copy."""
        tensor = self.tensor(name)
        last = tensor.shape[0] if last is None else last
        assert 0 <= first < last <= tensor.shape[0], (name, first, last)
        shape = (last - first, *tensor.shape[1:])
        _, block, per_block = _KINDS[tensor.kind]
        row_values = math.prod(tensor.shape[1:])
        # A one-dimensional quantised tensor is one row of blocks: it is only ever read whole.
        assert row_values % per_block == 0 or shape == tensor.shape, (name, first, last)
        start = tensor.start + first * row_values // per_block * block.itemsize
        blocks = np.frombuffer(self._data, block, math.prod(shape) // per_block, start)
        return _dequantise(blocks, tensor.kind).reshape(shape)

    def integer(self, key: str) -> int:
        """An integer of the metadata. Raises CheckpointError when it is missing or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._cursor.broken(f"metadata {key!r} should be an integer, not {type(value).__name__}")
        return value

    def number(self, key: str) -> float:
        """A finite float (or integer) of the metadata. Raises CheckpointError when it is missing or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self._cursor.broken(f"metadata {key!r} should be a finite number, not {value!r}")
        return float(value)

    def string(self, key: str) -> str:
        """A string of the metadata. Raises CheckpointError when it is missing or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self._cursor.broken(f"metadata {key!r} should be a string, not {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings of the metadata. Raises CheckpointError when it is missing or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._cursor.broken(f"metadata {key!r} should be a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers of the metadata. Raises CheckpointError when it is missing or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise self._cursor.broken(f"metadata {key!r} should be a list of integers")
        return value


def _dequantise(blocks: npt.NDArray[Any], kind: int) -> npt.NDArray[np.float32]:
    """Blocks as float32, flat. Q8_0: w = scale·q, 32 signed bytes a block. Q4_1: w = scale·q + minimum, 32 values a block:
    the low nibbles of 16 bytes are values 0 to 15, the high nibbles values 16 to 31."""
    if kind == 0:
        values: npt.NDArray[np.float32] = blocks.astype(np.float32)
        return values
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == 8:
        scaled: npt.NDArray[np.float32] = scale * blocks["values"]
        return scaled.reshape(-1)
    quants = np.empty((len(blocks), 32), np.float32)
    quants[:, :16] = blocks["nibbles"] & 15
    quants[:, 16:] = blocks["nibbles"] >> 4
    quants *= scale
    quants += blocks["minimum"].astype(np.float32)[:, None]
    return quants.reshape(-1)
