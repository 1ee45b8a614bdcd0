"""Headers that lie, break off or explode: always CheckpointError, always with the file's name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rimuru_models.errors import CheckpointError
from rimuru_models.headers import TensorInfo, read_header

VALID: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(32)


def pack(header: object, data: bytes = DATA, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: object) -> dict[str, Any]:
    """VALID with some fields of tensor b changed; None removes the field."""
    changed = {key: value for key, value in (VALID["b"] | changes).items() if value is not None}
    return VALID | {"b": changed}


def test_a_file_of_the_library_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(3, 5, dtype=torch.float16), "s": torch.tensor(1.0), "e": torch.empty(0, 4)}, path, metadata={"k": "v"})
    header = read_header(path)
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        "w": ("F16", (3, 5)),
        "s": ("F32", ()),
        "e": ("F32", (0, 4)),
    }
    assert header.metadata == {"k": "v"}
    info = header.tensors["w"]
    assert path.read_bytes()[header.data_offset + info.start : header.data_offset + info.stop] == b"\x00\x3c" * 15


def test_the_valid_header_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(VALID))
    assert read_header(path).tensors == {"a": TensorInfo("F32", (2, 3), 0, 24), "b": TensorInfo("BF16", (4,), 24, 32)}


HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "shorter than the length": b"\x10\x00\x00",
    "only the length": struct.pack("<Q", 10),
    "length 0": struct.pack("<Q", 0) + DATA,
    "length 2^63": pack(VALID, length=1 << 63),
    "length 2^64-1": pack(VALID, length=(1 << 64) - 1),
    "length past the end": pack(VALID, length=100_000),
    "length cuts the JSON": pack(VALID, length=20),
    "not JSON": pack(b"hello there"),
    "not UTF-8": pack(b'{"\xff\xfe": 1}'),
    "not an object": pack([1, 2]),
    "nested 100,000 deep": pack(b"[" * 100_000 + b"]" * 100_000),
    "objects nested deep": pack(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "duplicate tensor": pack(
        b'{"a":{"dtype":"U8","shape":[32],"data_offsets":[0,32]},"a":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}}'
    ),
    "duplicate field": pack(b'{"a":{"dtype":"U8","dtype":"I8","shape":[32],"data_offsets":[0,32]}}'),
    "integer of 10,000 digits": pack(b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,32]}}'),
    "NaN": pack(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,32]}}'),
    "1e999": pack(b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,32]}}'),
    "metadata of numbers": pack(VALID | {"__metadata__": {"a": 1}}),
    "metadata a list": pack(VALID | {"__metadata__": []}),
    "entry a string": pack(VALID | {"b": "F32"}),
    "entry null": pack(VALID | {"b": None}),
    "no dtype": pack(entry(dtype=None)),
    "no shape": pack(entry(shape=None)),
    "no offsets": pack(entry(data_offsets=None)),
    "unknown dtype": pack(entry(dtype="F31")),
    "dtype a list": pack(entry(dtype=["BF16"])),
    "shape a number": pack(entry(shape=4)),
    "shape negative": pack(entry(shape=[-4])),
    "shape twice negative": pack(entry(shape=[-2, -2])),
    "shape float": pack(entry(shape=[4.0])),
    "shape bool": pack(entry(shape=[True, 4])),
    "shape string": pack(entry(shape=["4"])),
    "shape product overflows": pack(entry(shape=[1 << 62, 1 << 62, 4])),
    "shape of 64 ones": pack(entry(shape=[1] * 64 + [4])),
    "shape does not match": pack(entry(shape=[5])),
    "dtype does not match": pack(entry(dtype="F32")),
    "one offset": pack(entry(data_offsets=[24])),
    "offsets negative": pack(entry(data_offsets=[-8, 0])),
    "offsets reversed": pack(entry(data_offsets=[32, 24])),
    "offsets float": pack(entry(data_offsets=[24.0, 32.0])),
    "offsets bool": pack(entry(data_offsets=[False, True])),
    "offsets null": pack(entry(data_offsets=[None, 32])),
    "offsets past the end": pack(entry(data_offsets=[32, 40])),
    "offsets huge": pack(entry(data_offsets=[1 << 80, (1 << 80) + 8])),
    "overlap": pack(entry(data_offsets=[16, 24])),
    "same place twice": pack(VALID | {"c": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}),
    "hole": pack(VALID | {"b": {"dtype": "BF16", "shape": [2], "data_offsets": [28, 32]}}),
    "tail": pack(VALID, DATA + b"x"),
    "data cut": pack(VALID, DATA[:-1]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"hostile\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("name", ["no dtype", "shape does not match", "offsets past the end", "overlap", "unknown dtype"])
def test_the_error_names_the_tensor(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"'b'"):
        read_header(path)


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    whole = pack(VALID)
    path = tmp_path / "x.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(path)


def test_a_folder_or_nothing_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"absent\.safetensors"):
        read_header(tmp_path / "absent.safetensors")


mutations = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, 250), st.integers(0, 255)),
        st.tuples(st.just("cut"), st.integers(0, 250), st.just(0)),
        st.tuples(st.just("insert"), st.integers(0, 250), st.integers(0, 255)),
        st.tuples(st.just("digit"), st.integers(0, 40), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=4,
)


def mutate(whole: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    raw = bytearray(whole)
    for kind, place, value in changes:
        if kind == "byte" and place < len(raw):
            raw[place] = value
        elif kind == "cut":
            del raw[place:]
        elif kind == "insert":
            raw.insert(place, value)
        elif kind == "digit":  # stays JSON, so it reaches the checks behind the parser
            digits = [index for index, byte in enumerate(raw) if chr(byte).isdigit()]
            if place < len(digits):
                raw[digits[place]] = ord(str(value))
    return bytes(raw)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mutations)
def test_mutated_headers_only_ever_raise_checkpoint_errors(scratch: Path, changes: list[tuple[str, int, int]]) -> None:
    scratch.write_bytes(mutate(pack(VALID), changes))
    try:
        header = read_header(scratch)
    except CheckpointError as error:
        assert "x.safetensors" in str(error)
    else:  # whatever is accepted lies within the file
        size = scratch.stat().st_size
        assert all(0 <= info.start <= info.stop <= size - header.data_offset for info in header.tensors.values())
