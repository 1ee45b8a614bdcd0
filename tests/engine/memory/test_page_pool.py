"""The pool's bytes: alignment, views without copies, poison."""

from __future__ import annotations

import pytest
import torch

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.memory.integrity import IntegrityError
from rimuru_cli.engine.memory.page_pool import PagePool

GEOMETRY = PoolGeometry.from_bytes(12 * ENTRY_BYTES, 2 * ENTRY_BYTES, 8 * ENTRY_BYTES, 100)
POOL_BYTES = 3 * GEOMETRY.huge_page_bytes + 77


def test_data_is_one_aligned_run_of_exactly_the_pool() -> None:
    pool = PagePool(GEOMETRY, POOL_BYTES)
    assert pool.data.dtype is torch.uint8 and tuple(pool.data.shape) == (POOL_BYTES,) and pool.data.is_contiguous()
    assert pool.data.data_ptr() % 4096 == 0
    assert pool.allocator.num_huge_pages == 3


def test_bytes_of_and_typed_see_the_same_memory() -> None:
    pool = PagePool(GEOMETRY, POOL_BYTES)
    (page,) = pool.allocate(PageKind.SSM, 1)
    pool.bytes_of(page, 4).copy_(torch.tensor([0, 0, 0x80, 0x3F], dtype=torch.uint8))
    assert pool.bytes_of(page, 4).data_ptr() == pool.data.data_ptr() + page * ENTRY_BYTES
    for dtype, element in ((torch.float32, page * 64), (torch.bfloat16, page * 128 + 1)):
        assert pool.typed(dtype)[element] == 1.0
        assert pool.typed(dtype).numel() == POOL_BYTES // ENTRY_BYTES * ENTRY_BYTES // dtype.itemsize


def test_bytes_outside_the_pool_are_refused() -> None:
    pool = PagePool(GEOMETRY, POOL_BYTES)
    for entry in (-1, POOL_BYTES // ENTRY_BYTES):
        with pytest.raises(AssertionError, match="outside"):
            pool.bytes_of(entry, ENTRY_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_poison_is_nan_before_writing_and_after_freeing(dtype: torch.dtype) -> None:
    pool = PagePool(GEOMETRY, POOL_BYTES, poison=True)
    assert bool(pool.typed(dtype).isnan().all())
    pages = pool.allocate(PageKind.KV, 3)
    rows = pool.allocate_runs(PageKind.CONV, 2, 3)
    for page in pages:
        pool.bytes_of(page, 2 * ENTRY_BYTES).zero_()
    kept = pool.bytes_of(rows[0][0], ENTRY_BYTES).zero_()
    assert not bool(pool.typed(dtype).isnan().all())
    pool.free(iter(pages))
    pool.free(rows[1])
    assert bool((kept == 0).all()), "only freed pages are poisoned"
    pool.free(rows[0])
    assert bool(pool.typed(dtype).isnan().all())
    assert pool.allocator.free_bytes == 3 * GEOMETRY.huge_page_bytes


def test_bad_free_poisons_nothing() -> None:
    pool = PagePool(GEOMETRY, POOL_BYTES, poison=True)
    (page,) = pool.allocate(PageKind.EXPERT, 1)
    content = pool.bytes_of(page, 12 * ENTRY_BYTES).zero_()
    with pytest.raises(IntegrityError):
        pool.free([page, page])
    assert bool((content == 0).all())


def test_freed_bytes_stay_without_poison() -> None:
    pool = PagePool(GEOMETRY, POOL_BYTES)
    (page,) = pool.allocate(PageKind.EXPERT, 1)
    pool.bytes_of(page, 8).fill_(7)
    pool.free([page])
    assert pool.bytes_of(page, 8).tolist() == [7] * 8
