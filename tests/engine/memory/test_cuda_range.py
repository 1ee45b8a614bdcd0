"""The range of addresses behind a pool on a GPU, with a driver that keeps books instead of memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from rimuru_cli.engine.memory.backing import _Range
from rimuru_cli.engine.memory.driver import OUT_OF_MEMORY, Driver, DriverError
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool

CHUNK = 32


class Books:
    """Mappings by address, as the driver would have them; `room` is how many pieces of memory there are."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.mapped: dict[int, int] = {}
        self.handles = 0
        self.unmaps = 0

    def reserve(self, num_bytes: int) -> int:
        return 4096

    def unreserve(self, address: int, num_bytes: int) -> None:
        assert not self.mapped

    def create(self, num_bytes: int, device: int) -> int:
        if len(self.mapped) == self.room:
            raise DriverError("cuMemCreate", OUT_OF_MEMORY, "out of memory")
        self.handles += 1
        return self.handles

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        assert address not in self.mapped
        self.mapped[address] = num_bytes

    def release(self, handle: int) -> None:
        self.handles -= 1

    def allow(self, address: int, num_bytes: int, device: int) -> None:
        assert all(address + offset in self.mapped for offset in range(0, num_bytes, CHUNK))

    def unmap(self, address: int, num_bytes: int) -> None:
        self.unmaps += 1
        assert num_bytes > 0
        while num_bytes:
            size = self.mapped.pop(address)
            address, num_bytes = address + size, num_bytes - size


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def range_of(books: Any) -> _Range:
    return _Range(cast(Driver, books), 0, 20 * CHUNK)


def test_the_end_is_taken_away_in_one_call(without_device: None) -> None:
    books = Books(room=20)
    memory = range_of(books)
    memory.resize(12, CHUNK)
    assert sorted(books.mapped) == [4096 + CHUNK * i for i in range(12)] and books.handles == 0
    memory.resize(5, CHUNK)
    assert sorted(books.mapped) == [4096 + CHUNK * i for i in range(5)]
    assert books.unmaps == 1 and memory.chunks == [CHUNK] * 5
    memory.resize(5, CHUNK)
    memory.resize(7, CHUNK)
    assert len(books.mapped) == 7 and books.unmaps == 1
    memory.free()
    assert not books.mapped and memory.chunks == []


def test_a_range_that_cannot_grow_is_as_before(without_device: None) -> None:
    books = Books(room=6)
    memory = range_of(books)
    memory.resize(4, CHUNK)
    with pytest.raises(MemoryError, match="out of memory"):
        memory.resize(9, CHUNK)
    assert sorted(books.mapped) == [4096 + CHUNK * i for i in range(4)] and memory.chunks == [CHUNK] * 4
    with pytest.raises(MemoryError):
        range_of(Books(room=0)).resize(1, CHUNK)


def test_pages_that_move_onto_themselves_stay_as_they_are() -> None:
    geometry = PoolGeometry.from_bytes(3 << 10, 512)
    pool = PagePool(geometry, 24 * geometry.huge_page_bytes)
    pool.data.random_(0, 256)
    before = pool.data.clone()
    pool._load_kernels()
    assert torch.equal(pool.data, before)
    assert set(geometry.kinds) >= {PageKind.EXPERT, PageKind.KV}
