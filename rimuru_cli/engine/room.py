"""Room for the pages of sequences in a model with recurrent layers, where pages of four kinds and three levels want the same bytes.

What goes first: token blocks that nothing can resume from, then experts down to their floor, and bookmarks last; the number of
bookmarks is bounded instead. Where free pages lie scattered over huge pages that are in use otherwise, what is in their way is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rimuru_cli.engine.bookmarks import Bookmarks
from rimuru_cli.engine.experts.residency import Residency
from rimuru_cli.engine.experts.streaming import LoadingBuffers
from rimuru_cli.engine.kv_blocks import KVBlocks, TokenBlock
from rimuru_cli.engine.memory.division import Division, Wanted
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.sequence import Sequence
from rimuru_cli.engine.state_blocks import StateBlocks

if TYPE_CHECKING:
    from rimuru_cli.engine.device.streaming import ScratchPages

KEPT_SHARE = 8
"""Bookmarks take at most the pool's 8th part."""

LEAST_KEPT = 2
"""... but as many as this may be kept in any pool: one for what was said, one for the prompt that is being computed."""


class Room:
    """Makes room; called between steps only.

    Args:
        division: sums over the pool's page sizes.
        pool, blocks, states, bookmarks, residency, buffers: who owns pages.
        floor_pages: expert pages that must stay whatever runs: those of the experts' floor, and the least that steps need beside them.

    Attributes:
        skipped: states that were to be kept to resume from and were not, because that would have cost too much.
        adjust: asks for experts to be retired, given how many expert pages are lacking; set by the engine.
        crowded: whether so many run that experts are worth more than states kept to resume from; set by the engine.
        running: sequences that hold pages; set by the engine.
    """

    def __init__(
        self,
        division: Division,
        pool: PagePool,
        blocks: KVBlocks,
        states: StateBlocks,
        bookmarks: Bookmarks,
        residency: Residency,
        buffers: LoadingBuffers | ScratchPages,
        floor_pages: int,
    ) -> None:
        self._division = division
        self._pool = pool
        self._allocator = pool.allocator
        self._blocks = blocks
        self._states = states
        self._bookmarks = bookmarks
        self._residency = residency
        self._buffers = buffers
        self._floor_pages = floor_pages
        # Pages lent to the steps of a device; others are fixed.
        self._lent = None if isinstance(buffers, LoadingBuffers) else buffers
        self.skipped = 0
        self.adjust: Callable[[int], None] = lambda required_blocks: None
        self.crowded: Callable[[], bool] = lambda: False
        self.running: Callable[[], Iterable[Sequence]] = lambda: ()

    @property
    def most_kept(self) -> int:
        """Bookmarks that there may be."""
        geometry = self._division.geometry
        one = self._states.layout.huge_pages * geometry.huge_page_bytes
        return max(LEAST_KEPT, self._pool.num_bytes // KEPT_SHARE // one)

    def held(self, joining: Iterable[TokenBlock] = ()) -> tuple[int, int]:
        """KV pages and state blocks that running sequences hold; `joining` are blocks of one that is about to run."""
        blocks = {id(block) for sequence in self.running() for block in sequence.blocks} | {id(block) for block in joining}
        states = sum((sequence.states is not None) + len(sequence.keeping) for sequence in self.running())
        return len(blocks) * self._blocks.num_layers, states

    def make(self, num_blocks: int, states: int, joining: Iterable[TokenBlock] = (), *, worth: Callable[[], bool] = lambda: True) -> bool:
        """Make sure that so many token blocks and state blocks can be allocated now; gives nothing up and returns False if they cannot.

        Args:
            joining: blocks of the tree that will be held besides: as long as nobody ran who holds them, they could be given up.
            worth: whether who wants them is worth the experts that leave for it; if not, only text kept for reuse does.
        """
        if self.has(num_blocks, states):
            return True
        kv_pages = num_blocks * self._blocks.num_layers
        wanted = self._division.wanted(kv_pages, states)
        if not self._possible(kv_pages, states, joining):
            return False
        if worth():
            return self.free_up(lambda: wanted)
        # Room that is there once all such text has gone.
        beside = self._allocator.owned(PageKind.EXPERT)
        return self._possible(kv_pages, states, joining, beside) and self.free_up(lambda: wanted, spare_experts=True)

    def has(self, num_blocks: int, states: int) -> bool:
        """Whether they can be allocated as it is."""
        wanted = self._division.wanted(num_blocks * self._blocks.num_layers, states)
        # On a device, what steps need is lent from what is free: it must be free beside all that is wanted, or come from experts.
        unlent = max(0, self._floor_pages - self._allocator.owned(PageKind.EXPERT))
        return self._division.lacking(self._allocator, wanted._replace(expert_pages=unlent)) <= 0

    @property
    def state_bytes(self) -> float:
        """Of one sequence's states, its part of shared pages included."""
        geometry, layout = self._division.geometry, self._states.layout
        parents = layout.runs / layout.runs_per_parent
        return layout.huge_pages * geometry.huge_page_bytes + parents * geometry.layout(layout.conv_parent).stride_bytes

    @property
    def kept_bytes(self) -> int:
        """Of states that are kept to resume from."""
        return int(len(self._bookmarks) * self.state_bytes)

    def for_bookmark(self) -> bool:
        """Make room for one more state block if that costs no other bookmark within the bound and at most half of the spare experts."""
        made = self._possible(0, 1)
        while made and len(self._bookmarks) >= self.most_kept:
            made = self._bookmarks.evict()
        if made:
            wanted = self._division.wanted(0, 1)
            made = self.free_up(lambda: wanted, spare_bookmarks=True, spare_experts=self.crowded())
        self.skipped += not made
        return made

    def for_experts(self, pages: int) -> bool:
        """Make room for so many expert pages that a step needs, once no expert can be retired any more; lent pages stay."""
        lent, self._lent = self._lent, None
        try:
            return self.free_up(lambda: Wanted(expert_pages=pages))
        finally:
            self._lent = lent

    def trim(self) -> None:
        """Give up bookmarks beyond the bound."""
        while len(self._bookmarks) > self.most_kept and self._bookmarks.evict():
            pass

    def free_up(self, wanted: Callable[[], Wanted], *, spare_bookmarks: bool = False, spare_experts: bool = False) -> bool:
        """Give up what is of least use until all that is wanted can be taken; `wanted` is asked again after each thing given up.

        Args:
            spare_bookmarks: keep all bookmarks, and half of the experts above their floor.
            spare_experts: keep all experts, and what is lent to steps.

        Returns:
            False if nothing is left to give up. Running sequences and experts at their floor stay.
        """
        per_huge = self._division.geometry.pages_per_huge(PageKind.EXPERT)
        while (lacking := self._division.lacking(self._allocator, wanted())) > 0:
            if self._blocks.evict(1) or self._merge():
                continue
            before = 0 if spare_experts else self._residency.shrinkable
            if spare_bookmarks and 2 * lacking * per_huge > self._residency.shrinkable_pages:
                return False
            if before:
                self.adjust(lacking * per_huge)
                if self._residency.shrinkable < before:
                    continue
            if spare_bookmarks:
                return False
            if self._lent is not None and self._lent.num_pages and not spare_experts:
                self._lent.close()  # the next step lends them again, fewer if need be
                continue
            if self._bookmarks.evict() or self._blocks.gather():
                continue
            return False
        return True

    def _possible(self, kv_pages: int, states: int, joining: Iterable[TokenBlock] = (), expert_pages: int = 0) -> bool:
        """Whether so much more fits beside what runs, and beside what steps need and experts at their floor, or so many pages of these."""
        held_pages, held_states = self.held(joining)
        experts = max(self._floor_pages, expert_pages)
        needed = self._division.huge_pages(experts, held_pages + kv_pages, held_states + states)
        return needed <= self._pool.num_bytes // self._division.geometry.huge_page_bytes

    def _merge(self) -> bool:
        """Empty the huge page whose few pages fit into the gaps of others; False if there is none."""
        buffers = {self._allocator.huge_page_of(page) for page in self._buffers.pages}
        for kind in (PageKind.EXPERT, PageKind.SSM):
            found = self._allocator.emptiest(kind, buffers)
            if found is not None:
                self._vacate(found[0])
                return True
        return False

    def _vacate(self, number: int) -> None:
        allocator = self._allocator
        self._residency.settle()
        allocator.withhold([number])
        try:
            kv, experts = (
                [page for page in allocator.held_in_withheld(kind) if allocator.huge_page_of(page) == number]
                for kind in (PageKind.KV, PageKind.EXPERT)
            )
            self._blocks.move(kv)
            self._states.vacate({number})
            self._residency.move(experts)
        finally:
            allocator.release([number])
