"""Safetensors headers, read as if a stranger had written them. No torch.

File format: 8 bytes little-endian length N, N bytes of JSON ({name: {dtype, shape, data_offsets: [start, stop]}}, optional
`__metadata__` of strings), then the data; offsets count from the first data byte (github.com/huggingface/safetensors, "Format").
Every promise of the header is checked against the file before anything trusts it: a header that lies raises `CheckpointError`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rimuru_models.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_MAX_DIMENSIONS = 8
_REDOWNLOAD = "The file is damaged or was not downloaded completely: download it again."

# Bits an element; the narrow types exist so that a header with them is understood, the loader decides what it can compute with.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class TensorInfo(NamedTuple):
    """Where one tensor lies: `start` and `stop` are bytes counted from the first data byte of its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header.

    Attributes:
        tensors: name -> TensorInfo, in file order of the JSON.
        data_offset: bytes from the beginning of the file to the first data byte.
        metadata: the `__metadata__` strings, or an empty dict.
    """

    tensors: dict[str, TensorInfo]
    data_offset: int
    metadata: dict[str, str]


def load_json(text: bytes, where: str) -> Any:
    """Parse JSON strictly: UTF-8, no duplicate keys, no NaN, bounded nesting. Infinity is read: configs name unbounded limits so.

    Raises:
        CheckpointError: names `where`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {twice[:80]!r} appears twice")
        return result

    def constant(name: str) -> float:
        if name != "Infinity":
            raise ValueError(f"{name} is not a JSON number")
        return math.inf

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise CheckpointError(f"{where} nests brackets too deeply to be a checkpoint's JSON.", hint=_REDOWNLOAD) from None
    except ValueError as error:  # also JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise CheckpointError(f"{where} is not valid JSON: {error}.", hint=_REDOWNLOAD) from None


def brief(value: object) -> str:
    """A value from a stranger's JSON as a short piece of an error message (a deeply nested one would break repr)."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor_info(where: str, entry: Any, data_bytes: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: its header entry lacks dtype, shape or data_offsets.", hint=_REDOWNLOAD)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {brief(dtype)}.")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_count(size) for size in shape):
        raise CheckpointError(f"{where}: its shape is not a list of at most {_MAX_DIMENSIONS} sizes.", hint=_REDOWNLOAD)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{where}: its data_offsets are not two byte counts.", hint=_REDOWNLOAD)
    start, stop = offsets
    if not start <= stop <= data_bytes:
        raise CheckpointError(
            f"{where}: its data lies at bytes {start} to {stop}, but the file holds {data_bytes} data bytes.", hint=_REDOWNLOAD
        )
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if bits != (stop - start) * 8:
        raise CheckpointError(
            f"{where}: {dtype} {shape} needs {bits // 8} bytes, but its data_offsets span {stop - start}.", hint=_REDOWNLOAD
        )
    return TensorInfo(dtype, tuple(shape), start, stop)


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of one safetensors file; the data is not touched.

    Raises:
        CheckpointError: truncated file, absurd length, bad JSON, offsets outside the file or overlapping, or a size that is not
            product(shape) x itemsize; names the file and, where there is one, the tensor.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a folder, a pipe, a device: opening some of these would wait for ever
        raise CheckpointError(f"{path} is not a regular file.")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} has {size} bytes: too short for a safetensors file.", hint=_REDOWNLOAD)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file: it announces a header of {length} bytes.", hint=_REDOWNLOAD)
            if length < 2 or 8 + length > size:
                raise CheckpointError(f"{path} announces a header of {length} bytes, but the file has {size} bytes.", hint=_REDOWNLOAD)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(text) != length:
        raise CheckpointError(f"{path} ended while its header was read.", hint=_REDOWNLOAD)
    return parse_header(text, size, str(path))


def parse_header(text: bytes, file_bytes: int, where: str) -> SafetensorsHeader:
    """Check the JSON of a safetensors header, wherever it came from.

    Args:
        text: the JSON, without the 8 bytes in front of it.
        file_bytes: size of the whole file.
        where: names the file in errors.

    Raises:
        CheckpointError: as `read_header`.
    """
    entries = load_json(text, f"the header of {where}")
    if not isinstance(entries, dict):
        raise CheckpointError(f"the header of {where} is not a JSON object.", hint=_REDOWNLOAD)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is not a map of strings.", hint=_REDOWNLOAD)
    data_bytes = file_bytes - 8 - len(text)
    tensors = {name: _tensor_info(f"{where}: tensor {name[:200]!r}", entry, data_bytes) for name, entry in entries.items()}
    _check_layout(where, tensors, data_bytes)
    return SafetensorsHeader(tensors, 8 + len(text), metadata)


def _check_layout(where: str, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    """Tensors tile the data exactly, as the format demands: no overlap, no hole, no tail."""
    end, previous = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start < end:
            raise CheckpointError(f"{where}: tensors {previous[:200]!r} and {name[:200]!r} overlap.", hint=_REDOWNLOAD)
        if info.start > end:
            raise CheckpointError(f"{where}: {info.start - end} bytes before tensor {name[:200]!r} belong to no tensor.", hint=_REDOWNLOAD)
        end, previous = info.stop, name
    if end != data_bytes:
        raise CheckpointError(f"{where}: the header accounts for {end} data bytes, but the file holds {data_bytes}.", hint=_REDOWNLOAD)
