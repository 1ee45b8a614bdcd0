"""The header of a GGUF file (versions 2 and 3): its metadata, and where its tensors lie. No torch.

Layout, little endian: magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries; the entries (string key, u32 type,
value); the tensors (string name, u32 number of dimensions, u64 dimensions with the fastest first, u32 type, u64 offset); padding to
`general.alignment`, then the data, from where offsets count. A string is a u64 length and UTF-8 bytes; an array a u32 element type, a u64
length and the elements (github.com/ggml-org/ggml, docs/gguf.md).

Nothing in the file is trusted: every count and length is checked against the bytes that are there before it is used. Arrays, which may hold
a vocabulary, are only walked over; their elements are made when they are asked for.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.cursor import REDOWNLOAD, SCALARS, STRING, Array, Cursor, NeedsMoreError, made
from rimuru_models.gguf.kinds import KINDS, OTHERS, SUPPORTED

_MAX_TENSORS, _MAX_ENTRIES = 1 << 18, 1 << 16
_MAX_DIMENSIONS = 4
_MAX_KEY, _MAX_NAME = 1 << 16, 1 << 10
_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_FIRST_READ, _GROWTH = 4 << 20, 4
MAX_HEADER_BYTES = 256 << 20
"""The largest headers known hold a vocabulary of some ten megabytes."""
_BIG_ENDIAN = (2 << 24, 3 << 24)  # what 2 and 3 look like in the other byte order


class GGUFTensor(NamedTuple):
    """Where a tensor lies. kind: name of its type; shape: slowest dimension first; start, stop: bytes from the beginning of the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class GGUFHeader:
    """A checked header.

    Attributes:
        where: names the file in errors.
        file_bytes: size of the file.
        version: 2 or 3.
        tensors: name -> GGUFTensor, in the file's order.
        data_offset: bytes from the beginning of the file to the first byte of data.
    """

    def __init__(self, data: bytes, file_bytes: int, where: str) -> None:
        """Use `parse_gguf_header` or `read_gguf_header`."""
        cursor = Cursor(data, file_bytes, where)
        self.where = where
        self.file_bytes = file_bytes
        self.version = _version(cursor)
        num_tensors = cursor.count("the number of tensors", _MAX_TENSORS)
        self._metadata: dict[str, Any] = {}
        for _ in range(cursor.count("the number of metadata entries", _MAX_ENTRIES)):
            key = cursor.text("a metadata key", _MAX_KEY)
            if key in self._metadata:
                raise cursor.broken(f"metadata {key[:200]!r} is there twice")
            self._metadata[key] = cursor.value(key[:200])
        alignment = self._metadata.get("general.alignment", _ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment.bit_count() != 1
        ):
            raise cursor.broken("general.alignment is not a power of two")
        places = _tensor_infos(cursor, num_tensors)
        self.data_offset = -(-cursor.position // alignment) * alignment
        self.tensors = _placed(cursor, places, self.data_offset, alignment)
        self._data = data[: cursor.position]

    def broken(self, why: str, hint: str | None = None) -> CheckpointError:
        """An error to raise about this file; `why` is a phrase without a full stop."""
        return CheckpointError(f"{self.where} is not a usable GGUF file: {why}.", hint=hint)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def names(self) -> list[str]:
        """Names of all metadata entries."""
        return list(self._metadata)

    def get(self, key: str) -> Any:
        """A number, bool or string of the metadata, or a list of them; None when there is none."""
        value = self._metadata.get(key)
        return self._elements(value, key) if isinstance(value, Array) else value

    def scalar(self, key: str) -> Any:
        """As `get`, but None for an array, which is then not made."""
        value = self._metadata.get(key)
        return None if isinstance(value, Array) else value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer. Raises CheckpointError when it is something else, or missing without a default."""
        value = self.scalar(key) if key in self._metadata else default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._not(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises CheckpointError as `integer`."""
        value = self.scalar(key) if key in self._metadata else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._not(key, "a finite number")
        return float(value)

    def string(self, key: str, default: str | None = None) -> str:
        """A string. Raises CheckpointError as `integer`."""
        value = self.scalar(key) if key in self._metadata else default
        if not isinstance(value, str):
            raise self._not(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises CheckpointError when it is something else."""
        value = self.scalar(key) if key in self._metadata else default
        if not isinstance(value, bool):
            raise self._not(key, "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings. Raises CheckpointError when it is missing or something else."""
        value = self._metadata.get(key)
        if not isinstance(value, Array) or value.kind != STRING:
            raise self._not(key, "a list of strings")
        return [str(item) for item in self._elements(value, key)]

    def integers(self, key: str) -> list[int]:
        """A list of integers. Raises CheckpointError when it is missing or something else."""
        value = self._metadata.get(key)
        if not isinstance(value, Array) or SCALARS.get(value.kind, "f") in ("f", "d", "?"):
            raise self._not(key, "a list of integers")
        return [int(item) for item in self._elements(value, key)]

    def numbers(self, key: str) -> list[float]:
        """A list of numbers. Raises CheckpointError when it is missing or something else."""
        value = self._metadata.get(key)
        if not isinstance(value, Array) or SCALARS.get(value.kind, "?") == "?":
            raise self._not(key, "a list of numbers")
        return [float(item) for item in self._elements(value, key)]

    def length(self, key: str) -> int | None:
        """Number of elements of an array, without making them; None when there is no such array."""
        value = self._metadata.get(key)
        return value.length if isinstance(value, Array) else None

    def _not(self, key: str, wanted: str) -> CheckpointError:
        what = "is missing" if key not in self._metadata else f"is not {wanted}"
        return self.broken(f"metadata {key!r} {what}")

    def _elements(self, array: Array, key: str) -> list[Any]:
        cursor = Cursor(self._data, self.file_bytes, self.where)
        cursor.position = array.start
        return made(cursor, array.kind, array.length, key)


def _version(cursor: Cursor) -> int:
    start = cursor.take(4, "its first bytes")
    if cursor.data[start : start + 4] != b"GGUF":
        raise cursor.broken("it does not start with GGUF")
    version = int(cursor.scalar("I", "the version"))
    if version in _BIG_ENDIAN:
        raise CheckpointError(
            f"{cursor.where} was made for computers of the other byte order (big endian), which is not read.",
            hint="Get the little-endian file of this model; nearly all are.",
        )
    if version not in (2, 3):
        raise CheckpointError(
            f"{cursor.where} has version {version} of GGUF; versions 2 and 3 are read.", hint="Get a newer file of this model."
        )
    return version


def _tensor_infos(cursor: Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """name -> (shape, number of the type, offset)."""
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text("a tensor's name", _MAX_NAME)
        if name in found:
            raise cursor.broken(f"tensor {name!r} is there twice")
        dimensions = int(cursor.scalar("I", f"the number of dimensions of {name!r}"))
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise cursor.broken(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(int(cursor.scalar("Q", f"the shape of {name!r}")) for _ in range(dimensions))[::-1]
        found[name] = (shape, int(cursor.scalar("I", f"the type of {name!r}")), int(cursor.scalar("Q", f"the offset of {name!r}")))
    return found


def _placed(cursor: Cursor, places: dict[str, tuple[tuple[int, ...], int, int]], base: int, alignment: int) -> dict[str, GGUFTensor]:
    """Turn offsets into byte ranges of the file; they must lie inside it, aligned and apart from each other."""
    tensors: dict[str, GGUFTensor] = {}
    for name, (shape, number, offset) in places.items():
        kind = KINDS.get(number)
        if kind is None:
            called = f" ({OTHERS[number]}, which is no longer in use)" if number in OTHERS else ""
            raise CheckpointError(
                f"{cursor.where} is not a usable GGUF file: tensor {name!r} has the unknown type {number}{called}.",
                hint=f"Supported: {', '.join(SUPPORTED)}.",
            )
        if shape[-1] % kind.weights or not all(shape):
            raise cursor.broken(f"tensor {name!r} has shape {list(shape)}, which {kind.name} cannot hold")
        start = base + offset
        stop = start + math.prod(shape) // kind.weights * kind.num_bytes
        if offset % alignment or stop > cursor.file_bytes:
            raise cursor.broken(f"tensor {name!r} lies at bytes {start} to {stop}, the file has {cursor.file_bytes}")
        tensors[name] = GGUFTensor(kind.name, shape, start, stop)
    end, previous = base, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise cursor.broken(f"tensors {previous!r} and {name!r} overlap")
        end, previous = tensor.stop, name
    return tensors


def parse_gguf_header(data: bytes, file_bytes: int, where: str) -> GGUFHeader:
    """Check the header of a GGUF file, wherever its bytes came from.

    Args:
        data: the beginning of the file; it may hold more than the header.
        file_bytes: size of the whole file.
        where: names the file in errors.

    Raises:
        NeedsMoreError: the header goes on behind `data`.
        CheckpointError: anything malformed: promises that the file is too short for, unknown types, absurd counts, names that are there
            twice, tensors that overlap; a version or byte order that is not read.
    """
    return GGUFHeader(data, file_bytes, where)


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of one GGUF file; the data is not touched.

    Raises:
        CheckpointError: as `parse_gguf_header`; or it cannot be read, or its header is absurdly long.
    """
    if path.exists() and not path.is_file():  # a folder, a pipe, a device: opening some of these would wait for ever
        raise CheckpointError(f"{path} is not a regular file.")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(_FIRST_READ)
            while True:
                try:
                    return parse_gguf_header(data, size, str(path))
                except NeedsMoreError as more:
                    wanted = next_read(len(data), more.at_least, size)
                    if wanted is None:
                        raise CheckpointError(f"{path} is not a usable GGUF file: its header is absurdly long.") from None
                    data += file.read(wanted - len(data))
                    if len(data) < wanted:
                        raise CheckpointError(f"{path} ended while its header was read.", hint=REDOWNLOAD) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None


def next_read(have: int, at_least: int, file_bytes: int) -> int | None:
    """How many bytes of a file's beginning to have next, when `have` are too few; None: no header is that long."""
    wanted = min(file_bytes, max(have * _GROWTH, at_least, _FIRST_READ))
    return wanted if at_least <= MAX_HEADER_BYTES else None
