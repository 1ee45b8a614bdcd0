"""What the engine tells its admission policy, and what many sequences mean for text that is kept only for reuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rimuru_cli.engine.admission import PACED_FROM, AdmissionPolicy, AdmissionStats, Crowd, Group, eager
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.stats import Work

if TYPE_CHECKING:
    from rimuru_cli.engine.scheduler import Scheduler


class Worth:
    """Asks the policy about the sequences of one engine.

    Args:
        scheduler: whose they are.
    """

    def __init__(self, parts: Parts, policy: AdmissionPolicy, work: Work, scheduler: Scheduler) -> None:
        self._parts, self._policy, self._work, self._scheduler = parts, policy, work, scheduler
        self._running = scheduler.running
        self._kv_per_block = parts.plan.geometry.layout(PageKind.KV).per_parent
        self._page_bytes = parts.plan.geometry.expert_page_bytes
        self._came_in = -1  # the step before which somebody was let in last

    def of(self, blocks: int, *, joins: bool) -> bool:
        """Whether a sequence of so many token blocks is worth the experts that leave for it.

        Args:
            blocks: 0: it displaces none.
            joins: it does not run yet.
        """
        if self._policy is eager:  # which asks for nothing that is worked out here
            return True
        running, work = len(self._running) + joins, self._work
        first = joins and not blocks and work.captured_rows is not None
        crowd = self._crowd(running) if first else None
        group = self._group(running) if first and self._came_in != work.steps else None
        stats = AdmissionStats(running, blocks > 0, self._taken, self._expert_seconds(running), work.step_seconds, crowd, group)
        comes = self._policy(stats)
        if comes and first:
            self._came_in = work.steps
        return comes

    def of_youngest(self) -> bool:
        """Whether the youngest of those that run is."""
        return self.of(len(self._running[-1].blocks) if self._running else 0, joins=False)

    @property
    def _pages(self) -> float:
        """KV pages of an average sequence that runs; at least one."""
        if self._parts.recurrent is not None:  # bookmarks hold pages, too
            held = sum(len(sequence.blocks) for sequence in self._running) * self._parts.blocks.num_layers
        else:
            held = self._parts.pool.allocator.owned(PageKind.KV) - self._parts.blocks.idle_pages
        return max(1.0, held / max(1, len(self._running)))

    @property
    def _taken(self) -> float:
        """Experts that would fit where there are none in the pool."""
        parts = self._parts
        return parts.pool.num_bytes / (parts.residency.mean_pages * self._page_bytes) - parts.residency.num_resident

    def _expert_seconds(self, running: int) -> float:
        """What an absent expert costs a step of so many sequences on average."""
        parts = self._parts
        used = 1.0 - (1.0 - parts.info.top_k / parts.info.num_experts) ** running  # an expert, by a step
        return 0.0 if parts.link_rate is None else used * parts.host.expert_bytes / parts.link_rate

    @property
    def _sequence_bytes(self) -> float:
        """Of the pool, that an average sequence takes."""
        recurrent = self._parts.recurrent
        return self._pages * self._parts.plan.geometry.kv_page_bytes + (0.0 if recurrent is None else recurrent.room.state_bytes)

    @property
    def _free_bytes(self) -> int:
        """What more sequences find if only text kept for reuse goes; each that runs has a block to spare, as in the scheduler."""
        parts, recurrent = self._parts, self._parts.recurrent
        blocks = parts.blocks
        pages = blocks.idle_pages - len(self._running) * blocks.num_layers
        if recurrent is None:
            return (pages + parts.pool.allocator.available(PageKind.KV)) * parts.plan.geometry.kv_page_bytes
        return pages * parts.plan.geometry.kv_page_bytes + parts.pool.allocator.free_bytes + recurrent.room.kept_bytes

    def _reachable(self, running: int, step_seconds: float) -> tuple[int, float]:
        """Sequences that could run in steps that take so long now, and what such a step takes then."""
        scheduler, residency, here = self._scheduler, self._parts.residency, len(self._running)
        everybody = min(here + len(scheduler.waiting), scheduler.max_sequences)
        one, expert = self._sequence_bytes, residency.mean_pages * self._page_bytes
        beside = here + max(0, int(self._free_bytes / one))  # experts stay
        cost = self._expert_seconds(running)
        # Whoever displaces experts must be worth it, too.
        if beside >= everybody or self._taken * cost > step_seconds:
            return min(everybody, beside), step_seconds
        reachable = min(everybody, beside + int(residency.shrinkable * expert / one))
        # Experts that are displaced then, and are not now, are brought in every step.
        return reachable, step_seconds + (reachable - beside) * one / expert * cost

    def _crowd(self, running: int) -> Crowd | None:
        work, captured = self._work, self._work.captured_rows
        if captured is None or running <= captured:
            return None
        wide, narrow = work.wide_seconds, work.captured_seconds
        if narrow is None and self._parts.residency.expandable:
            narrow = self._parts.residency.expandable * self._expert_seconds(captured)  # bringing absent experts is a part of it
        reachable = 0
        if wide is not None:
            reachable, wide = self._reachable(running, wide)
        return Crowd(captured, narrow, wide, reachable)

    def _group(self, running: int) -> Group | None:
        work, others = self._work, len(self._running)
        captured, step, prompt = work.captured_rows, work.step_seconds, work.prompt_seconds
        if captured is None or step is None or prompt is None:
            return None
        room, _ = self._reachable(running, step)
        places = (room if running > captured else min(room, captured)) - others
        tokens = self._pages / self._parts.blocks.num_layers * self._parts.blocks.block_tokens
        return Group(len(self._scheduler.waiting), places, tokens, step, prompt)

    @property
    def crowded(self) -> bool:
        """Whether so many sequences run that experts are worth more than text kept only for reuse."""
        return len(self._running) >= PACED_FROM and self._parts.link_rate is not None

    def spare_blocks(self) -> int:
        """Blocks that text kept only for reuse holds and experts had better have: where many sequences run, all of it."""
        return self._parts.blocks.idle_pages // self._kv_per_block if self.crowded else 0

    def evict_for(self, experts: int) -> None:
        """Give up text kept for reuse until so many experts fit, as far as that goes."""
        parts = self._parts
        wanted = experts * parts.residency.pages_per_expert
        while parts.pool.allocator.available(PageKind.EXPERT) < wanted and parts.blocks.evict(self._kv_per_block):
            pass
