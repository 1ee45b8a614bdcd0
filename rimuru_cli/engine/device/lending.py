"""Pages that a step needs beyond the residents: who makes room for them, and when they are given back."""

from __future__ import annotations

from collections.abc import Callable

from rimuru_cli.engine.device.choice import StepChoice
from rimuru_cli.engine.device.plan import buffer_experts, least_buffer_experts
from rimuru_cli.engine.device.streaming import ScratchPages, StreamBuffers
from rimuru_cli.engine.experts.residency import Residency
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_models.errors import DoesNotFitError


class Lender:
    """Lends loading buffers to streamed steps and scratch to small ones.

    Both stay lent as long as steps of their kind follow one another: giving them back each time would copy the experts that made room for
    them in and out. What is lent now is in `scratch`, which whoever needs the pages may close between two steps.

    Args:
        free_up: for models with recurrent layers, of which pages of more kinds are in the way: makes room for so many expert pages, or
            returns False.
    """

    def __init__(
        self,
        pool: PagePool,
        residency: Residency,
        blocks: KVBlocks,
        choice: StepChoice,
        scratch: ScratchPages,
        free_up: Callable[[int], bool] | None = None,
    ) -> None:
        self._free_up = free_up
        self._pool, self._residency, self._blocks = pool, residency, blocks
        self._choice, self._scratch = choice, scratch
        self._retired = 0  # experts that made room for what is lent

    def lend(self, rows: int, *, on_demand: bool) -> StreamBuffers | None:
        """Pages for what a step of so many rows needs; the loading buffers, if it is streamed and experts are absent.

        Raises:
            DoesNotFitError: the pool is too fragmented.
        """
        scratch, choice = self._scratch, self._choice
        if on_demand and not scratch.num_pages and not choice.scratch_needed(rows):
            return None
        held = None if on_demand else scratch.stream
        if held is not None and self._still_fits(held):
            return held
        if scratch.num_pages and (not on_demand or scratch.stream is not None or choice.scratch_needed(rows) == 0):
            scratch.close()
            if on_demand:
                self._residency.expand(self._retired)
                self._retired = 0
        experts = self._make_room(rows, on_demand=on_demand)
        if on_demand:
            scratch.lend(scratch.experts + experts)
        elif experts:
            scratch.stream = StreamBuffers(self._pool, experts, self._residency.pages_per_expert)
        return scratch.stream

    def _still_fits(self, held: StreamBuffers) -> bool:
        """Whether buffers hold enough, and not so much more than what they would be made for now that experts had better have the pages."""
        absent = self._choice.capacity
        return least_buffer_experts(absent) <= len(held.slots) <= 2 * buffer_experts(absent, self._choice.expert_bytes) and absent > 0

    def _make_room(self, rows: int, *, on_demand: bool) -> int:
        """Retire experts until what is lacking can be lent; returns how many experts' pages that is."""
        pages = self._residency.pages_per_expert
        while True:
            # Retiring experts makes more of them absent, so what is needed is asked anew.
            if on_demand:
                experts = max(0, self._choice.scratch_needed(rows) - self._scratch.experts)
            else:
                experts = buffer_experts(self._choice.capacity, self._choice.expert_bytes)
            lacking = experts * pages - self._pool.allocator.available(PageKind.EXPERT)
            if lacking <= 0:
                return experts
            shrunk = self._residency.shrink(-(-lacking // pages))
            self._retired += shrunk
            if shrunk or self._blocks.gather():  # conversations may lie scattered over more expert pages than they fill
                continue
            spare = self._pool.allocator.available(PageKind.EXPERT) // pages
            least = least_buffer_experts(self._choice.capacity)
            if not on_demand and spare >= least:
                return spare
            if self._free_up is not None and self._free_up((experts if on_demand else least) * pages):
                continue
            if not self._blocks.evict(self._blocks.num_layers):
                raise DoesNotFitError(
                    "The pool is too fragmented to load the experts that are not resident.",
                    hint="Start anew with /clear, or give more --memory.",
                )
