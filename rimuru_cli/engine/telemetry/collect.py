"""Reading an engine's own tables between two of its steps. Copies nothing it need not: a frame costs a fraction of a millisecond."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rimuru_cli import __version__
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.stats import AdjusterEvent, EngineInfo, Work
from rimuru_cli.engine.telemetry.assemble import Head
from rimuru_cli.engine.telemetry.frame import AdjusterRecord, CeilingAnswer, Counters, EngineIdentity, Role
from rimuru_cli.engine.telemetry.state_rows import StateRows
from rimuru_cli.engine.telemetry.tables import Ints, Tables

if TYPE_CHECKING:
    from rimuru_cli.engine.kv_blocks import TokenBlock
    from rimuru_cli.engine.parts import Parts
    from rimuru_cli.engine.scheduler import Scheduler
    from rimuru_cli.engine.sequence import Sequence
    from rimuru_cli.engine.state_blocks import StateBlock

_WINDOW = 2.0  # seconds that rates are taken over
_MOST_EVENTS = 64


@dataclass(frozen=True)
class Watched:
    """What the collector reads of an engine, between steps only; `info` gives what is known of the model now."""

    info: Callable[[], EngineInfo]
    parts: Parts
    scheduler: Scheduler
    work: Work
    events: deque[AdjusterEvent]


class _Sample(NamedTuple):
    time: float
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    link_bytes: int


@dataclass(eq=False)
class _Text:
    """Slots of a sequence's blocks, as far as they were looked up."""

    slots: Ints
    last: TokenBlock | None = None
    moves: int = 0


