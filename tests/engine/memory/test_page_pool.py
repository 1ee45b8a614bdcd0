"""The pool's bytes: alignment, views without copies, poison."""

from __future__ import annotations

import gc
import mmap

import psutil
import pytest
import torch

from rimuru_cli.engine.memory import backing, page_pool
from rimuru_cli.engine.memory.driver import Driver
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.memory.integrity import IntegrityError
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_models.errors import UsageError

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


# ---- a size that changes -----------------------------------------------------------------------------------------------------------

HUGE = GEOMETRY.huge_page_bytes
BIG = PoolGeometry.from_bytes(1 << 20, 1 << 14)


def test_an_elastic_pool_hands_out_only_what_is_in_use() -> None:
    pool = PagePool(GEOMETRY, 2 * HUGE, reserve_bytes=5 * HUGE)
    assert pool.reserve_bytes == 5 * HUGE and pool.num_bytes == pool.allocator.free_bytes == 2 * HUGE
    assert pool.allocator.available(PageKind.EXPERT) == 2 * GEOMETRY.pages_per_huge(PageKind.EXPERT)
    pool.grow(4 * HUGE)
    assert pool.num_bytes == pool.allocator.free_bytes == 4 * HUGE
    pages = pool.allocate(PageKind.EXPERT, 4 * GEOMETRY.pages_per_huge(PageKind.EXPERT))
    pool.free(pages)
    assert pool.shrink(HUGE) == 3 * HUGE
    assert pool.num_bytes == pool.allocator.free_bytes == HUGE
    pool.allocator.check_integrity()


def test_addresses_and_contents_stay_when_the_size_changes() -> None:
    pool = PagePool(GEOMETRY, 3 * HUGE, reserve_bytes=6 * HUGE, poison=True)
    (page,) = pool.allocate(PageKind.SSM, 1)
    address, view = pool.data.data_ptr(), pool.bytes_of(page, 8)
    view.fill_(7)
    for size in (6, 1, 4, 2):
        pool.grow(size * HUGE) if size * HUGE > pool.num_bytes else pool.shrink(size * HUGE)
        assert pool.data.data_ptr() == address and view.tolist() == [7] * 8
        assert bool(pool.data[pool.num_bytes - 8 : pool.num_bytes].eq(0xFF).all()), "new memory is poisoned"


def test_a_pool_is_not_made_smaller_than_what_is_owned() -> None:
    pool = PagePool(GEOMETRY, 3 * HUGE, reserve_bytes=3 * HUGE)
    pool.allocate(PageKind.EXPERT, 2 * GEOMETRY.pages_per_huge(PageKind.EXPERT) + 1)
    with pytest.raises(AssertionError, match="owned"):
        pool.shrink(2 * HUGE)
    pool.limit(pool.num_bytes)
    assert pool.num_bytes == 3 * HUGE
    pool.allocator.check_integrity()


def test_a_limit_can_be_taken_back() -> None:
    pool = PagePool(GEOMETRY, 3 * HUGE, reserve_bytes=4 * HUGE)
    pool.limit(HUGE)
    assert pool.allocator.free_bytes == HUGE
    pool.limit(pool.num_bytes)
    assert pool.allocator.free_bytes == 3 * HUGE


