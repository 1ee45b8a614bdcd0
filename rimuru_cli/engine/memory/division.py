"""How pages of all kinds add up to huge pages: what a pool can hold, and what is lacking now. Ints only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rimuru_cli.engine.memory.allocator import PageAllocator
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry
from rimuru_cli.engine.memory.state_layout import StateLayout


class Wanted(NamedTuple):
    """Pages that are to be taken together: KV pages, runs of SSM pages (a huge page each), runs of convolution rows, expert pages."""

    kv_pages: int = 0
    ssm_runs: int = 0
    conv_runs: int = 0
    expert_pages: int = 0


@dataclass(frozen=True)
class Division:
    """Sums over one geometry.

    Attributes:
        geometry: page sizes.
        states: how the states of a sequence lie, or None for a model without recurrent layers.
    """

    geometry: PoolGeometry
    states: StateLayout | None = None

    def huge_pages(self, expert_pages: int, kv_pages: int, states: int) -> int:
        """Huge pages that hold so many expert pages, KV pages and sequences' states, wherever the runs of convolution rows end up."""
        small = {PageKind.EXPERT: expert_pages, PageKind.SSM: 0}
        kv = self.geometry.layout(PageKind.KV)
        assert kv.parent is not None, "KV pages lie in expert or SSM pages"
        small[kv.parent] += -(-kv_pages // kv.per_parent)
        whole = 0
        if self.states is not None:
            small[self.states.conv_parent] += states * self.states.runs
            whole = states * self.states.huge_pages
        return whole + self._huge(small)

    def kv_pages(self, huge_pages: int, expert_pages: int, states: int) -> int:
        """KV pages that so many huge pages hold beside so many expert pages and sequences' states; 0 where these alone are too many."""
        kv = self.geometry.layout(PageKind.KV)
        assert kv.parent is not None, "KV pages lie in expert or SSM pages"
        small = {PageKind.EXPERT: expert_pages, PageKind.SSM: 0}
        if self.states is not None:
            small[self.states.conv_parent] += states * self.states.runs
            huge_pages -= states * self.states.huge_pages
        taken = small.pop(kv.parent)
        parents = (huge_pages - self._huge(small)) * self.geometry.pages_per_huge(kv.parent) - taken
        return max(0, parents) * kv.per_parent

    def lacking(self, allocator: PageAllocator, wanted: Wanted) -> int:
        """Huge pages that would have to become free before all that is wanted can be taken; 0 or less: it can be taken now."""
        gaps = {kind: allocator.gaps(kind) for kind in (PageKind.EXPERT, PageKind.SSM)}
        small = {PageKind.EXPERT: wanted.expert_pages, PageKind.SSM: 0}
        kv = self.geometry.layout(PageKind.KV)
        assert kv.parent is not None, "KV pages lie in expert or SSM pages"
        small[kv.parent] += -(-max(0, wanted.kv_pages - allocator.gaps(PageKind.KV)) // kv.per_parent)
        if self.states is not None and wanted.conv_runs:
            runs = wanted.conv_runs - allocator.free_runs(PageKind.CONV, self.states.run_length)
            small[self.states.conv_parent] += -(-max(0, runs) // self.states.runs_per_parent)
        split = self._huge({kind: max(0, count - gaps[kind]) for kind, count in small.items()})
        return wanted.ssm_runs + split - allocator.free_huge_pages

    def wanted(self, kv_pages: int, states: int) -> Wanted:
        """Pages of so many token blocks and sequences' states."""
        if self.states is None:
            return Wanted(kv_pages)
        return Wanted(kv_pages, states * self.states.huge_pages, states * self.states.runs)

    def _huge(self, small: dict[PageKind, int]) -> int:
        return sum(-(-count // self.geometry.pages_per_huge(kind)) for kind, count in small.items() if count)
