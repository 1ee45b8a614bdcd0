"""Which experts lie in the pool, and the moves between resident and absent.

A resident expert owns as many pages as its layer's experts have (gate, up and down, each one page or several row tiles). Its table entry
is set only after its bytes are in place, and its pages are given back only between steps, when nothing can still be reading them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.engine.experts.host_store import HostTier
from rimuru_cli.engine.experts.packed_view import PageView
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.turns import undisturbed

_FIRST = 64  # experts that are wanted at once, mostly

# Tiles of one expert: gate, up and down, each as its row tiles in order.
ExpertTiles = tuple[list[Tensor], list[Tensor], list[Tensor]]


class ResidencyPicture(NamedTuple):
    """The resident set at one moment, for those who look on.

    Attributes:
        entries: int32 [num_moe_layers, num_experts, pages_per_expert], as of `Residency`; valid until the next step.
        scores: float32 [num_moe_layers, num_experts].
        loading: int32 [n, 2 + pages_per_expert], experts on their way: layer, expert, pages.
        steps_behind: how many steps ago this was so.
    """

    entries: NDArray[np.int32]
    scores: NDArray[np.float32]
    loading: NDArray[np.int32]
    steps_behind: int = 0


class Residency:
    """The resident set.

    Attributes:
        entries: int32 [num_moe_layers, num_experts, pages_per_expert], page entries of visible experts; -1 where absent, and behind the
            pages of a layer whose experts have fewer.
        resident: bool [num_moe_layers, num_experts], whether an expert is visible.
        counts: resident experts of each layer, those being loaded included.
        floor: experts of each layer that are never retired.
        pages_per_expert: most pages of an expert; layer_pages: those of each layer's.
        swaps: exchanges of a resident expert for a better-ranked one so far.
        waited: seconds spent so far waiting for a device to finish what was queued before its tables could be read.
    """

    def __init__(
        self,
        pool: PagePool,
        view: PageView,
        host: HostTier,
        ranking: ExpertRanking,
        loader: Loader,
        *,
        floor: int,
        pages_per_expert: int,
        layer_pages: Sequence[int] | None = None,
    ) -> None:
        """`layer_pages`: of each layer, at most `pages_per_expert`, where they differ; None: all have so many."""
        self._pool = pool
        self.view = view
        self._host = host
        self._ranking = ranking
        self._loader = loader
        self.floor = floor
        self.pages_per_expert = pages_per_expert
        self.layer_pages = [pages_per_expert] * host.num_layers if layer_pages is None else list(layer_pages)
        shape = (host.num_layers, host.num_experts)
        self.entries: NDArray[np.int32] = np.full((*shape, pages_per_expert), -1, dtype=np.int32)
        self.resident: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self.counts = [0] * host.num_layers
        self._tiles: dict[tuple[int, int], ExpertTiles] = {}
        self._loading: dict[tuple[int, int], tuple[list[int], Future[None]]] = {}
        # Gate over up, and down, of every visible expert whose pages follow one another; None for others.
        self.matrices: list[list[tuple[Tensor, Tensor] | None]] = [[None] * host.num_experts for _ in range(host.num_layers)]
        self.swaps = 0
        self.waited = 0.0

    @property
    def total(self) -> int:
        """All experts of the model."""
        return self.resident.size

    @property
    def num_resident(self) -> int:
        """Experts that own pages, those being loaded included."""
        return sum(self.counts)

    @property
    def shrinkable(self) -> int:
        """Experts that may be retired."""
        if min(self.counts, default=0) >= self.floor:  # as nearly always
            return sum(self.counts) - self.floor * len(self.counts)
        return sum(max(0, count - self.floor) for count in self.counts)

    @property
    def shrinkable_pages(self) -> int:
        """Their pages."""
        return sum(max(0, count - self.floor) * pages for count, pages in zip(self.counts, self.layer_pages, strict=True))

    @property
    def owned_pages(self) -> int:
        """Pages of the experts that own any, those being loaded included."""
        return sum(count * pages for count, pages in zip(self.counts, self.layer_pages, strict=True))

    @property
    def mean_pages(self) -> float:
        """Pages of an expert, the mean over layers."""
        return sum(self.layer_pages) / len(self.layer_pages)

    @property
    def expandable(self) -> int:
        """Experts that are absent."""
        return self.total - self.num_resident

    def tiles(self, layer: int, expert: int) -> ExpertTiles | None:
        """Views of a visible expert's pages, or None if it is absent."""
        return self._tiles.get((layer, expert))

    def first_choice(self, spare_pages: int, *, floor_only: bool = False) -> list[tuple[int, int]]:
        """Experts to begin with: the floor of every layer, then the best-ranked ones while more than `spare_pages` pages stay free."""
        wanted = [(layer, expert) for layer in range(len(self.counts)) for expert in self._ranking.order(layer)[: self.floor]]
        if floor_only:
            return wanted
        room = self._pool.allocator.available(PageKind.EXPERT) - spare_pages - sum(self.layer_pages[layer] for layer, _ in wanted)
        chosen = set(wanted)
        for layer, expert in self.ranked_absent():
            if (layer, expert) not in chosen:
                room -= self.layer_pages[layer]
                if room < 0:
                    break
                wanted.append((layer, expert))
        return wanted

    def fill(self, layer: int, expert: int) -> None:
        """Load an absent expert now (used while loading the model)."""
        pages = self._pool.allocate(PageKind.EXPERT, self.layer_pages[layer])
        self._copy(layer, expert, pages)
        self.counts[layer] += 1
        self._show(layer, expert, pages)

    def refill(self, layer: int, expert: int) -> None:
        """Copy a visible expert's bytes again (used to measure a copy from memory)."""
        self._copy(layer, expert, self._pages_of(layer, expert))

    def ranked_absent(self) -> Iterator[tuple[int, int]]:
        """Absent experts as (layer, expert), best-ranked first, as they are now."""
        absent = ~self.resident
        for key in self._loading:
            absent[key] = False
        return _ordered(self._ranking.scores, absent, descending=True)

    def expand(self, count: int) -> int:
        """Start loading the `count` best-ranked absent experts for which there are pages; returns how many were started."""
        started = 0
        for layer, expert in islice(self.ranked_absent(), count):
            if self._pool.allocator.available(PageKind.EXPERT) < self.layer_pages[layer]:
                break
            pages = self._pool.allocate(PageKind.EXPERT, self.layer_pages[layer])
            future = self._loader.submit(partial(self._copy, layer, expert, pages))
            self._loading[layer, expert] = (pages, future)
            self.counts[layer] += 1
            started += 1
        return started

    def commit(self, *, wait: bool = False) -> None:
        """Make experts visible whose copies completed; with `wait`, all of them. Only between steps.

        Raises:
            Exception: what went wrong with a copy; that expert is absent again, its pages are free.
        """
        for key, (pages, future) in list(self._loading.items()):
            if wait or future.done():
                error = future.exception()
                if error is not None:
                    self._abandon(*key)
                    raise error
                del self._loading[key]
                self._show(*key, pages)

    def shrink(self, count: int) -> int:
        """Retire `count` experts above the floor and free their pages: those whose copies have not begun, then the lowest-ranked ones. Only
        between steps; returns how many."""
        retired = self._recall(count)
        if retired == count:
            return retired
        self.commit(wait=True)
        going: list[tuple[int, int]] = []
        for layer, expert in self._worst_resident():
            if retired == count:
                break
            if self.counts[layer] > self.floor:
                self.counts[layer] -= 1
                going.append((layer, expert))
                retired += 1
        # All pages are given back at once: a call for every expert would take longer than choosing them.
        pages = [page for key in going for page in self._pages_of(*key)]
        for layer, expert in going:
            self._hide(layer, expert)
        self._pool.free(pages)
        return retired

    def _recall(self, count: int) -> int:
        """Give up to `count` experts up that still wait to be copied, the newest first; nobody waits for anything. Returns how many."""
        recalled = 0
        for layer, expert in reversed(list(self._loading)):
            if recalled == count:
                break
            if self.counts[layer] > self.floor and self._loading[layer, expert][1].cancel():
                self._abandon(layer, expert)
                recalled += 1
        return recalled

    def settle(self) -> None:
        """Wait until all tables say what is so. Only between steps."""
        self.commit(wait=True)

    def move_from(self, boundary: int) -> int:
        """Move all expert pages that start at entry `boundary` or later to others, wherever the allocator gives some. Only between steps.

        Returns:
            Pages moved.

        Raises:
            OutOfPages: there are too few others; nothing was moved.
        """
        self.settle()
        return self._move(self.entries >= boundary)

    def move(self, pages: Collection[int]) -> int:
        """As `move_from`, for these pages of visible experts."""
        self.settle()
        return self._move(np.isin(self.entries, list(pages))) if pages else 0

    def _move(self, beyond: NDArray[np.bool_]) -> int:
        sources = self.entries[beyond].tolist()
        if not sources:
            return 0
        targets = self._pool.moved(PageKind.EXPERT, sources)
        entries = self.entries.copy()
        entries[beyond] = targets
        for layer, expert in np.argwhere(beyond.any(axis=2)).tolist():
            self._hide(layer, expert)
            self._show(layer, expert, entries[layer, expert, : self.layer_pages[layer]].tolist())
        self._pool.free(sources)
        return len(sources)

    def offer(self, layer: int, missed: Iterable[int], margin: float) -> None:
        """Let missed experts of one layer take the pages of residents that they outrank by the factor `margin`."""
        scores = self._ranking.scores[layer]
        victim = self._worst_of(layer)
        for expert in missed:
            if victim is None or scores[expert] <= scores[victim] * margin or (layer, expert) in self._loading:
                continue
            pages = self._pages_of(layer, victim)
            with undisturbed():
                self._hide(layer, victim)
                try:
                    self._copy(layer, expert, pages)
                except BaseException:
                    self._pool.free(pages)
                    self.counts[layer] -= 1
                    raise
                self._show(layer, expert, pages)
            self.swaps += 1
            victim = self._worst_of(layer)

    def close(self) -> None:
        """Retire everything: all expert pages go back to the pool, also those of copies that failed."""
        for layer, expert in list(self._loading):
            self._abandon(layer, expert)
        pages = self.entries[self.entries >= 0].tolist()
        for layer, expert in np.argwhere(self.resident).tolist():
            self._hide(layer, expert)
            self.counts[layer] -= 1
        self._pool.free(pages)

    def check_integrity(self) -> None:
        """Tables agree with one another and with the allocator; raises AssertionError otherwise."""
        for layer, count in enumerate(self.counts):
            loading = sum(1 for key in self._loading if key[0] == layer)
            assert count == int(self.resident[layer].sum()) + loading, f"layer {layer} counts {count} experts"
        own = np.arange(self.pages_per_expert) < np.array(self.layer_pages)[:, None, None]
        assert np.array_equal(self.entries >= 0, own & self.resident[:, :, None]), "entries and resident flags disagree"
        assert (self.entries >= -1).all(), "an entry is no page"
        pages = self.entries[self.entries >= 0].tolist() + [p for own, _ in self._loading.values() for p in own]
        assert len(pages) == len(set(pages)), "two experts share a page"
        assert all(self._pool.allocator.owner_of(p) is PageKind.EXPERT for p in pages), "an expert's page is not an expert page"

    def picture(self, *, step: int, wait: bool) -> ResidencyPicture:
        """The resident set now. Only between steps; `step` is the number of steps so far, `wait` allows to wait for a device."""
        return ResidencyPicture(self.entries, self._ranking.present(), self._on_their_way())

    def _on_their_way(self) -> NDArray[np.int32]:
        rows = [(*key, *pages, *[-1] * (self.pages_per_expert - len(pages))) for key, (pages, _) in self._loading.items()]
        return np.array(rows, dtype=np.int32).reshape(-1, 2 + self.pages_per_expert)

    def _abandon(self, layer: int, expert: int) -> None:
        """Give up an expert that is being loaded, once nothing writes to its pages any more."""
        pages, future = self._loading[layer, expert]
        if not future.cancel():
            future.exception()
        del self._loading[layer, expert]
        self._pool.free(pages)
        self.counts[layer] -= 1

    def _copy(self, layer: int, expert: int, pages: list[int]) -> None:
        self._host.copy_to(self.view, layer, expert, pages)

    def _show(self, layer: int, expert: int, pages: list[int]) -> None:
        self.entries[layer, expert, : len(pages)] = pages
        self.resident[layer, expert] = True
        self._tiles[layer, expert] = self.view.expert(pages, layer)
        self.matrices[layer][expert] = self.view.matrices(pages)

    def _hide(self, layer: int, expert: int) -> None:
        self.entries[layer, expert] = -1
        self.resident[layer, expert] = False
        del self._tiles[layer, expert]
        self.matrices[layer][expert] = None

    def _pages_of(self, layer: int, expert: int) -> list[int]:
        """Pages of a visible expert."""
        pages: list[int] = self.entries[layer, expert, : self.layer_pages[layer]].tolist()
        return pages

    def _worst_of(self, layer: int) -> int | None:
        """The lowest-ranked visible expert of a layer, or None if there is none."""
        visible = self.resident[layer]
        return int(np.where(visible, self._ranking.scores[layer], np.inf).argmin()) if visible.any() else None

    def _worst_resident(self) -> Iterator[tuple[int, int]]:
        return _ordered(self._ranking.scores, self.resident, descending=False)


def _ordered(scores: NDArray[np.float64], mask: NDArray[np.bool_], *, descending: bool) -> Iterator[tuple[int, int]]:
    """(layer, expert) pairs of the mask by score. Equals go round the layers, so that no layer is preferred where nothing is known."""
    layers = scores.shape[0]
    flat = np.flatnonzero(mask.T)
    keys = scores.T.reshape(-1)[flat]
    # Of thousands a few are wanted: the first ones are found without putting all in order.
    parts = [np.arange(len(flat))]
    if len(flat) > 4 * _FIRST:
        bound = np.partition(-keys if descending else keys, _FIRST)[_FIRST]
        near = keys >= -bound if descending else keys <= bound
        parts = [np.flatnonzero(near), np.flatnonzero(~near)]
    for part in parts:
        order = flat[part[np.argsort(-keys[part], kind="stable")]]
        for i in order if descending else order[::-1]:
            yield int(i) % layers, int(i) // layers