@pytest.mark.parametrize("kind", [PageKind.EXPERT, PageKind.SSM, PageKind.KV, PageKind.CONV])
def test_moved_pages_carry_their_contents_and_nothing_else(kind: PageKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "_MOVED_AT_ONCE", 3 * ENTRY_BYTES)
    pool = PagePool(GEOMETRY, 12 * HUGE, reserve_bytes=12 * HUGE)
    pool.data.copy_(torch.randint(0, 256, pool.data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    before = pool.data.clone()
    size = GEOMETRY.layout(kind).stride_bytes
    pages = pool.allocate(kind, 12)
    sources, targets = pages[::2], pages[1::2][::-1]
    pool.move(kind, sources, targets)
    for source, target in zip(sources, targets, strict=True):
        start, end = source * ENTRY_BYTES, target * ENTRY_BYTES
        before[end : end + size] = before[start : start + size]
    assert torch.equal(pool.data, before)


def test_memory_of_a_smaller_pool_goes_back_to_the_system() -> None:
    process = psutil.Process()
    pool = PagePool(BIG, 128 << 20, reserve_bytes=1 << 38)
    pool.data[: pool.num_bytes].fill_(1)
    full = process.memory_info().rss
    assert pool.shrink(32 << 20) == 96 << 20
    assert full - process.memory_info().rss > 80 << 20
    assert bool(pool.data[: 32 << 20].eq(1).all())
    pool.grow(64 << 20)
    pool.data[: pool.num_bytes].fill_(2)


def test_where_addresses_cannot_be_reserved_pages_are_withheld_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no such range")

    monkeypatch.setattr(backing, "PosixBacking", refuse)
    monkeypatch.setattr(backing, "WindowsBacking", refuse)
    pool = PagePool(GEOMETRY, 3 * HUGE, reserve_bytes=8 * HUGE)
    assert pool.reserve_bytes == 3 * HUGE and "no such range" in pool.why_kept
    assert pool.shrink(HUGE) == 0 and pool.committed_bytes == 3 * HUGE
    assert pool.allocator.free_bytes == HUGE and pool.allocator.withheld_bytes == 2 * HUGE
    pool.grow(3 * HUGE)
    assert pool.allocator.free_bytes == 3 * HUGE


def test_more_than_entries_can_address_is_refused_before_memory_is_asked_for() -> None:
    with pytest.raises(UsageError, match="must have between"):
        PagePool(BIG, 1 << 20, reserve_bytes=1 << 50)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_memory_of_a_smaller_pool_goes_back_to_the_driver() -> None:
    """What the driver counts as free follows the pool's size; addresses, contents and captured graphs stay."""
    driver = Driver.load()
    if driver is None or not driver.supports_virtual_memory(0):
        pytest.skip("this driver has no virtual memory")
    pool = PagePool(BIG, 1 << 30, "cuda", reserve_bytes=8 << 30)
    (low,) = pool.allocate(PageKind.EXPERT, 1)
    kept = pool.bytes_of(low, 1 << 20).fill_(3)
    address = pool.data.data_ptr()
    assert address % 4096 == 0 and pool.data[:4].tolist() == [3] * 4
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        total.copy_(kept.sum())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(kept.sum())
    for size in (6, 2, 8, 1):
        before = torch.cuda.mem_get_info()[0]
        was, now = pool.num_bytes, size << 30
        pool.grow(now) if now > was else pool.shrink(now)
        assert abs(before - torch.cuda.mem_get_info()[0] - (now - was)) <= 512 << 20, "other programs may use the card, too"
        pool.data[now - 8 : now].fill_(1)
        assert pool.data.data_ptr() == address and bool(kept.eq(3).all())
        total.zero_()
        graph.replay()
        assert int(total) == 3 << 20
    with pytest.raises(MemoryError):
        PagePool(BIG, 1 << 38, "cuda", reserve_bytes=1 << 38)
    (high,) = pool.allocate(PageKind.EXPERT, 1)
    pool.move(PageKind.EXPERT, [low], [high])
    assert bool(pool.bytes_of(high, 1 << 20).eq(3).all())
    host = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    pool.data[: 4 << 20].copy_(host.view(torch.uint8), non_blocking=True)
    assert torch.equal(pool.data[: 4 << 20].cpu().view(torch.int32), host)
    whole = torch.full((100 << 20,), 7, dtype=torch.uint8).pin_memory()
    pool.data[: 100 << 20].copy_(whole, non_blocking=True)  # over several pieces of memory in one copy
    assert bool(pool.data[: 100 << 20].eq(7).all())
    memory = pool._backing._range  # type: ignore[attr-defined]
    assert memory.chunks
    del pool, kept, graph
    gc.collect()
    assert not memory.chunks, "a pool that nobody uses any more keeps its memory"


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="this system has another backing")
def test_memory_that_the_system_keeps_is_still_counted() -> None:
    memory = backing.PosixBacking(1 << 20, 1 << 20)

    class Locked:
        def __len__(self) -> int:
            return 1 << 20

        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    memory._mapping = Locked()  # type: ignore[assignment]
    memory.resize(1 << 18)
    assert "keeps memory" in memory.why_kept and memory.committed == 1 << 20
    memory.resize(1 << 20)
    assert memory.committed == 1 << 20
