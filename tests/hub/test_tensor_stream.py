from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rimuru_cli.hub.tensor_stream import DATA_ALIGNMENT, Bfloat16Stream, to_bfloat16


def test_rounding_equals_torch_on_random_bits_and_on_ties() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[:50_000] = (bits[:50_000] & 0xFFFF0000) | 0x8000  # exactly half way
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_float64_goes_through_float32() -> None:
    # Just above a bfloat16 tie: float32 cannot hold the excess, so the tie goes to the even neighbour.
    assert to_bfloat16(np.array([1.0 + 2.0**-8 + 2.0**-40])).tolist() == [0x3F80]
    assert to_bfloat16(np.array([1.0 + 2.0**-8 + 2.0**-20])).tolist() == [0x3F81]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        to_bfloat16(np.array([0.0, bad]))


def test_file_reads_back_and_the_checksum_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    first, second = np.arange(12, dtype=np.uint16).reshape(4, 3), np.arange(5, dtype=np.uint16)
    with Bfloat16Stream(path, {"b.first": (4, 3), "a.second": (5,)}) as stream:
        stream.write("b.first", first[:1])
        stream.write("b.first", first[1:])
        stream.write("a.second", second)
    data = path.read_bytes()
    assert stream.sha256 == hashlib.sha256(data).hexdigest()
    assert len(data) == stream.total_bytes == stream.written_bytes
    assert (8 + struct.unpack_from("<Q", data)[0]) % DATA_ALIGNMENT == 0
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {"b.first", "a.second"}
        for name, expected in (("b.first", first), ("a.second", second)):
            assert file.get_tensor(name).dtype == torch.bfloat16
            np.testing.assert_array_equal(file.get_tensor(name).view(torch.int16).numpy().view(np.uint16), expected)


def test_wrong_order_shape_or_count_is_noticed(tmp_path: Path) -> None:
    one = np.zeros((2, 2), np.uint16)
    with pytest.raises(AssertionError), Bfloat16Stream(tmp_path / "a", {"x": (2, 2), "y": (2, 2)}) as stream:
        stream.write("y", one)
    with pytest.raises(AssertionError), Bfloat16Stream(tmp_path / "b", {"x": (1, 2)}) as stream:
        stream.write("x", one)
    with pytest.raises(AssertionError, match="1 tensors"), Bfloat16Stream(tmp_path / "c", {"x": (2, 2), "y": (2, 2)}) as stream:
        stream.write("x", one)
