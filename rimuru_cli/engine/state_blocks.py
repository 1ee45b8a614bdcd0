"""The states of sequences as pages of the pool: recurrent states (SSM pages) and convolution rows of all recurrent layers.

A sequence has one block of them, however long its text is, taken and freed as a whole. Blocks are never shared: who continues a text
from a state that is kept copies it first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.state_layout import StateLayout
from rimuru_cli.engine.memory.views import ConvView, SSMView


@dataclass(eq=False, slots=True)
class StateBlock:
    """One sequence's states.

    Attributes:
        ssm: pages of the recurrent states, in runs that fill a huge page each; the first `layers` of them are in use, layer after layer.
        conv: runs of convolution rows, see `StateLayout`.
        recurrent: views of the recurrent states, one a layer; convolution: views [m, C].
        entries: for each layer the page of its recurrent state, then those of its convolution rows.
    """

    ssm: list[list[int]]
    conv: list[list[int]]
    entries: list[list[int]] = field(default_factory=list)
    recurrent: list[Tensor] = field(default_factory=list)
    convolution: list[Tensor] = field(default_factory=list)

    @property
    def num_pages(self) -> tuple[int, int]:
        """SSM pages and conv pages that this block owns."""
        return sum(map(len, self.ssm)), sum(map(len, self.conv))


class StateBlocks:
    """Takes, copies, moves and frees blocks of states.

    Args:
        pool: where the pages lie.
        layers: model layers with states, ascending.
        ssm_view, conv_view: what their pages mean.
        layout: how many pages of each.

    Attributes:
        places: model layer -> its place in a block.
        live: all blocks that own pages.
        moves: how often blocks have changed their pages.
        ahead: blocks that hold the states of a step that nobody may ever ask for, and what brings the states before it back.
    """

    def __init__(self, pool: PagePool, layers: Sequence[int], ssm_view: SSMView, conv_view: ConvView, layout: StateLayout) -> None:
        assert len(layers) == layout.layers, "the layout is made for these layers"
        self._pool = pool
        self._ssm, self._conv = ssm_view, conv_view
        self.layout = layout
        self.places = {layer: place for place, layer in enumerate(layers)}
        self.live: dict[StateBlock, None] = {}
        self.moves = 0
        self.ahead: dict[StateBlock, Callable[[], None]] = {}

    def settle(self, block: StateBlock) -> None:
        """Whoever keeps or copies a block's states calls this first: from now on they are those of the steps that were asked for."""
        undo = self.ahead.pop(block, None)
        if undo is not None:
            undo()

    def allocate(self) -> StateBlock:
        """Take a block; its bytes are whatever was there.

        Raises:
            OutOfPages: there are too few pages; nothing was taken.
        """
        layout = self.layout
        ssm = self._pool.allocate_runs(PageKind.SSM, layout.huge_pages, layout.per_huge)
        try:
            conv = self._pool.allocate_runs(PageKind.CONV, layout.runs, layout.run_length)
        except BaseException:
            self._pool.free([page for run in ssm for page in run])
            raise
        block = StateBlock(ssm, conv)
        self._look(block)
        self.live[block] = None
        return block

    def free(self, block: StateBlock) -> None:
        """Give a block back."""
        self.ahead.pop(block, None)
        del self.live[block]
        self._pool.free([page for run in (*block.ssm, *block.conv) for page in run])
        block.ssm, block.conv, block.entries, block.recurrent, block.convolution = [], [], [], [], []

    def clear(self, block: StateBlock) -> None:
        """The states of a text of no tokens."""
        if block.recurrent:
            torch._foreach_zero_([*block.recurrent, *block.convolution])

    def copy(self, source: StateBlock, target: StateBlock) -> None:
        """Make `target` equal to `source`."""
        self.settle(source)
        if source.recurrent:
            torch._foreach_copy_([*target.recurrent, *target.convolution], [*source.recurrent, *source.convolution])

    def vacate(self, huge_pages: Collection[int]) -> int:
        """Move whatever lies in these huge pages (by number), which are withheld, elsewhere. Only between steps.

        Returns:
            Pages moved.

        Raises:
            OutOfPages: there are too few others; what had moved before stays moved.
        """
        moved = 0
        for block in self.live:
            before = moved
            try:
                for kind, runs in ((PageKind.SSM, block.ssm), (PageKind.CONV, block.conv)):
                    for index, run in enumerate(runs):
                        if self._pool.allocator.huge_page_of(run[0]) in huge_pages:
                            target = self._pool.moved(kind, run, run=True)
                            runs[index] = target
                            self._pool.free(run)
                            moved += len(run)
            finally:
                if moved > before:
                    self.moves += 1
                    self._look(block)
        return moved

    def _look(self, block: StateBlock) -> None:
        layout = self.layout
        pages = [page for run in block.ssm for page in run][: layout.layers]
        places = (divmod(place, layout.run_layers) for place in range(layout.layers))
        rows = [layout.conv_pages(block.conv[run], layer) for run, layer in places]
        block.entries = [[page, *own] for page, own in zip(pages, rows, strict=True)]
        if self._pool.data.is_meta:  # a simulation's pool has no bytes
            return
        block.recurrent = [self._ssm.state(page) for page in pages]
        block.convolution = [self._conv.rows(own) for own in rows]