class Collector:
    """Makes frames of one engine; `engine_id` tells it from all others.

    Args:
        role: which command runs the engine.
        started: when it was loaded, in seconds since 1970.
    """

    def __init__(self, engine: Watched, engine_id: str, role: Role, started: float) -> None:
        self._engine = engine
        self._id, self._role, self._started = engine_id, role, started
        self._samples: deque[_Sample] = deque()
        self._texts: dict[int, _Text] = {}
        self._identity: EngineIdentity | None = None
        self._seen: object = None
        self._state_rows = StateRows()
        self._records: tuple[AdjusterRecord, ...] = ()

    def sample(self) -> None:
        """Note how far the engine has come, for the rates. Cheap; between frames a few times a second will do."""
        work, now = self._engine.work, time.monotonic()
        self._samples.append(
            _Sample(now, work.prefill_tokens, work.prefill_seconds, work.decode_tokens, work.decode_seconds, self._link_bytes())
        )
        while len(self._samples) > 2 and self._samples[1].time < now - _WINDOW:
            self._samples.popleft()

    def collect(self, number: int, *, wait: bool, answer: CeilingAnswer | None = None) -> tuple[Head, Tables]:
        """The engine between two steps. The tables are its own, so write them down before it goes on.

        Args:
            number: of the frame.
            wait: whether a device may be waited for; it is not while the engine has something to do.
            answer: what became of the last request for another ceiling.
        """
        self.sample()
        engine, parts = self._engine, self._engine.parts
        busy = bool(engine.scheduler.running or engine.scheduler.waiting)
        picture = parts.residency.picture(step=engine.work.steps, wait=wait and not busy)
        table = parts.blocks.table
        owner = np.full(table.used, -1, dtype=np.int32)
        for request_id, slots in self._slots():
            owner[slots] = request_id
        kept = (owner < 0) & (table.pages[:, 0] >= 0)
        if (kept & (table.first < 0)).any():
            for block, depth in parts.blocks.walk():
                table.first[block.slot] = depth * parts.blocks.block_tokens
        selections = getattr(parts.experts, "selections", None)
        buffers = parts.buffers.pages
        tables = Tables(
            entries=picture.entries,
            scores=picture.scores,
            hits=selections,
            layers=parts.experts.layer_counts,
            loading=picture.loading,
            buffers=np.array(buffers, dtype=np.int32),
            blocks=table.pages,
            block_owner=owner,
            block_first=table.first,
            states=self._state_rows.rows(None if parts.recurrent is None else parts.recurrent.states, self._state_owners()),
            running=np.array(engine.work.last_ids, dtype=np.int32),
        )
        cached = int(table.first[kept].max(initial=-1))
        head = Head(
            number=number,
            time=time.time(),
            busy=busy,
            engine=self.identity(),
            counters=self._counters(picture.steps_behind, int(kept.sum()), cached),
            kv_layers=parts.model.config.attention_layers,
            events=self._adjustments(),
            answer=answer,
        )
        return head, tables

    def identity(self) -> EngineIdentity:
        """Who this is; made anew when the ceiling or the model's name changes."""
        engine, parts = self._engine, self._engine.parts
        seen = (engine.info(), parts.plan, parts.pool.num_bytes)
        if self._identity is None or self._seen is None or seen != self._seen:
            self._identity, self._seen = self._identify(), seen
        return self._identity

    def _identify(self) -> EngineIdentity:
        info, parts = self._engine.info(), self._engine.parts
        plan, geometry, host = parts.plan, parts.pool.geometry, parts.host
        strides = {kind: geometry.layout(kind).stride_bytes for kind in geometry.kinds}
        host_bytes = host.num_layers * host.num_experts * host.expert_bytes
        rates = getattr(parts.experts, "rates", None)
        return EngineIdentity(
            pid=os.getpid(),
            engine_id=self._id,
            role=self._role,
            version=__version__,
            started=self._started,
            model=info.model,
            architecture=info.architecture,
            device=info.device,
            backend_reason=info.backend_reason,
            precision=f"{info.precision}, KV {info.kv_dtype}",
            num_layers=info.num_layers,
            moe_layers=parts.model.config.moe_layers,
            num_experts=info.num_experts,
            top_k=info.top_k,
            floor=parts.residency.floor,
            ceiling_bytes=plan.ceiling,
            least_ceiling_bytes=plan.minimum,
            program_bytes=plan.program,
            dense_bytes=plan.dense,
            workspace_bytes=plan.workspace,
            pool_bytes=parts.pool.num_bytes,
            context_limit=info.context_limit,
            model_context=info.model_context,
            huge_page_bytes=geometry.huge_page_bytes,
            expert_page_bytes=strides[PageKind.EXPERT],
            ssm_page_bytes=strides.get(PageKind.SSM),
            kv_page_bytes=strides[PageKind.KV],
            conv_page_bytes=strides.get(PageKind.CONV),
            pages_per_expert=geometry.pages_per_expert,
            tiles=geometry.tiles,
            block_tokens=parts.blocks.block_tokens,
            expert_bytes=info.expert_bytes,
            host_tier="pinned" if info.pinned_bytes >= host_bytes else "mapped",
            host_bytes=host_bytes,
            host_pinned_bytes=info.pinned_bytes,
            link_ceiling=None if rates is None or not rates.measured else max(rates.copy, rates.fetch),
            notices=info.notices,
            layer_tiles=() if plan.experts.alike else tuple(tuple(tiles) for tiles in plan.experts.layer_tiles),
        )

    def _state_owners(self) -> dict[StateBlock, int]:
        owners = {}
        for sequence in self._engine.scheduler.running:
            for block in (sequence.states, *sequence.keeping.values()):
                if block is not None:
                    owners[block] = sequence.request.id
        return owners

    def _slots(self) -> list[tuple[int, Ints]]:
        """Slots of the blocks of every sequence that holds any; notes where in its text each block begins."""
        found = []
        sequences = {sequence.request.id: sequence for sequence in (*self._engine.scheduler.running, *self._engine.scheduler.waiting)}
        for gone in self._texts.keys() - sequences.keys():
            del self._texts[gone]
        for request_id, sequence in sequences.items():
            text = self._texts.setdefault(request_id, _Text(np.zeros(0, dtype=np.int32)))
            self._extend(text, sequence)
            found.append((request_id, text.slots))
        return found

    def _extend(self, text: _Text, sequence: Sequence) -> None:
        blocks, known = sequence.blocks, len(text.slots)
        # Blocks are a path in a tree, so the last one tells them all, unless they were exchanged for others with the same tokens.
        moves = self._engine.parts.blocks.moves
        if known > len(blocks) or text.moves != moves or (known and blocks[known - 1] is not text.last):
            text.slots, text.moves, known = text.slots[:0], moves, 0
        if known < len(blocks):
            new = np.array([block.slot for block in blocks[known:]], dtype=np.int32)
            size = self._engine.parts.blocks.block_tokens
            self._engine.parts.blocks.table.first[new] = np.arange(known, len(blocks)) * size
            text.slots, text.last = np.concatenate((text.slots, new)), blocks[-1]

    def _counters(self, steps_behind: int, kept_blocks: int, last_kept: int) -> Counters:
        engine, parts = self._engine, self._engine.parts
        work, allocator, experts = engine.work, parts.pool.allocator, parts.experts
        blocks, scheduler = parts.blocks, engine.scheduler
        tokens = [len(sequence.tokens) for sequence in (*scheduler.running, *scheduler.waiting)]
        longest = max(scheduler.running, key=lambda sequence: len(sequence.blocks), default=None)
        others = allocator.owned(PageKind.KV) - blocks.idle_pages - (0 if longest is None else len(longest.blocks) * blocks.num_layers)
        possible = (parts.plan.kv_pages - max(0, others)) // blocks.num_layers * blocks.block_tokens
        uses, hits = experts.layer_counts.sum(axis=0)
        first, last = self._samples[0], self._samples[-1]
        elapsed = last.time - first.time
        return Counters(
            step=work.steps,
            tables_step=max(0, work.steps - steps_behind),
            prefill_tokens=work.prefill_tokens,
            decode_tokens=work.decode_tokens,
            prefill_rate=_rate(last.prefill_tokens - first.prefill_tokens, last.prefill_seconds - first.prefill_seconds),
            decode_rate=_rate(last.decode_tokens - first.decode_tokens, last.decode_seconds - first.decode_seconds),
            ttft=work.ttft_seconds,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            context_used=max(tokens) if tokens else last_kept + blocks.block_tokens if last_kept >= 0 else 0,
            context_possible=max(0, min(engine.info().context_limit, possible)),
            cached_tokens=kept_blocks * blocks.block_tokens,
            expert_uses=int(uses),
            expert_hits=int(hits),
            resident_experts=parts.residency.num_resident,
            total_experts=parts.residency.total,
            swaps=parts.residency.swaps,
            link_bytes=last.link_bytes,
            link_rate=_rate(last.link_bytes - first.link_bytes, elapsed),
            preemptions=scheduler.preemptions,
            splits=allocator.splits,
            merges=allocator.merges,
            free_bytes=allocator.free_bytes,
            tail_bytes=allocator.tail_bytes,
            states_not_kept=0 if parts.recurrent is None else parts.recurrent.room.skipped,
        )

    def _link_bytes(self) -> int:
        parts = self._engine.parts
        return int(parts.host.bytes_read + parts.experts.fetched_bytes)

    def _adjustments(self) -> tuple[AdjusterRecord, ...]:
        """The last decisions, numbered from the first ever; the same object as last time if nothing was added."""
        total = self._engine.work.adjustments
        if (self._records[-1].number + 1 if self._records else 0) != total:
            events = list(self._engine.events)[-_MOST_EVENTS:]
            self._records = tuple(
                AdjusterRecord(
                    number, event.step, event.time, event.shrunk, event.expanded, event.reason, event.required_blocks, event.free_blocks
                )
                for number, event in enumerate(events, total - len(events))
            )
        return self._records


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if amount > 0 and seconds > 0 else 0.0
