"""Writing safetensors files tensor by tensor: whole or not at all, so that what a killed process left can be kept."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from rimuru_models.errors import CheckpointError, NoSpaceError
from rimuru_models.headers import DTYPE_BITS, read_header
from rimuru_models.weights import TORCH_DTYPES

_ALIGNMENT = 4096
_PIECE = 16 << 20
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8"}


class Promised(NamedTuple):
    """dtype (the name that safetensors has for it) and shape of a tensor to be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class ShardWriter:
    """Writes the promised tensors, in that order, into a new file, which gets its name only when it is complete and on the disk.

    Attributes:
        sha256: of all that was written so far.

    Raises:
        NoSpaceError: the disk is full.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Promised]) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        self._expected = list(tensors.items())
        self._head = _header(tensors)
        self.sha256 = hashlib.sha256()

    def __enter__(self) -> ShardWriter:
        with saying_full(self._path.parent):
            self._file = self._part.open("wb")
            self._put(self._head)
        self._next = 0
        return self

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.sha256.update(data)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        promised = self._expect(name)
        assert promised == Promised(NAMES[tensor.dtype], tuple(tensor.shape)), f"{name} is not what was promised"
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        with saying_full(self._path.parent):
            for start in range(0, len(data), _PIECE):
                self._put(data[start : start + _PIECE].data)

    def copy(self, name: str, source: BinaryIO, num_bytes: int) -> None:
        """The next tensor, from another file's present place on.

        Raises:
            CheckpointError: that file ends too early.
        """
        assert self._expect(name).num_bytes == num_bytes, f"{name} is not what was promised"
        with saying_full(self._path.parent):
            while num_bytes:
                piece = source.read(min(_PIECE, num_bytes))
                if not piece:
                    raise CheckpointError(f"{source.name} ended while tensor {name[:200]!r} was read.")
                self._put(piece)
                num_bytes -= len(piece)

    def _expect(self, name: str) -> Promised:
        expected, promised = self._expected[self._next]
        assert expected == name, f"{name} is written where {expected} was promised"
        self._next += 1
        return promised

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        complete = False
        try:
            if kind is None:
                assert self._next == len(self._expected), "a shard was left unfinished"
                with saying_full(self._path.parent):
                    self._file.flush()
                    os.fsync(self._file.fileno())
                complete = True
        finally:
            with contextlib.suppress(OSError):  # what a full disk refused is refused again
                self._file.close()
            if complete:
                os.replace(self._part, self._path)
            else:
                self._part.unlink(missing_ok=True)


def holds(path: Path, tensors: Mapping[str, Promised]) -> bool:
    """Whether a file has exactly these tensors; its data is not read."""
    if not path.is_file():
        return False
    try:
        found = read_header(path).tensors
    except CheckpointError:
        return False
    return {name: Promised(info.dtype, info.shape) for name, info in found.items()} == dict(tensors)


def sha256_of(path: Path) -> str:
    """Of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def saying_full(folder: Path) -> Iterator[None]:
    """Say in words that the disk is full.

    Raises:
        NoSpaceError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        raise NoSpaceError(
            f"The disk filled up while {folder} was written ({free / 1e6:,.0f} MB are free now).",
            hint="Make room and type the same again: finished files are kept.",
        ) from error


def _header(tensors: Mapping[str, Promised]) -> bytes:
    """Length and JSON, padded so that data begins at a multiple of 4096 bytes and experts can be mapped."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, promised in tensors.items():
        entries[name] = {"dtype": promised.dtype, "shape": list(promised.shape), "data_offsets": [start, start + promised.num_bytes]}
        start += promised.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
