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


def test_types_that_are_not_read_here(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tiny.gguf_bytes([], [("half", (4,), 1, b"\0" * 8)]))
    with GGUFFile(path) as file, pytest.raises(CheckpointError, match="stored as F16; only F32, Q4_1, Q8_0 are read here"):
        file.read("half")
    with pytest.raises(CheckpointError, match=r"b\.gguf"):
        GGUFFile(write(tmp_path / "b.gguf", b""))


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
