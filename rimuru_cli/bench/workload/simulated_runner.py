"""What a simulated step does: the device runner's decisions, with the same objects, and then the clock moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rimuru_cli.bench.workload.cost import CostModel, StepLoad
from rimuru_cli.bench.workload.driver import SimulatedClock
from rimuru_cli.bench.workload.routing import FEW, TOPICS, Drawn, SyntheticRouting
from rimuru_cli.bench.workload.simulated_memory import SimulatedHost, SimulatedLoader, SimulatedResidency
from rimuru_cli.engine.alike import RepeatedSteps
from rimuru_cli.engine.device.choice import StepChoice
from rimuru_cli.engine.device.lending import Lender
from rimuru_cli.engine.experts.ranking import ExpertRanking
from rimuru_cli.engine.scheduler import ScheduledRows

_MOST_AHEAD = 32
"""Steps that are worked out together at the most."""


class SimulatedExperts(StepChoice):
    """Counts selections, and decides as `DeviceExperts` does."""

    recorder = None
    fetched_bytes = 0

    def __init__(self, **choice: Any) -> None:
        super().__init__(**choice)
        self.uses = self.hits = 0
        self.row_hits: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def count(self, rows: int, uses: int, hits: int) -> None:
        """A step of so many rows selected `uses` experts, `hits` of them resident."""
        self.uses += uses
        self.hits += hits
        self._learn(rows, uses, hits)
        self.row_hits = np.full(rows, hits // rows, dtype=np.int64)
        self.row_hits[: hits % rows] += 1

    def close(self) -> None:
        """Nothing to end."""


class SimulatedRunner:
    """Takes a step's decisions, works out its time and lets it pass."""

    def __init__(
        self,
        *,
        experts: SimulatedExperts,
        residency: SimulatedResidency,
        ranking: ExpertRanking,
        host: SimulatedHost,
        loader: SimulatedLoader,
        lender: Lender,
        routing: SyntheticRouting,
        cost: CostModel,
        clock: SimulatedClock,
        top_k: int,
        live: bool,
    ) -> None:
        self._experts, self.residency, self._ranking = experts, residency, ranking
        self._host, self._loader, self._lender = host, loader, lender
        self.routing, self.cost, self._clock = routing, cost, clock
        self._uses_per_row = host.num_layers * top_k
        self._live = live
        self._topics: dict[int, int] = {}

    def forward(self, plan: Sequence[ScheduledRows]) -> Tensor | None:
        """Zeros float32 [number of sampling rows, 1], or None if no row is sampled from."""
        counts = np.array([item.count for item in plan])
        computed = np.array([item.sequence.computed for item in plan])
        rows, sampled = int(counts.sum()), sum(item.samples for item in plan)
        visible, held = int((counts * computed + counts * (counts + 1) // 2).sum()), int(computed.sum()) + rows
        requests = [item.sequence.request.id for item in plan]
        topics = [self.topic(request) for request in requests]
        each = rows == len(plan) == sampled
        if rows == len(plan) <= FEW:
            draw = partial(self.routing.draw_each, dict(zip(requests, topics, strict=True)))
        else:
            sums = np.bincount(topics, weights=counts, minlength=TOPICS).astype(np.float32)
            draw = partial(self.routing.draw_sums, sums)
        self._compute(rows, len(plan), visible, held, draw, each=each)
        return torch.zeros(sampled, 1) if sampled else None

    def _compute(self, rows: int, sequences: int, visible: int, held: int, draw: Callable[[], Drawn], *, each: bool) -> None:
        """Let the time of a step pass; `each`: it has a row of every sequence, which is sampled from."""
        on_demand, slots = self.choose(rows)
        drawn = draw()
        hits = self.hits(drawn.uses, rows)
        self.learn(drawn.uses, rows)
        compute = self.cost.compute(StepLoad(rows, sequences, visible, held, drawn.touched.sum(1), on_demand and each))
        if on_demand:
            missed = self.residency.exchange(drawn)
            seconds = self.cost.on_demand(compute, missed)
        else:
            missed = sum(self.residency.absent_by_layer)
            seconds = self.cost.streamed(compute, self.residency.absent, slots)
        self.over(rows, hits, missed, seconds, on_demand=on_demand)

    def choose(self, rows: int) -> tuple[bool, int]:
        """Whether a step of so many rows is on demand, and through how many places experts are streamed if not."""
        on_demand = self._experts.prefers_on_demand(rows)
        buffers = self._lender.lend(rows, on_demand=on_demand)
        return on_demand, 0 if buffers is None else len(buffers.slots)

    def hits(self, uses: NDArray[np.float32], rows: int) -> int:
        """Selections that find their expert resident."""
        share = float(uses[self.residency.resident].sum()) / float(uses.sum())
        return round(share * rows * self._uses_per_row)

    def learn(self, uses: NDArray[np.float32], rows: int) -> None:
        """Take the selections of a step into the ranking."""
        if self._live:
            self._ranking.begin_step(rows)
            self._ranking.add_counts(uses * (rows * self._host.num_layers / float(uses.sum())), rows)

    def over(self, rows: int, hits: int, missed: int, seconds: float, *, on_demand: bool) -> None:
        """Let a step's time pass, in which so many experts were brought."""
        busy = missed * self.cost.expert_bytes / (self.cost.fetch if on_demand else self.cost.copy)
        self._host.bytes_read += missed * self._host.expert_bytes
        self._experts.count(rows, rows * self._uses_per_row, hits)
        self._clock.advance(seconds)
        self._loader.use(max(0.0, seconds - busy))

    def repeat(self, plan: Sequence[ScheduledRows]) -> RepeatedSteps:
        """See `alike.Repeats`."""
        return _Repeated(self, plan)

    @property
    def row_hits(self) -> NDArray[np.int64]:
        """Of each row of the last step."""
        return self._experts.row_hits

    def launch_ahead(self, likeliest: Tensor, arriving: Tensor) -> None:
        """Nothing can be ahead of a clock that stands still meanwhile."""

    def topic(self, request: int) -> int:
        """What a request is about."""
        topic = self._topics.get(request)
        if topic is None:
            topic = self._topics[request] = self.routing.topic_of(request)
        return topic


class _Repeated:
    """Steps of the same sequences, one row of each. What larger ones compute is worked out for several together."""

    def __init__(self, runner: SimulatedRunner, plan: Sequence[ScheduledRows]) -> None:
        self._runner = runner
        self._requests = [rows.sequence.request.id for rows in plan]
        self._topics = [runner.topic(request) for request in self._requests]
        self._texts = [rows.sequence.computed for rows in plan]  # before the first of these steps
        self._held, self._done = sum(self._texts), 0
        self._captured = False
        self._residents: tuple[bool, int, int] | None = None
        self._count()

    def forward(self, left: int) -> NDArray[np.int64]:
        """See `RepeatedSteps.forward`."""
        runner, rows = self._runner, len(self._requests)
        self._held += rows
        self._done += 1
        if rows <= FEW:
            draw = partial(runner.routing.draw_each, dict(zip(self._requests, self._topics, strict=True)))
            runner._compute(rows, rows, self._held, self._held, draw, each=True)
            return runner.row_hits
        on_demand, slots = runner.choose(rows)
        if self._place == len(self._compute) or on_demand != self._captured:
            self._look_ahead(min(left, _MOST_AHEAD), on_demand)
        residents = on_demand, slots, runner.residency.changes
        if residents != self._residents:
            self._look_at_residents(residents)
        place, uses = self._place, self._uses
        runner.routing.use(1)
        runner.learn(uses, rows)
        if on_demand:
            missing = self._absent is not None and bool((self._touched[place] & self._absent).any())
            missed = runner.residency.exchange(Drawn(self._touched[place], uses)) if missing else 0
            seconds = self._seconds[place] + runner.cost.fetching(missed)
        else:
            missed, seconds = self._streamed, self._stream.seconds(self._compute[place])
        self._place += 1
        runner.over(rows, self._hits, missed, seconds, on_demand=on_demand)
        return runner.row_hits

    def leave(self, place: int) -> None:
        """See `RepeatedSteps.leave`."""
        self._held -= self._texts.pop(place) + self._done
        del self._requests[place], self._topics[place]
        self._count()

    def _count(self) -> None:
        """Others run from now on."""
        self._tokens = np.bincount(self._topics, minlength=TOPICS).astype(np.float32)
        self._compute: NDArray[np.float64] = np.zeros((0, 0))
        self._place = 0

    def _look_ahead(self, steps: int, on_demand: bool) -> None:
        """Work out what the next steps choose and compute."""
        runner, rows = self._runner, len(self._requests)
        self._place, self._captured, self._residents = 0, on_demand, None
        self._touched, self._uses = runner.routing.foresee(self._tokens, steps)
        held = self._held + rows * np.arange(steps)[:, np.newaxis]
        self._compute = runner.cost.compute(StepLoad(rows, rows, held, held, self._touched.sum(2), on_demand))
        self._seconds = self._compute.sum(1).tolist()

    def _look_at_residents(self, residents: tuple[bool, int, int]) -> None:
        """Work out what they mean for the next step, and for those after it as long as nothing moves."""
        runner = self._runner
        on_demand, slots, _ = self._residents = residents
        self._hits = runner.hits(self._uses, len(self._requests))
        if on_demand:
            self._absent = None if runner.residency.resident.all() else ~runner.residency.resident
        else:
            self._streamed = sum(runner.residency.absent_by_layer)
            self._stream = runner.cost.stream(runner.residency.absent, slots)
