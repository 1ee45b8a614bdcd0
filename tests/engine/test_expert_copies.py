"""Copies of an expert: what its pages hold, in as few pieces as they lie in runs."""

from __future__ import annotations

import pytest
import torch

from rimuru_cli.engine.device.copying import copy_expert
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.page_pool import PagePool

PAGE = 1024
UNIT = PAGE // 256


@pytest.mark.parametrize(
    ("places", "sizes", "copied"),
    [
        ([0, 1, 2], [1024, 1024, 1024], 3072),
        ([0, 1, 2], [1000, 1000, 960], 3008),  # the little between them is copied, what is behind the last is not
        ([0, 1, 2], [1000, 600, 960], 1024 + 600 + 960),  # too much is empty in the second
        ([4, 1, 2], [1000, 1000, 960], 1000 + 1024 + 960),
        ([5, 3, 1], [16, 32, 48], 96),
        ([2, 3, 7, 6], [1024, 1024], 2048),  # pages behind an expert's are none of it
        ([6], [16], 16),
    ],
)
def test_what_pages_hold_is_copied(places: list[int], sizes: list[int], copied: int) -> None:
    pool = PagePool(PoolGeometry.from_bytes(PAGE, PAGE), 8 * PAGE)
    pool.allocate(PageKind.EXPERT, 8)
    pool.data.fill_(0)
    content = torch.randint(1, 256, (len(sizes) * PAGE,), dtype=torch.uint8)
    assert copy_expert(pool, [place * UNIT for place in places], content, sizes) == copied
    for tile, size in enumerate(sizes):
        page = pool.bytes_of(places[tile] * UNIT, PAGE)
        assert torch.equal(page[:size], content[tile * PAGE :][:size])
    assert int((pool.data != 0).sum()) == copied
