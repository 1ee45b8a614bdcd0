"""The resident set where the device itself trades experts: tables live there, and the host's copies are brought up to date when needed.

Between two moves of the host (shrink, expand) the device exchanges experts on its own (`expert_fetch.resolve`): a missing expert takes the
pages of a worse one of the same layer. The number of residents of a layer therefore changes only here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.device.copying import copy_expert
from rimuru_cli.engine.device.mirror import TablesMirror
from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_cli.engine.experts.packed_view import PageView
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.experts.residency import Residency, ResidencyPicture
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_kernels.expert_fetch import COUNTER_NAMES, LayerResidency


class DeviceTables:
    """The device's own tables, one row per MoE layer.

    Attributes:
        entries: int32 [L, E, P]; scores: float32 [L, E]; pointers: int64 [L, E]; counters: int64 [L, 4]; see `LayerResidency`.
    """

    def __init__(self, host: PinnedHost, ranking: ExpertRanking, pages_per_expert: int, device: torch.device) -> None:
        shape = (host.num_layers, host.num_experts)
        self.entries = torch.full((*shape, pages_per_expert), -1, dtype=torch.int32, device=device)
        self.scores = torch.from_numpy(ranking.scores).to(device=device, dtype=torch.float32)
        self.pointers = host.pointers.to(device)
        self.counters = torch.zeros(shape[0], len(COUNTER_NAMES), dtype=torch.int64, device=device)

    def layer(self, index: int) -> LayerResidency:
        """One layer's rows."""
        return LayerResidency(self.entries[index], self.scores[index], self.pointers[index], self.counters[index])


class DeviceResidency(Residency):
    """`Residency` over tables that the device edits too.

    Attributes:
        tables: the device's tables.
        stale: set by whoever lets the device exchange experts; the host's tables are read back before they are used again.
        counted: set by whoever lets the device count selections and exchange nothing; only the ranking is behind then.
    """

    def __init__(
        self,
        pool: PagePool,
        view: PageView,
        host: PinnedHost,
        ranking: ExpertRanking,
        loader: Loader,
        tables: DeviceTables,
        *,
        floor: int,
        pages_per_expert: int,
        layer_pages: Sequence[int] | None = None,
    ) -> None:
        super().__init__(pool, view, host, ranking, loader, floor=floor, pages_per_expert=pages_per_expert, layer_pages=layer_pages)
        self.tables = tables
        self._tier = host
        self.stale = self.counted = False
        self._changed: set[tuple[int, int]] = set()
        self._mirror = TablesMirror(tables.entries, tables.scores)
        self._stream = torch.cuda.Stream() if pool.data.is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def fewest_visible(self) -> int:
        """Visible experts of the layer that has the fewest; what the device exchanges does not change it."""
        return self._host.num_experts - max(self.absent_by_layer)

    @property
    def absent_by_layer(self) -> list[int]:
        """How many experts of each layer are not visible."""
        absent = [self._host.num_experts - count for count in self.counts]
        for layer, _ in self._loading:
            absent[layer] += 1
        return absent

    def pull(self) -> None:
        """Read back what the device changed."""
        if not self.stale and not self.counted:
            return
        self.stale = self.counted = False
        self._mirror.forget()
        self.push()
        if self._stream is not None:
            began = time.perf_counter()
            torch.cuda.current_stream().synchronize()
            self.waited += time.perf_counter() - began
        self.entries = self.tables.entries.cpu().numpy()
        self.resident = self.entries[:, :, 0] >= 0
        self._ranking.scores[:] = self.tables.scores.cpu().numpy()

    def push(self) -> None:
        """Write what the host changed to the device."""
        if not self._changed:
            return
        keys = np.array(sorted(self._changed))
        self._changed.clear()
        rows = torch.from_numpy(self.entries[keys[:, 0], keys[:, 1]])
        index = torch.from_numpy(keys).to(self.tables.entries.device)
        self.tables.entries[index[:, 0], index[:, 1]] = rows.to(self.tables.entries.device)

    def commit(self, *, wait: bool = False) -> None:
        """See `Residency.commit`."""
        if not wait and not any(future.done() for _, future in self._loading.values()):
            return
        if self._loading:
            self.pull()
            # What the device fetched itself in the meantime is not needed a second time.
            for key in [key for key in self._loading if self.resident[key]]:
                self._abandon(*key)
        super().commit(wait=wait)

    def fill(self, layer: int, expert: int) -> None:
        """See `Residency.fill`."""
        if self._stream is not None:
            # Whatever was queued for these pages before, such as poison, comes first.
            self._stream.wait_stream(torch.cuda.current_stream())
        super().fill(layer, expert)

    def settle(self) -> None:
        """See `Residency.settle`."""
        self.pull()
        super().settle()

    def expand(self, count: int) -> int:
        """See `Residency.expand`."""
        self.pull()
        if self._stream is not None:
            # Pages that were given back may still be read by what is queued: copies into them come after that.
            self._stream.wait_stream(torch.cuda.current_stream())
        return super().expand(count)

    def shrink(self, count: int) -> int:
        """See `Residency.shrink`."""
        self.pull()
        return super().shrink(count)

    @torch.inference_mode()
    def picture(self, *, step: int, wait: bool) -> ResidencyPicture:
        """See `Residency.picture`. Without `wait` the device's tables are copied behind the step and shown by a later call, one step old or
        more, so that nobody waits for the device."""
        if wait:
            self.pull()
        if not self.stale and not self.counted:
            return super().picture(step=step, wait=wait)
        shown = self._mirror.turn(step)
        if shown is None:
            # Until the first copy arrives: the host's own tables, with the right pages and perhaps a few exchanges behind.
            return super().picture(step=step, wait=wait)
        return ResidencyPicture(shown.entries, shown.scores, self._on_their_way(), step - shown.step)

    def check_integrity(self) -> None:
        """See `Residency.check_integrity`; also the device's tables are the host's."""
        self.pull()
        self.push()
        super().check_integrity()
        assert np.array_equal(self.tables.entries.cpu().numpy(), self.entries), "the device's table is not the host's"

    def close(self) -> None:
        """See `Residency.close`."""
        self.pull()
        super().close()

    def absent(self, layer: int) -> Tensor:
        """Absent experts of a layer, int64, ascending. Call `pull` first."""
        return torch.from_numpy(np.flatnonzero(~self.resident[layer]))

    @torch.inference_mode()
    def _copy(self, layer: int, expert: int, pages: list[int]) -> None:
        if self._stream is None:
            super()._copy(layer, expert, pages)
            return
        with torch.cuda.stream(self._stream):
            copy_expert(self._pool, pages, self._tier.content(layer, expert), self._tier.tile_sizes(layer))
        self._stream.synchronize()

    def _show(self, layer: int, expert: int, pages: list[int]) -> None:
        self.entries[layer, expert, : len(pages)] = pages
        self.resident[layer, expert] = True
        self._changed.add((layer, expert))

    def _hide(self, layer: int, expert: int) -> None:
        self.entries[layer, expert] = -1
        self.resident[layer, expert] = False
        self._changed.add((layer, expert))
