from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_demo as tiny

from rimuru_cli.hub.gguf_reader import GGUFFile
from rimuru_models.errors import CheckpointError

RNG = np.random.default_rng(7)
Q4 = tiny.random_blocks(RNG, (2, 64), tiny.Q4_1)
Q8 = tiny.random_blocks(RNG, (3, 32), tiny.Q8_0)
PLAIN = tiny.random_blocks(RNG, (5,), tiny.F32)
METADATA: list[tiny.Entry] = [
    ("a.name", tiny.STRING, "zoé"),
    ("a.count", tiny.U32, 7),
    ("a.rate", tiny.FLOAT32, 0.5),
    ("a.flag", tiny.BOOL, True),
    ("a.words", tiny.ARRAY, (tiny.STRING, ["x", "", "yz"])),
    ("a.numbers", tiny.ARRAY, (tiny.I32, [1, -2, 3])),
]
TENSORS: list[tiny.Tensor] = [
    ("four", (2, 64), tiny.Q4_1, Q4),
    ("eight", (3, 32), tiny.Q8_0, Q8),
    ("plain", (5,), tiny.F32, PLAIN),
]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_shapes(tmp_path: Path, version: int) -> None:
    with GGUFFile(write(tmp_path / "a.gguf", tiny.gguf_bytes(METADATA, TENSORS, version=version))) as file:
        assert file.string("a.name") == "zoé"
        assert file.integer("a.count") == 7
        assert file.number("a.rate") == 0.5
        assert file.metadata["a.flag"] is True
        assert file.strings("a.words") == ["x", "", "yz"]
        assert file.integers("a.numbers") == [1, -2, 3]
        assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"four": (2, 64), "eight": (3, 32), "plain": (5,)}


def test_dequantisation_agrees_with_a_formula_written_byte_by_byte(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "a.gguf", tiny.gguf_bytes(METADATA, TENSORS))) as file:
        four, eight, plain = file.read("four"), file.read("eight"), file.read("plain")
        second_row, last_rows = file.read("four", 1, 2), file.read("eight", 1)
    expected = []
    for at in range(0, len(Q4), 20):
        scale, minimum = struct.unpack_from("<ee", Q4, at)
        quants = Q4[at + 4 : at + 20]
        expected += [scale * (byte & 15) + minimum for byte in quants] + [scale * (byte >> 4) + minimum for byte in quants]
    assert four.dtype == np.float32
    np.testing.assert_allclose(four.astype(np.float64), np.array(expected).reshape(2, 64), rtol=0, atol=1e-7)
    np.testing.assert_array_equal(second_row, four[1:])
    expected = []
    for at in range(0, len(Q8), 34):
        (scale,) = struct.unpack_from("<e", Q8, at)
        expected += [scale * value for value in struct.unpack_from("<32b", Q8, at + 2)]
    np.testing.assert_array_equal(eight.astype(np.float64), np.array(expected).reshape(3, 32))
    np.testing.assert_array_equal(last_rows, eight[1:])
    np.testing.assert_array_equal(plain, struct.unpack("<5f", PLAIN))


def test_every_truncation_is_an_error_and_never_anything_else(tmp_path: Path) -> None:
    whole = tiny.gguf_bytes(METADATA, TENSORS)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(write(tmp_path / "cut.gguf", whole[:length]))


def test_damaged_bytes_are_an_error_or_harmless(tmp_path: Path) -> None:
    whole = tiny.gguf_bytes(METADATA, TENSORS)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for position in rng.integers(0, len(whole), 3):
            damaged[position] = int(rng.integers(0, 256))
        try:
            with GGUFFile(write(tmp_path / "bad.gguf", bytes(damaged))) as file:
                for name in file.tensors:
                    file.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 50


def head(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


HUGE = 1 << 62
HOSTILE = {
    "number of metadata entries": head(0, HUGE),
    "number of tensors": head(HUGE, 0),
    "metadata key": head(0, 1) + struct.pack("<Q", HUGE) + b"\0" * 64,
    "length of array": head(0, 1) + tiny.gguf_string("k") + struct.pack("<IIQ", tiny.ARRAY, tiny.STRING, HUGE) + b"\0" * 64,
    "unsupported type 9": head(0, 1) + tiny.gguf_string("k") + struct.pack("<IIQ", tiny.ARRAY, tiny.ARRAY, 1) + b"\0" * 64,
    "unsupported type 77": head(0, 1) + tiny.gguf_string("k") + struct.pack("<I", 77) + b"\0" * 64,
    "not UTF-8": head(0, 1) + struct.pack("<Q", 1) + b"\xff" + b"\0" * 64,
    "version 9": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "does not start with GGUF": b"PKZIP" + b"\0" * 64,
    "60 dimensions": head(1, 0) + tiny.gguf_string("t") + struct.pack("<I", 60) + b"\0" * 64,
    "lies at bytes": head(1, 0) + tiny.gguf_string("t") + struct.pack("<I4QIQ", 4, HUGE, HUGE, HUGE, HUGE, tiny.F32, 0) + b"\0" * 64,
    "there twice": tiny.gguf_bytes([METADATA[0], METADATA[0]], []),
    "'plain' is there twice": tiny.gguf_bytes([], [TENSORS[2], TENSORS[2]]),
    "type 2;": tiny.gguf_bytes([], [("t", (32,), 2, b"\0" * 18)]),
    "cannot hold": tiny.gguf_bytes([], [("t", (2, 33), tiny.Q8_0, b"\0" * 96)]),
    "not a power of two": tiny.gguf_bytes([("general.alignment", tiny.U32, 24)], []),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_hostile_files_are_refused_with_the_reason(tmp_path: Path, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        GGUFFile(write(tmp_path / "bad.gguf", HOSTILE[why]))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    data = bytearray(tiny.gguf_bytes([], [TENSORS[1], TENSORS[2]]))
    at = data.index(tiny.gguf_string("plain")) + len(tiny.gguf_string("plain")) + 4 + 8 + 4
    data[at : at + 8] = struct.pack("<Q", 32)
    with pytest.raises(CheckpointError, match="'eight' and 'plain' overlap"):
        GGUFFile(write(tmp_path / "bad.gguf", bytes(data)))


def test_wrong_metadata_types_and_missing_tensors_are_errors(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "a.gguf", tiny.gguf_bytes(METADATA, TENSORS))) as file:
        for wrong in (
            lambda: file.integer("a.name"),
            lambda: file.integer("a.flag"),
            lambda: file.number("missing"),
            lambda: file.string("a.count"),
            lambda: file.strings("a.numbers"),
            lambda: file.integers("a.words"),
            lambda: file.read("missing"),
        ):
            with pytest.raises(CheckpointError, match=r"a\.gguf"):
                wrong()
