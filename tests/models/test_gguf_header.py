"""GGUF headers from strangers: what they say is read, and whatever is wrong in them is refused in words."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_demo as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_models.errors import CheckpointError, NotFoundError, UsageError
from rimuru_models.gguf import find_gguf, gguf_of, open_gguf, read_gguf_header
from rimuru_models.gguf.cursor import NeedsMoreError
from rimuru_models.gguf.files import is_model_name, part_names
from rimuru_models.gguf.header import GGUFHeader, next_read, parse_gguf_header
from rimuru_models.gguf.kinds import KINDS, in_words
from rimuru_models.index import open_index

RNG = np.random.default_rng(7)
METADATA: list[tiny.Entry] = [
    ("a.name", tiny.STRING, "zoé"),
    ("a.count", tiny.U32, 7),
    ("a.rate", tiny.FLOAT32, 0.5),
    ("a.flag", tiny.BOOL, True),
    ("a.words", tiny.ARRAY, (tiny.STRING, ["x", "", "yz"])),
    ("a.numbers", tiny.ARRAY, (tiny.I32, [1, -2, 3])),
    ("a.empty", tiny.ARRAY, (tiny.STRING, [])),
]
TENSORS: list[tiny.Tensor] = [
    ("four", (2, 64), tiny.Q4_1, tiny.random_blocks(RNG, (2, 64), tiny.Q4_1)),
    ("eight", (3, 32), tiny.Q8_0, tiny.random_blocks(RNG, (3, 32), tiny.Q8_0)),
    ("plain", (5,), tiny.F32, tiny.random_blocks(RNG, (5,), tiny.F32)),
]
WHOLE = tiny.gguf_bytes(METADATA, TENSORS)


def parse(data: bytes) -> GGUFHeader:
    return parse_gguf_header(data, len(data), "x.gguf")


def test_the_types_are_those_of_the_gguf_package() -> None:
    for number, kind in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == tuple(kind)
    only_in_computations = {gguf.GGMLQuantizationType.Q8_1, gguf.GGMLQuantizationType.Q8_K}
    assert {one.value for one in gguf.GGML_QUANT_SIZES if one not in only_in_computations} == set(KINDS)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_places(version: int) -> None:
    header = parse(tiny.gguf_bytes(METADATA, TENSORS, version=version))
    assert header.version == version
    assert header.names() == [name for name, _, _ in METADATA]
    assert (header.string("a.name"), header.integer("a.count"), header.number("a.rate"), header.flag("a.flag", False)) == (
        "zoé",
        7,
        0.5,
        True,
    )
    assert (header.strings("a.words"), header.integers("a.numbers"), header.numbers("a.numbers")) == (
        ["x", "", "yz"],
        [1, -2, 3],
        [1, -2, 3],
    )
    assert (header.get("a.words"), header.get("a.count"), header.get("a.none"), header.scalar("a.words")) == (
        ["x", "", "yz"],
        7,
        None,
        None,
    )
    assert (header.length("a.words"), header.length("a.count"), header.length("a.empty"), header.strings("a.empty")) == (3, None, 0, [])
    assert (header.integer("b", 4), header.number("b", 4.5), header.string("b", "c"), header.flag("b", True)) == (4, 4.5, "c", True)
    assert "a.flag" in header and "b" not in header
    for tensor, (name, shape, _, data) in zip(header.tensors.values(), TENSORS, strict=True):
        assert tensor.shape == shape and tensor.stop - tensor.start == len(data)
        assert tiny.gguf_bytes(METADATA, TENSORS, version=version)[tensor.start : tensor.stop] == data, name


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda h: h.integer("a.name"), "'a.name' is not an integer"),
        (lambda h: h.integer("a.flag"), "'a.flag' is not an integer"),
        (lambda h: h.integer("a.words"), "'a.words' is not an integer"),
        (lambda h: h.integer("gone"), "'gone' is missing"),
        (lambda h: h.number("a.name"), "is not a finite number"),
        (lambda h: h.string("a.count"), "is not a string"),
        (lambda h: h.flag("a.count", True), "is not true or false"),
        (lambda h: h.strings("a.numbers"), "is not a list of strings"),
        (lambda h: h.integers("a.words"), "is not a list of integers"),
        (lambda h: h.numbers("a.count"), "is not a list of numbers"),
    ],
)
def test_values_of_another_kind_are_refused(read: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(parse(WHOLE))  # type: ignore[operator]


def test_a_file_of_the_gguf_package_is_read_as_it_reads_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen3moe")
    writer.add_custom_alignment(256)
    for number, kind in enumerate(("add_uint8", "add_int8", "add_uint16", "add_int16", "add_uint64", "add_int64", "add_float64")):
        getattr(writer, kind)(f"x.{number}", number + 1)
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.add_array("x.flags", [True, False])
    writer.add_tensor("a", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("b", np.arange(6, dtype=np.float16))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    theirs, ours = gguf.GGUFReader(tmp_path / "a.gguf"), read_gguf_header(tmp_path / "a.gguf")
    assert ours.data_offset % 256 == 0
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.start, mine.stop - mine.start) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1]) and mine.kind == tensor.tensor_type.name
    for name in set(ours.names()) - {"x.nested"}:  # which it flattens
        assert ours.get(name) == theirs.fields[name].contents(), name
    assert ours.get("x.nested") == [[1, 2], [3]]


def test_every_truncation_is_an_error_and_never_anything_else(tmp_path: Path) -> None:
    for length in range(len(WHOLE)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(WHOLE[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_header(path)


def test_a_beginning_says_how_much_more_it_needs() -> None:
    needed = parse(WHOLE).data_offset
    for length in range(needed - 32):
        with pytest.raises(NeedsMoreError) as caught:
            parse_gguf_header(WHOLE[:length], len(WHOLE), "x")
        assert length < caught.value.at_least <= needed
        wanted = next_read(length, caught.value.at_least, len(WHOLE))
        assert wanted is not None and caught.value.at_least <= wanted <= len(WHOLE)
    assert list(parse_gguf_header(WHOLE[:needed], len(WHOLE), "x").tensors) == ["four", "eight", "plain"]
    assert next_read(4 << 20, 1 << 40, 1 << 50) is None


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_bytes_are_an_error_or_harmless(changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for position, value in changes:
        data[position] = value
    try:
        header = parse(bytes(data))
    except CheckpointError:
        return
    for tensor in header.tensors.values():
        assert header.data_offset <= tensor.start <= tensor.stop <= len(data)
    for name in header.names():
        try:
            header.get(name)
        except CheckpointError as error:
            assert "UTF-8" in str(error) or "neither true nor false" in str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, b"GGUF" + struct.pack("<I", 3) + noise):
        try:
            header = parse(data)
        except CheckpointError:
            continue
        assert not header.tensors


def head(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


def nested(depth: int) -> bytes:
    return b"".join(struct.pack("<IQ", tiny.ARRAY, 1) for _ in range(depth)) + struct.pack("<IQ", tiny.U32, 0)


HUGE = 1 << 62
HOSTILE = {
    "the number of metadata entries": head(0, HUGE),
    "the number of tensors": head(HUGE, 0),
    "a metadata key": head(0, 1) + struct.pack("<Q", HUGE) + b"\0" * 64,
    "65537 bytes, more than": head(0, 1) + struct.pack("<Q", 65537) + b"\0" * 70000,
    "the length of": head(0, 1) + tiny.gguf_string("k") + struct.pack("<IIQ", tiny.ARRAY, tiny.STRING, HUGE) + b"\0" * 64,
    "a string of 99 bytes": head(0, 1) + tiny.gguf_string("k") + struct.pack("<IIQQ", tiny.ARRAY, tiny.STRING, 1, 99) + b"\0" * 64,
    "nests arrays too deeply": head(0, 1) + tiny.gguf_string("k") + struct.pack("<I", tiny.ARRAY) + nested(60) + b"\0" * 64,
    # Both would be walked over for minutes, element by element.
    "more elements than": head(0, 1)
    + tiny.gguf_string("k")
    + struct.pack("<IIQ", tiny.ARRAY, tiny.ARRAY, 140_000)
    + b"\0" * (12 * 140_000),
    "the value of 'many' has more elements than": head(0, 1)
    + tiny.gguf_string("many")
    + struct.pack("<IIQ", tiny.ARRAY, tiny.STRING, (1 << 23) + 1)
    + bytes(8 * ((1 << 23) + 1)),
    "unknown type 77": head(0, 1) + tiny.gguf_string("k") + struct.pack("<I", 77) + b"\0" * 64,
    "elements of the unknown type 55": head(0, 1) + tiny.gguf_string("k") + struct.pack("<IIQ", tiny.ARRAY, 55, 1) + b"\0" * 64,
    "neither true nor false": head(0, 1) + tiny.gguf_string("k") + struct.pack("<IB", tiny.BOOL, 2) + b"\0" * 64,
    "not UTF-8": head(0, 1) + struct.pack("<Q", 1) + b"\xff" + b"\0" * 64,
    "other byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 9": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "version 1": b"GGUF" + struct.pack("<III", 1, 0, 0),
    "does not start with GGUF": b"PKZIP" + b"\0" * 64,
    "60 dimensions": head(1, 0) + tiny.gguf_string("t") + struct.pack("<I", 60) + b"\0" * 64,
    "0 dimensions": head(1, 0) + tiny.gguf_string("t") + struct.pack("<I", 0) + b"\0" * 64,
    "lies at bytes": head(1, 0) + tiny.gguf_string("t") + struct.pack("<I4QIQ", 4, HUGE, HUGE, HUGE, HUGE, tiny.F32, 0) + b"\0" * 64,
    "'a.name' is there twice": tiny.gguf_bytes([METADATA[0], METADATA[0]], []),
    "'plain' is there twice": tiny.gguf_bytes([], [TENSORS[2], TENSORS[2]]),
    "unknown type 5 (Q4_3, which is no longer in use)": tiny.gguf_bytes([], [("t", (32,), 5, b"\0" * 18)]),
    "'t' has the unknown type 99.": tiny.gguf_bytes([], [("t", (32,), 99, b"\0" * 18)]),
    "Q8_0 cannot hold": tiny.gguf_bytes([], [("t", (2, 33), tiny.Q8_0, b"\0" * 96)]),
    "F32 cannot hold": tiny.gguf_bytes([], [("t", (2, 0), tiny.F32, b"")]),
    "not a power of two": tiny.gguf_bytes([("general.alignment", tiny.U32, 24)], []),
    "alignment is not": tiny.gguf_bytes([("general.alignment", tiny.STRING, "32")], []),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_hostile_files_are_refused_with_the_reason(tmp_path: Path, why: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[why])
    with pytest.raises(CheckpointError, match="hostile") as caught:
        read_gguf_header(path)
    assert why in caught.value.what
    if "'t' has the unknown" in caught.value.what:
        assert "Q4_K, Q5_K, Q6_K, MXFP4" in str(caught.value.hint)


def test_tensors_that_overlap_or_lie_askew_are_refused() -> None:
    data = bytearray(WHOLE)
    place = data.index(b"eight") + 5 + 4 + 16 + 4
    data[place : place + 8] = struct.pack("<Q", 0)
    with pytest.raises(CheckpointError, match=r"'four' and 'eight' overlap|'eight' and 'four' overlap"):
        parse(bytes(data))
    data[place : place + 8] = struct.pack("<Q", 65)
    with pytest.raises(CheckpointError, match="lies at bytes"):
        parse(bytes(data))


def test_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_gguf_header(tmp_path / "folder.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf_header(tmp_path / "absent.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_gguf_header(tmp_path / "pipe.gguf")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(tiny.gguf_bytes(METADATA, []))
    assert open_gguf(path).main.integer("a.count") == 7
    path.write_bytes(tiny.gguf_bytes([("a.count", tiny.U32, 8)], []))
    assert open_gguf(path).main.integer("a.count") == 8


def test_names_of_parts() -> None:
    assert part_names("m-00002-of-00003.gguf") == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert part_names("m-00001-of-99999.gguf")[-1] == "m-00999-of-99999.gguf"
    assert part_names("m.GGUF") == ["m.GGUF"]
    models = ["a.gguf", "m-00001-of-00003.GGUF", "remtp.gguf"]
    others = ["m-00002-of-00003.gguf", "mmproj-F16.gguf", "x-mmproj.gguf", "imatrix_unsloth.gguf", "mtp-a-Q4_0.gguf", "a.safetensors"]
    assert [name for name in models + others if is_model_name(name)] == models


def test_which_file_a_folder_means(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no GGUF model"):
        find_gguf(tmp_path)
    assert gguf_of(tmp_path) is None
    for name in ("mmproj-F16.gguf", ".hidden.gguf", "m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert gguf_of(tmp_path) == find_gguf(tmp_path) == tmp_path / "m-Q4_0-00001-of-00002.gguf"
    assert find_gguf(tmp_path / "m-Q4_0-00002-of-00002.gguf") == tmp_path / "m-Q4_0-00001-of-00002.gguf"
    (tmp_path / "m-Q8_0.gguf").touch()
    with pytest.raises(UsageError, match=r"several GGUF models: m-Q4_0-00001-of-00002\.gguf, m-Q8_0\.gguf"):
        gguf_of(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert gguf_of(tmp_path) is None


def test_a_folder_that_lacks_the_first_part(tmp_path: Path) -> None:
    (tmp_path / "m-Q4_0-00002-of-00002.gguf").touch()
    with pytest.raises(NotFoundError, match=r"m-Q4_0-00001-of-00002\.gguf does not exist") as caught:
        open_index(tmp_path)
    assert "all of them side by side" in str(caught.value.hint)


def test_what_lies_beside_a_model_and_is_none(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "backup.gguf").mkdir()
    for name in ("._m.gguf", "._m.safetensors"):  # what macOS leaves on disks of other systems
        (tmp_path / name).touch()
    assert gguf_of(tmp_path) == find_gguf(tmp_path) == tmp_path / "m.gguf"


def test_types_in_words() -> None:
    assert in_words([("Q4_K", 10), ("Q6_K", 30), ("F32", 1)]) == "Q6_K, Q4_K and F32"
    assert in_words([("Q4_K", 10)]) == "Q4_K"


def test_headers_need_no_torch() -> None:
    code = "import sys, rimuru_models.gguf, rimuru_models.gguf.config, rimuru_models.gguf.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
