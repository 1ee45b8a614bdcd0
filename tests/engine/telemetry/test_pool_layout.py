"""The map of the pool worked out from owners alone is the allocator's own map."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_cli.engine.memory.allocator import PageAllocator
from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind, PoolGeometry
from rimuru_cli.engine.telemetry.frame import TAIL
from rimuru_cli.engine.telemetry.layout import DamagedTables, PoolLayout

E = ENTRY_BYTES
PLAIN = PoolGeometry.from_bytes(8 * E, E)
TAILED = PoolGeometry.from_bytes(8 * E, 3 * E)
HYBRID = PoolGeometry.from_bytes(12 * E, 2 * E, 8 * E, E)
ODD = PoolGeometry.from_bytes(13 * E, 3 * E, 8 * E, 5 * E)  # tails on every level
GEOMETRIES = {"plain": PLAIN, "tailed": TAILED, "hybrid": HYBRID, "odd": ODD}


def drawn(layout: PoolLayout, owned: dict[PageKind, list[int]]) -> list[tuple[int, int, str]]:
    entries = {kind: np.array(pages, dtype=np.int32) for kind, pages in owned.items()}
    at = layout.boundaries(entries)
    states = ["tail" if kind == TAIL else "free" for kind in at.kind]
    for kind, pages in entries.items():
        for row in layout.rows(kind, pages, at):
            assert states[row] == "free", "a page has two owners, or is a tail"
            states[row] = kind.value
    return list(zip(at.offset.tolist(), at.size.tolist(), states, strict=True))


@pytest.mark.parametrize("name", GEOMETRIES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_map_equals_the_allocators(name: str, data: st.DataObject) -> None:
    geometry = GEOMETRIES[name]
    allocator = PageAllocator(geometry, 9 * geometry.huge_page_bytes + data.draw(st.sampled_from([0, 100, E])))
    layout = PoolLayout(geometry, allocator.pool_bytes)
    owned: dict[PageKind, list[int]] = {kind: [] for kind in geometry.kinds}
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(geometry.kinds))
        if data.draw(st.booleans()):
            owned[kind] += allocator.allocate(kind, data.draw(st.integers(0, min(30, allocator.available(kind)))))
        elif owned[kind]:
            order = data.draw(st.permutations(owned[kind]))
            count = data.draw(st.integers(0, len(order)))
            allocator.free(order[:count])
            owned[kind] = order[count:]
        expected = [(r.offset_bytes, r.length_bytes, "tail" if r.state == "unused" else r.state) for r in allocator.regions()]
        assert drawn(layout, owned) == expected


def test_boundaries_are_kept_while_nothing_is_split() -> None:
    layout = PoolLayout(PLAIN, 4 * PLAIN.huge_page_bytes)
    one = layout.boundaries({PageKind.EXPERT: np.array([0, 8], dtype=np.int32)})
    assert layout.boundaries({PageKind.EXPERT: np.array([8, 0], dtype=np.int32)}) is one
    assert layout.boundaries({PageKind.EXPERT: np.array([0], dtype=np.int32), PageKind.KV: np.array([9], dtype=np.int32)}) is not one


def test_levels_and_tails() -> None:
    layout = PoolLayout(TAILED, 3 * TAILED.huge_page_bytes + 7)
    owned = {PageKind.EXPERT: np.array([0], dtype=np.int32), PageKind.KV: np.array([8], dtype=np.int32)}
    at = layout.boundaries(owned)
    assert at.level.tolist() == [2, 3, 3, 3, 1, 1]
    assert (at.kind == TAIL).tolist() == [False, False, False, True, False, True]
    assert at.size.tolist() == [8 * E, 3 * E, 3 * E, 2 * E, 8 * E, 7]


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (PageKind.EXPERT, -1),
        (PageKind.EXPERT, 4 * 8),  # just behind the pool
        (PageKind.EXPERT, 3),  # between pages
        (PageKind.KV, 7),  # in a tail
        (PageKind.KV, 1),
    ],
)
def test_pages_where_none_can_be_are_refused(kind: PageKind, entry: int) -> None:
    layout = PoolLayout(TAILED, 4 * TAILED.huge_page_bytes)
    entries = np.array([entry], dtype=np.int32)
    with pytest.raises(DamagedTables):
        layout.rows(kind, entries, layout.boundaries({kind: entries}))


@pytest.mark.parametrize("pool_bytes", [-1, 1 << 62])
def test_absurd_pools_are_refused(pool_bytes: int) -> None:
    with pytest.raises(DamagedTables):
        PoolLayout(PLAIN, pool_bytes)
