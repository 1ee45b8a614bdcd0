"""Host tier, link and residents of a simulation: the engine's tables and rules over experts that have no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.bench.workload.driver import SimulatedClock
from rimuru_cli.bench.workload.routing import Drawn
from rimuru_cli.engine.experts.residency import Residency
from rimuru_cli.engine.experts.transfer import Loader


class SimulatedHost:
    """All experts of a model in main memory, without their bytes; attributes as of `HostTier`."""

    def __init__(self, num_layers: int, num_experts: int, expert_bytes: int) -> None:
        self.num_layers, self.num_experts, self.expert_bytes = num_layers, num_experts, expert_bytes
        self.bytes_read = 0
        self.brought = 0

    def copy_to(self, view: Any, layer: int, expert: int, pages: Any) -> None:
        """Nothing to copy; counts as a read."""
        self.bytes_read += self.expert_bytes

    def close(self) -> None:
        """Nothing to give up."""


class _Copy(Future[None]):
    """A copy on its way over the link; whoever waits for it lets simulated time pass."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._wait()
        return super().exception(timeout)


class SimulatedLoader(Loader):
    """Copies that take link time beside steps, first come, first served; those that wait can be cancelled."""

    def __init__(self, clock: SimulatedClock, seconds_per_copy: float) -> None:
        self._clock, self._each = clock, seconds_per_copy
        self._waiting: deque[tuple[_Copy, Callable[[], None]]] = deque()
        self._current: tuple[_Copy, Callable[[], None]] | None = None
        self._left = 0.0  # seconds that the current one still takes

    def submit(self, copy: Callable[[], None]) -> Future[None]:
        """See `Loader.submit`."""
        future = _Copy(self._finish_all)
        self._waiting.append((future, copy))
        return future

    def use(self, seconds: float) -> None:
        """The link was free for so long."""
        while self._begin():
            if self._left > seconds:
                self._left -= seconds
                return
            seconds -= self._left
            self._end()

    def close(self) -> None:
        """See `Loader.close`."""
        self._finish_all()

    def _begin(self) -> bool:
        """Start the next copy if none is under way; False if there is none."""
        while self._current is None and self._waiting:
            following = self._waiting.popleft()
            if following[0].set_running_or_notify_cancel():
                self._current, self._left = following, self._each
        return self._current is not None

    def _end(self) -> None:
        assert self._current is not None
        (future, copy), self._current = self._current, None
        copy()
        future.set_result(None)

    def _finish_all(self) -> None:
        while self._begin():
            self._clock.advance(self._left)
            self._end()


class SimulatedResidency(Residency):
    """Tables without contents; a device's own exchange of experts (`expert_fetch.resolve`) is `exchange`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.changes = 0  # of who is visible
        self._counted = -1  # what of it the counts below know
        self._visible: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._absent: list[int] = []
        self._fewest = 0

    @property
    def fewest_visible(self) -> int:
        """See `DeviceResidency.fewest_visible`."""
        self._count()
        return self._fewest

    @property
    def absent_by_layer(self) -> list[int]:
        """See `DeviceResidency.absent_by_layer`."""
        self._count()
        return self._absent

    @property
    def absent(self) -> NDArray[np.int64]:
        """The same as int64 [MoE layers]."""
        self._count()
        return self._host.num_experts - self._visible

    def _count(self) -> None:
        if self._counted != self.changes:
            self._visible, self._counted = self.resident.sum(1), self.changes
            self._fewest = int(self._visible.min())
            self._absent = [self._host.num_experts - count for count in self._visible.tolist()]

    def exchange(self, drawn: Drawn) -> int:
        """Give absent experts that a step uses the pages of the lowest-ranked unused residents of their layer; returns the misses."""
        missing, spare = drawn.touched & ~self.resident, self.resident & ~drawn.touched
        misses = missing.sum(1)
        rows = np.flatnonzero(misses)
        if len(rows):
            # The best-ranked misses of each layer and its worst-ranked spare residents; what finds no page is in scratch for this step.
            missing, spare, scores = missing[rows], spare[rows], self._ranking.scores[rows]
            first = np.arange(scores.shape[1]) < np.minimum(misses[rows], spare.sum(1))[:, np.newaxis]
            wanted = np.argsort(np.where(missing, -scores, np.inf), axis=1, kind="stable")[first]
            going = np.argsort(np.where(spare, scores, np.inf), axis=1, kind="stable")[first]
            layers = np.repeat(rows, first.sum(1))
            self.entries[layers, wanted] = self.entries[layers, going]
            self.entries[layers, going] = -1
            self.resident[layers, wanted], self.resident[layers, going] = True, False
            self.changes += 1
        return int(misses.sum())

    def commit(self, *, wait: bool = False) -> None:
        """See `Residency.commit`; what was exchanged in meanwhile is not needed a second time."""
        for key in [key for key in self._loading if self.resident[key]]:
            self._abandon(*key)
        super().commit(wait=wait)

    def _copy(self, layer: int, expert: int, pages: list[int]) -> None:
        self._host.copy_to(self.view, layer, expert, pages)

    def _show(self, layer: int, expert: int, pages: list[int]) -> None:
        self.entries[layer, expert] = pages
        self.resident[layer, expert] = True
        self.changes += 1

    def _hide(self, layer: int, expert: int) -> None:
        self.entries[layer, expert] = -1
        self.resident[layer, expert] = False
        self.changes += 1
