"""Experts that the device cannot read by itself, brought by the host: through a few page-locked places, and in the middle of a step.

Where main memory or driver allow only a part of the experts to be page-locked, the rest stays in the checkpoint's files. Small steps run as
always, and whether one of those experts was needed shows at their end, in a counter. Only then the step is computed again, layer by layer,
with the host bringing what each layer lacks. What such a step had changed (scores, counters) is put back first; which experts are resident
may differ, which no result depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from rimuru_cli.engine.device.copying import copy_expert
from rimuru_cli.engine.device.pinned_host import Key, PinnedHost
from rimuru_cli.engine.device.residency import DeviceTables
from rimuru_cli.engine.memory.page_pool import PagePool

_PLACES = 4


class Staging:
    """A few page-locked places that experts pass through on their way from files to the device, read ahead by threads of its own."""

    def __init__(self, host: PinnedHost, pool: PagePool) -> None:
        self._host, self._pool = host, pool
        self._places = host.staging(_PLACES)
        self._left: list[torch.cuda.Event | None] = [None] * _PLACES  # when the device had taken a place's last content
        self._threads = ThreadPoolExecutor(_PLACES, thread_name_prefix="rimuru-staging")
        self._wanted: deque[Key] = deque()
        self._coming: deque[tuple[Key, int, Future[None]]] = deque()
        self._turn = 0

    def expect(self, keys: Iterable[Key]) -> None:
        """These experts (MoE layer, expert) will be asked for next, in this order."""
        self._wanted.extend(keys)
        self._read_ahead()

    def arrive(self) -> None:
        """Wait until the next expert has been read.

        Raises:
            Exception: what went wrong with that.
        """
        self._coming[0][2].result()

    def bring(self, layer: int, expert: int, pages: list[int]) -> None:
        """Copy an expert into its pages, in order of the current stream. Experts come in the order in which they were expected."""
        key, place, reading = self._coming.popleft()
        assert key == (layer, expert), f"expert {(layer, expert)} was not expected next"
        reading.result()
        self.write(layer, pages, self._places[place, : self._host.layer_bytes[layer]])
        if self._pool.data.is_cuda:
            self._left[place] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._host.bytes_read += self._host.layer_bytes[layer]
        self._read_ahead()

    def write(self, layer: int, pages: list[int], content: Tensor) -> None:
        """Copy the bytes of an expert of a MoE layer, uint8 [layer_bytes], into its pages, in order of the current stream.

        Args:
            pages: its pages, perhaps with others behind them.
        """
        copy_expert(self._pool, pages, content, self._host.tile_sizes(layer))

    def forget(self) -> None:
        """Nobody will ask for what is still expected."""
        self._wanted.clear()
        while self._coming:
            self._coming.popleft()[2].exception()

    def close(self) -> None:
        """End the threads."""
        self.forget()
        self._threads.shutdown()

    def _read_ahead(self) -> None:
        while self._wanted and len(self._coming) < _PLACES:
            key, place = self._wanted.popleft(), self._turn % _PLACES
            self._turn += 1
            self._coming.append((key, place, self._threads.submit(self._read, key, place)))

    def _read(self, key: Key, place: int) -> None:
        event = self._left[place]
        if event is not None:
            event.synchronize()
        self._host.read(*key, self._places[place, : self._host.layer_bytes[key[0]]])


class HostService:
    """What makes a small step right whose experts the device cannot all read.

    Attributes:
        staging: the places that experts pass through.
        serving: the host looks after every layer of the present step.
    """

    def __init__(self, host: PinnedHost, pool: PagePool, tables: DeviceTables) -> None:
        self._host, self._tables = host, tables
        self.staging = Staging(host, pool)
        self.serving = False

    def end(self) -> None:
        """The step is over, or has failed: what was read ahead for it and not asked for is forgotten."""
        self.staging.forget()

    def bring(self, layer: int, ids: Tensor) -> Tensor | None:
        """Make all experts of `ids` [T, k], selected in a MoE layer, resident that the device could not bring itself; waits for the device.

        They take the pages of unselected residents. A layer must have at least as many residents as experts are selected.

        Returns:
            int64 [n], how often each of the n brought experts is selected; None if there were none.
        """
        entries, chosen = self._tables.entries[layer].cpu(), ids.cpu()
        counts = torch.bincount(chosen[chosen >= 0], minlength=len(entries))
        resident, pinned = entries[:, 0] >= 0, torch.from_numpy(self._host.pinned[layer])
        missing = torch.nonzero((counts > 0) & ~resident).flatten()
        unreadable = [int(e) for e in missing if not pinned[e]]
        order = torch.argsort(self._tables.scores[layer].cpu(), stable=True).tolist()
        unselected = [e for e in order if resident[e] and not counts[e]]
        sticky, loose = [e for e in unselected if not pinned[e]], [e for e in unselected if pinned[e]]
        # The device gives up only what it can read again. Too many others would leave it nothing to exchange.
        victims = sticky + loose if 2 * int((resident & ~pinned).sum()) >= int(resident.sum()) else loose + sticky
        # Where it has too little to exchange for the rest of what is missing, the host brings that, too.
        readable = [int(e) for e in missing if pinned[e]]
        taken_loose = len([e for e in victims[: len(unreadable)] if pinned[e]])
        wanted = unreadable + readable[: max(0, len(readable) - (len(loose) - taken_loose))]
        if not wanted:
            return None
        # For that, what the device cannot give up: it needs all the others for what is left to it.
        left = victims[len(unreadable) :]
        victims = victims[: len(unreadable)] + [e for e in left if not pinned[e]] + [e for e in left if pinned[e]]
        assert len(wanted) <= len(victims), f"layer {layer} has fewer residents than experts that are selected"
        self.staging.expect((layer, e) for e in wanted)
        table = self._tables.entries[layer]
        for expert, victim in zip(wanted, victims, strict=False):
            self._exchange(layer, victim, expert, entries[victim].tolist())
            # Both at once: pages have one owner at any moment.
            table[[victim, expert]] = torch.stack((torch.full_like(entries[victim], -1), entries[victim])).to(table.device)
        self._host.brought += len(wanted)
        return counts[wanted]

    def _exchange(self, layer: int, victim: int, expert: int, pages: list[int]) -> None:
        """Bring an expert into another's pages. If it cannot be read they are as they were; if the copy is torn, the other comes back."""
        self.staging.arrive()
        try:
            self.staging.bring(layer, expert, pages)
        except BaseException:
            content = torch.empty(self._host.layer_bytes[layer], dtype=torch.uint8)
            self._host.read(layer, victim, content)
            self.staging.write(layer, pages, content)
            raise

    def close(self) -> None:
        """End the threads."""
        self.staging.close()
