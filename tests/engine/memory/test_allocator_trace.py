"""100,000 random operations on all kinds of pages leave a pool that merges back into whole huge pages."""

from __future__ import annotations

import random

import pytest

from rimuru_cli.engine.memory.allocator import OutOfPages, PageAllocator
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry

MIB = 1 << 20


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(PoolGeometry.from_bytes(6 * MIB, 16 * 2048, 4 * MIB, 24_576), id="2 experts or 3 states"),
        pytest.param(PoolGeometry.from_bytes(3_964_928, 16 * 8192), id="KV tails"),
    ],
)
def test_random_trace_ends_fully_merged(geometry: PoolGeometry) -> None:
    rng = random.Random(20_261_130)
    allocator = PageAllocator(geometry, 60 * geometry.huge_page_bytes)
    held: list[list[int]] = []
    refused = 0
    for step in range(100_000):
        if held and rng.random() < 0.48:
            place = rng.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            allocator.free(held.pop())
        else:
            kind = rng.choice(geometry.kinds)
            try:
                if kind is PageKind.CONV:
                    held.append([page for run in allocator.allocate_runs(kind, rng.randint(1, 36), 3) for page in run])
                else:
                    held.append(allocator.allocate(kind, {PageKind.EXPERT: 3, PageKind.KV: 48}.get(kind, rng.randint(1, 36))))
            except OutOfPages as error:
                refused += 1
                assert error.available < error.wanted
                if held:
                    allocator.free(held.pop(rng.randrange(len(held))))
        if step % 10_000 == 0:
            allocator.check_integrity()
    assert refused > 1000, "the pool was full for a good part of the trace"
    allocator.check_integrity()
    for pages in held:
        allocator.free(pages)
    allocator.check_integrity()
    assert allocator.splits == allocator.merges > 1000
    assert [(region.length_bytes, region.state) for region in allocator.regions()] == [(geometry.huge_page_bytes, "free")] * 60
    assert all(allocator.available(kind) == 60 * geometry.pages_per_huge(kind) for kind in geometry.kinds)
