"""Quantised blocks against the `gguf` package, bit for bit, on random ones and on those with extreme scales."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from rimuru_kernels.packed_weights import dequantize, pack, page_bytes
from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.blocks import codes_of, floats_of, pack_blocks
from rimuru_models.gguf.kinds import BY_NAME, FLOATS, PACKED, SUPPORTED

SHAPES = [(1, 1), (3, 2), (5, 3), (16, 4), (2, 9)]


def random_rows(kind: str, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Blocks of random bytes: all codes, and scales from the smallest to the largest, infinities and NaNs among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * BY_NAME[kind].num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, ::17] %= 255
    return torch.from_numpy(raw)


def same_bits(actual: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal bits; one NaN is as good as another."""
    found = actual.numpy()
    return bool(((found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", SUPPORTED)
def test_numbers_equal_those_of_the_gguf_package(kind: str, shape: tuple[int, int]) -> None:
    rows, blocks = shape
    raw = random_rows(kind, rows, blocks if kind in PACKED else 32 * blocks, seed=rows + blocks)
    expected = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    actual = floats_of(kind, raw)
    assert actual.dtype is torch.float32 and actual.shape == expected.shape
    assert same_bits(actual, expected)
    if kind in PACKED:
        assert same_bits(dequantize(codes_of(kind, raw), PACKED[kind]), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", PACKED)
def test_pages_are_those_of_the_codes(kind: str, shape: tuple[int, int]) -> None:
    raw = random_rows(kind, *shape, seed=1)
    codes = codes_of(kind, raw)
    size = page_bytes(PACKED[kind], *codes.values.shape)
    assert torch.equal(pack(codes, PACKED[kind]), pack_blocks(kind, raw))
    out = torch.full((size + 100,), 9, dtype=torch.uint8)
    assert pack_blocks(kind, raw, out).data_ptr() == out.data_ptr()
    assert (out[size:] == 9).all()
    assert torch.equal(dequantize(codes, PACKED[kind]).nan_to_num(), floats_of(kind, raw).nan_to_num())


@pytest.mark.parametrize("kind", PACKED)
def test_many_rows_are_worked_on_in_pieces(kind: str) -> None:
    blocks = 4096 // BY_NAME[kind].weights
    raw = random_rows(kind, 300, blocks, seed=2)
    whole = pack_blocks(kind, raw)
    assert torch.equal(pack(codes_of(kind, raw), PACKED[kind]), whole)
    last = floats_of(kind, raw[-3:].contiguous())
    assert torch.equal(floats_of(kind, raw)[-3:].nan_to_num(), last.nan_to_num())


def test_quantised_by_the_package_and_read_back() -> None:
    values = np.random.default_rng(5).standard_normal((8, 512)).astype(np.float32)
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *FLOATS):
        raw = gguf.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
        error = float((floats_of(kind, torch.from_numpy(raw)) - torch.from_numpy(values)).abs().max())
        assert error < {"Q8_0": 0.02, "F32": 1e-9, "F16": 0.01, "BF16": 0.02}.get(kind, 0.7), kind


def test_a_scale_that_is_not_a_number_is_refused() -> None:
    raw = random_rows("MXFP4", 2, 4, seed=3)
    raw[1, 17] = 255
    with pytest.raises(CheckpointError, match="not a number"):
        pack_blocks("MXFP4", raw)
