"""The benchmark of packed experts: what it refuses, and what its random experts spread like."""

from __future__ import annotations

import pytest
import torch

from rimuru_cli.bench.kernels_packed import run_packed_bench
from rimuru_cli.bench.packed import QUANTS, RandomPages, random_codes
from rimuru_kernels.packed_weights import dequantize, page_bytes, unpack


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="no such shape or quantisation: Some-MoE, int3"):
        run_packed_bench(shapes=["Some-MoE"], quants=["int3"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="CUDA device"):
        run_packed_bench()


@pytest.mark.parametrize("quant", QUANTS)
def test_random_experts_are_no_outliers(quant: str) -> None:
    """A time over infinite or vanishing numbers would be none of a model's."""
    for fmt in QUANTS[quant]:
        weights = dequantize(random_codes(fmt, 128, 256, 1), fmt)
        assert weights.isfinite().all()
        assert 0.005 < weights.std() < 0.08


def test_random_pages_in_row_tiles_of_different_numbers() -> None:
    formats = QUANTS["q4_k_m"]
    sizes = [page_bytes(formats.gate_up, 128, 256)] * 4 + [page_bytes(formats.down, 96, 256)] * 3
    pages = [torch.full((max(sizes) + 8,), 7, dtype=torch.uint8) for _ in sizes]
    RandomPages(formats, 256, 256).write(5, pages, (2, 3))
    for page, size in zip(pages, sizes, strict=True):
        assert bool((page[size:] == 7).all()) and not bool((page[:size] == 7).all())
    assert all(dequantize(unpack(page, formats.down, 96, 256), formats.down).isfinite().all() for page in pages[4:])
