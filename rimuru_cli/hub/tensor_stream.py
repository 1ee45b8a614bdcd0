"""Writing a safetensors file tensor by tensor: bfloat16, a header computed beforehand, a sha256 taken on the way.

Format: u64 length of the header (little endian), the header as JSON (padded with spaces), then the tensors' bytes. The padding puts
the first byte of data on a 4096-byte boundary, so tensors whose sizes are multiples of 256 bytes stay aligned in a mapping.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

DATA_ALIGNMENT = 4096
_BF16_BYTES = 2


def to_bfloat16(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Bit patterns of `values` in bfloat16, same shape: first to float32, then to the nearest, ties to even.

    Values must be finite (ValueError): a NaN could be rounded to an infinity by the integer trick.
    """
    single = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(single).all():
        raise ValueError("a weight is not finite")
    bits = single.view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16)


class Bfloat16Stream:
    """Writes the tensors of `shapes` (name -> shape), in that order, into a new file.

    `total_bytes` is the size of the finished file. After the `with` block the file is complete and flushed to the disk, and
    `sha256` is the hex digest of what was written. OSError (a full disk, for one) comes through as it is.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._path = path
        self._expected = [(name, shape) for name, shape in shapes.items()]
        self._next = 0
        self._rows = 0
        self._head = _header(shapes)
        self.total_bytes = len(self._head) + sum(math.prod(shape) for shape in shapes.values()) * _BF16_BYTES
        self.written_bytes = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hex digest of everything written so far."""
        return self._hash.hexdigest()

    def __enter__(self) -> Bfloat16Stream:
        self._file = self._path.open("xb")
        try:
            self._append(self._head)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if error is None:
                assert self._next == len(self._expected), f"{len(self._expected) - self._next} tensors were not written"
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, name: str, bits: npt.NDArray[np.uint16]) -> None:
        """Append the next tensor, or some more of its rows, given as bfloat16 bit patterns."""
        expected, shape = self._expected[self._next]
        self._rows += len(bits)
        assert (name, bits.shape[1:]) == (expected, shape[1:]) and self._rows <= shape[0], (name, bits.shape, expected, shape)
        self._append(np.ascontiguousarray(bits, dtype="<u2").data.cast("B"))
        if self._rows == shape[0]:
            self._next, self._rows = self._next + 1, 0

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.written_bytes += len(data)


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The length field and the JSON header of a file that holds `shapes` in this order, all bfloat16."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        stop = position + math.prod(shape) * _BF16_BYTES
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(table, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
