"""What the engine tells its admission policy, and what many sequences mean for text that is kept only for reuse."""

from __future__ import annotations

from collections.abc import Sequence

from rimuru_cli.engine.admission import PACED_FROM, AdmissionPolicy, AdmissionStats
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.sequence import Sequence as TokenSequence
from rimuru_cli.engine.stats import Work


class Worth:
    """Asks the policy about the sequences of one engine.

    Args:
        running: sequences that run, the youngest last; the scheduler's own list.
    """

    def __init__(self, parts: Parts, policy: AdmissionPolicy, work: Work, running: Sequence[TokenSequence]) -> None:
        self._parts, self._policy, self._work, self._running = parts, policy, work, running
        self._kv_per_block = parts.plan.geometry.layout(PageKind.KV).per_parent

    def of(self, blocks: int) -> bool:
        """Whether a sequence of so many token blocks is worth the experts that leave for it."""
        parts, running = self._parts, len(self._running)
        residency, info = parts.residency, parts.info
        # One that is short now will be as long as the others.
        held = parts.pool.allocator.owned(PageKind.KV) - parts.blocks.idle_pages
        pages = max(blocks * parts.blocks.num_layers, held / max(1, running))
        used = 1.0 - (1.0 - info.top_k / info.num_experts) ** running  # an expert, by a step
        seconds = 0.0 if parts.link_rate is None else used * parts.host.expert_bytes / parts.link_rate
        # With all experts resident it displaces none yet, but the one that is to leave now.
        displaced = min(pages / (self._kv_per_block * residency.pages_per_expert), residency.expandable + 1.0)
        return self._policy(AdmissionStats(running, displaced, seconds, self._work.step_seconds))

    def of_youngest(self) -> bool:
        """Whether the youngest of those that run is."""
        return self.of(len(self._running[-1].blocks) if self._running else 0)

    def spare_blocks(self) -> int:
        """Blocks that text kept only for reuse holds and experts had better have: where many sequences run, all of it."""
        many = len(self._running) >= PACED_FROM and self._parts.link_rate is not None
        return self._parts.blocks.idle_pages // self._kv_per_block if many else 0

    def evict_for(self, experts: int) -> None:
        """Give up text kept for reuse until so many experts fit, as far as that goes."""
        parts = self._parts
        wanted = experts * parts.residency.pages_per_expert
        while parts.pool.allocator.available(PageKind.EXPERT) < wanted and parts.blocks.evict(self._kv_per_block):
            pass
