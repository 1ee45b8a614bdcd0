"""One forward pass on a device. Decode steps whose misses the device fetches replay a captured graph; others run kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.engine.device.choice import MAX_ON_DEMAND_ROWS
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.kv_cache import DeviceKVCache
from rimuru_cli.engine.device.lending import Lender
from rimuru_cli.engine.device.replay import ReplayedRouting
from rimuru_cli.engine.device.residency import DeviceResidency
from rimuru_cli.engine.device.states import DeviceStates
from rimuru_cli.engine.device.streaming import ScratchPages, StreamBuffers
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_cli.engine.sequence import Sequence as TokenSequence
from rimuru_cli.engine.turns import undisturbed
from rimuru_models.interfaces import CausalLM, ForwardContext


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


@dataclass
class _Ahead:
    """A decode step that was queued before it was planned.

    Attributes:
        places: each row's sequence and position.
        tokens: the rows' tokens, on the host once the step before is over.
        marks: what `DeviceExperts.rewind` takes.
        override: the recorded routing that it followed.
    """

    places: list[tuple[TokenSequence, int]]
    tokens: Tensor
    logits: Tensor
    marks: list[tuple[Tensor, Tensor]]
    override: ReplayedRouting | None


class DeviceRunner:
    """Runs the model over a plan and returns the logits that are sampled from.

    Args:
        states: of the recurrent layers; None where the model has none. free_up: see `Lender`.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: DeviceKVCache,
        experts: DeviceExperts,
        residency: DeviceResidency,
        blocks: KVBlocks,
        pool: PagePool,
        scratch: ScratchPages,
        *,
        graphs: bool,
        states: DeviceStates | None = None,
        free_up: Callable[[int], bool] | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._experts = experts
        self._blocks = blocks
        self._scratch = scratch
        self._states = states
        self._lender = Lender(pool, residency, blocks, experts, scratch, free_up)
        self._graphs_wanted = graphs and pool.data.is_cuda
        # By rows, and by the recorded routing that is replayed, if any: where it lies is part of a graph.
        self._graphs: dict[tuple[int, ReplayedRouting | None], _Captured] = {}
        self._graph_pool: Any = None
        self._logits: Tensor | None = None
        self._decoded: list[ScheduledRows] | None = None  # the plan of the step just queued, if the next may be launched ahead
        self._ahead: _Ahead | None = None

    def forward(self, plan: Sequence[ScheduledRows]) -> Tensor | None:
        """Logits float32 [number of sampling rows, vocab] in the plan's order, or None if no row is sampled from."""
        ahead, self._ahead, self._decoded = self._ahead, None, None
        if ahead is not None:
            if self._is(ahead, plan):
                self._experts.take_counters()
                self._done()
                self._decoded = list(plan)
                return ahead.logits
            self._experts.rewind(ahead.marks)
        self._take_back()
        order = sorted(range(len(plan)), key=lambda i: plan[i].count != 1)
        ordered = [plan[i] for i in order]
        tokens: list[int] = []
        ends: dict[int, int] = {}
        for index, rows in zip(order, ordered, strict=True):
            tokens += rows.sequence.tokens[rows.sequence.computed : rows.sequence.computed + rows.count]
            if rows.samples:
                ends[index] = len(tokens) - 1
        sampled = [ends[index] for index in sorted(ends)]
        decode, on_demand = len(tokens) == len(plan), self._experts.prefers_on_demand(len(tokens))
        with undisturbed():
            buffers = self._lender.lend(len(tokens), on_demand=on_demand)
        self._cache.begin_step(ordered, tokens)  # only now: making room may have moved pages
        if self._states is not None:
            self._states.begin_step(ordered)
        # Kernel by kernel the host can just as well look after every layer at once; so it has to where a step could not be taken back.
        unserved = not self._experts.needs_service or (self._graphs_wanted and self._can_take_back(ordered))
        if decode and on_demand and len(sampled) == len(tokens) and self._experts.recorder is None and unserved:
            marks = self._experts.marks() if self._experts.needs_service else []
            if self._experts.needs_service:
                self._save(ordered)
            logits = self._decode(len(tokens))
            self._experts.take_counters()
            if not self._experts.needs_service:
                self._decoded = ordered
            elif self._experts.lacked():
                self._experts.rewind(marks)
                self._take_back()
                logits = self._model.logits(self._eager(len(tokens), None, on_demand=True))
            self._done()
            return logits
        hidden = self._eager(len(tokens), buffers, on_demand=on_demand)
        return self._model.logits(hidden[torch.tensor(sampled, device=hidden.device)]) if sampled else None

    def launch_ahead(self, likeliest: Tensor, arriving: Tensor) -> None:
        """Queue the next decode step before the host knows this one's tokens, so that the device need not wait for the host.

        If the next plan is just that step, its result is there; if not, it was computed in vain: keys and values that it stored lie behind
        the end of their sequences, experts that it exchanged change no result, and states are brought back (`Undo`).

        Args:
            likeliest: int64 [R] on the device, the tokens that the rows will have said.
            arriving: [R] or more, where they arrive on the host.
        """
        plan, self._decoded = self._decoded, None
        if plan is None or not self._cache.holds(plan) or not all(self._goes_on(rows.sequence) for rows in plan):
            return
        if not self._can_take_back(plan) or (self._states is not None and not self._states.holds(plan)):
            return
        if self._experts.recorder is not None or self._experts.scratch_needed(len(plan)) > self._scratch.experts:
            return
        marks = self._experts.marks()
        self._save(plan)
        self._cache.advance(likeliest)
        logits = self._decode(len(plan))
        places = [(rows.sequence, rows.sequence.computed + 1) for rows in plan]
        self._ahead = _Ahead(places, arriving, logits, marks, self._experts.override)

    def _goes_on(self, sequence: TokenSequence) -> bool:
        """Whether a sequence whose newest token is being computed has a place for the next, which will not be its last."""
        return sequence.computed + 2 < sequence.limit and self._blocks.blocks_for(sequence.computed + 2) <= len(sequence.blocks)

    def _is(self, ahead: _Ahead, plan: Sequence[ScheduledRows]) -> bool:
        """Whether the step that was launched ahead is the one that is planned now."""
        if len(plan) != len(ahead.places) or self._experts.recorder is not None or self._experts.override is not ahead.override:
            return False
        if self._states is not None and not self._states.undo.holds([rows.sequence.states for rows in plan]):
            return False
        return all(
            rows.count == 1
            and rows.sequence is sequence
            and sequence.computed == computed == len(sequence.tokens) - 1
            and sequence.tokens[computed] == token
            for rows, (sequence, computed), token in zip(plan, ahead.places, ahead.tokens[: len(plan)].tolist(), strict=True)
        )

    def _can_take_back(self, plan: Sequence[ScheduledRows]) -> bool:
        """Whether a step of these sequences may be queued although it may turn out not to be wanted."""
        return self._states is None or len(plan) <= self._states.undo.sequences

    def _save(self, plan: Sequence[ScheduledRows]) -> None:
        if self._states is not None:
            self._states.undo.save([rows.sequence.states for rows in plan if rows.sequence.states is not None])

    def _done(self) -> None:
        if self._states is not None:
            self._states.undo.done()

    def _take_back(self) -> None:
        if self._states is not None:
            self._states.undo.take_back()

    def _decode(self, rows: int) -> Tensor:
        """Logits [rows, vocab] of a step of one row a sequence, misses fetched by the device; its counters are sent."""
        self._experts.begin_on_demand(rows)
        # A copy, since the graph's own result is overwritten by the next replay.
        logits = self._replay(rows).clone() if self._graphs_wanted else self._model.logits(self._run(rows))
        self._experts.send_counters()
        return logits

    def _eager(self, rows: int, buffers: StreamBuffers | None, *, on_demand: bool) -> Tensor:
        """Kernel by kernel."""
        try:
            if on_demand:
                self._experts.begin_on_demand(rows, serving=self._experts.needs_service)
            else:
                self._experts.begin_streamed(rows, buffers)
            hidden = self._run(rows)
            self._experts.send_counters()
            self._experts.take_counters()
            return hidden
        finally:
            self._experts.end_step()

    def _run(self, rows: int) -> Tensor:
        cache = self._cache
        context = ForwardContext(
            positions=cache.positions[:rows],
            kv=cache,
            experts=self._experts,
            projected=cache,
            routed=self._experts,
            recurrent=self._states,
        )
        self._experts.begin_forward()
        return self._model.forward(cache.tokens[:rows], context)

    def _replay(self, rows: int) -> Tensor:
        assert rows <= MAX_ON_DEMAND_ROWS
        override = self._experts.override
        captured = self._graphs.get((rows, override))
        if captured is None:
            # Those of another recording go: nobody replays it again, and each holds memory.
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] in (None, override)}
            captured = self._graphs[rows, override] = self._capture(rows)
        captured.graph.replay()
        return captured.logits

    def _capture(self, rows: int) -> _Captured:
        """Run once to compile and warm up, then capture. Both really compute, without states; keys and values are simply stored again."""
        marks, stream, logits = self._experts.marks(), _capture_stream(), self._place_of_logits()
        with nullcontext() if self._states is None else self._states.set_aside():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self._experts.warm_ups):
                    self._model.logits(self._run(rows))
            torch.cuda.current_stream().wait_stream(stream)
        self._experts.rewind(marks)
        graph = torch.cuda.CUDAGraph()
        # Experts may be arriving meanwhile: what their thread asks of the driver is none of the capture's business.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"):
            logits[:rows].copy_(self._model.logits(self._run(rows)))
        self._graph_pool = graph.pool()
        return _Captured(graph, logits[:rows])

    def _place_of_logits(self) -> Tensor:
        """Float32 [most rows of a graph, vocab], where all graphs leave their result: one for each of them would be gigabytes."""
        if self._logits is None:
            most = min(MAX_ON_DEMAND_ROWS, len(self._cache.seq_lens))
            self._logits = torch.empty(most, self._model.config.vocab_size, dtype=torch.float32, device=self._cache.seq_lens.device)
        return self._logits


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures of the process: for every stream that multiplies matrices, libraries keep a workspace of some 32 MiB.

    Of the streams with priority, because torch hands out the same 32 plain ones in turn: sooner or later a thread that brings experts would
    get this one, and its copies would be taken for part of a graph.
    """
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
