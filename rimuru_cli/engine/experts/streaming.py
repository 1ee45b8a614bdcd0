"""Streamed execution: two loading buffers alternate, one is read while the other is filled.

The absent experts of all MoE layers, in layer order, are cut into waves of at most `capacity` experts of one layer. Wave i goes through
buffer i mod 2: the loader fills it while the wave before it is computed. Both buffers are ordinary expert pages of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cache

from rimuru_cli.engine.experts.host_store import HostStore
from rimuru_cli.engine.experts.packed_view import PageView
from rimuru_cli.engine.experts.residency import ExpertTiles
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool


class LoadingBuffers:
    """Two sets of pages for `capacity` experts each.

    Attributes:
        capacity: experts a buffer holds.
    """

    def __init__(self, pool: PagePool, view: PageView, *, capacity: int, pages_per_expert: int) -> None:
        self.capacity = capacity
        self._pool = pool
        self._view = view
        self._pages = self._pool.allocate(PageKind.EXPERT, 2 * capacity * pages_per_expert)
        slots = [self._pages[i : i + pages_per_expert] for i in range(0, len(self._pages), pages_per_expert)]
        self._slots = (slots[:capacity], slots[capacity:])
        self._tiles = cache(self._views)

    @property
    def num_pages(self) -> int:
        """Pages of both buffers."""
        return len(self._pages)

    @property
    def pages(self) -> Sequence[int]:
        """Page entries of both buffers."""
        return self._pages

    def fill(self, half: int, host: HostStore, layer: int, experts: Sequence[int]) -> None:
        """Copy experts of one layer into a buffer (runs on the loader's thread)."""
        for pages, expert in zip(self._slots[half], experts, strict=False):
            host.copy_to(self._view, layer, expert, pages)

    def tiles(self, half: int, slot: int, layer: int = 0) -> ExpertTiles:
        """Views of the expert in a slot of a buffer, which is one of that MoE layer."""
        return self._tiles(half, slot, layer)

    def _views(self, half: int, slot: int, layer: int) -> ExpertTiles:
        return self._view.expert(self._slots[half][slot], layer)

    def close(self) -> None:
        """Give the pages back to the pool."""
        self._pool.free(self._pages)
        self._pages = []


class ExpertStream:
    """One forward pass's way through the absent experts; layers must be taken in ascending order."""

    def __init__(self, buffers: LoadingBuffers, host: HostStore, loader: Loader, absent: Sequence[Sequence[int]]) -> None:
        """Start filling. `absent` lists the absent experts of each MoE layer."""
        self._buffers = buffers
        self._host = host
        self._loader = loader
        size = buffers.capacity
        self._waves = [(layer, ids[i : i + size]) for layer, ids in enumerate(absent) for i in range(0, len(ids), size)]
        self._filling: list[Future[None]] = []
        self._next = 0
        for index in range(min(2, len(self._waves))):
            self._submit(index)

    def take(self, layer: int) -> Iterator[tuple[int, ExpertTiles]]:
        """The absent experts of a layer as they arrive. An expert's views are valid until the next one is asked for."""
        while self._next < len(self._waves) and self._waves[self._next][0] == layer:
            index = self._next
            self._filling[index].result()
            for slot, expert in enumerate(self._waves[index][1]):
                yield expert, self._buffers.tiles(index % 2, slot, layer)
            self._next += 1
            if index + 2 < len(self._waves):
                self._submit(index + 2)

    def close(self) -> None:
        """Wait for copies still under way, so that the buffers may be used again."""
        for future in self._filling:
            future.cancel()
        for future in self._filling:
            if not future.cancelled():
                future.exception()

    def _submit(self, index: int) -> None:
        layer, experts = self._waves[index]
        self._filling.append(self._loader.submit(lambda: self._buffers.fill(index % 2, self._host, layer, experts)))
