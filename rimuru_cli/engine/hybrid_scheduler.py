"""Scheduling for models with recurrent layers: every sequence has states besides its token blocks, and leaves bookmarks to resume from.

States change with every token and belong to one length of a text, so they cannot be shared or taken back: a text is resumed from the
longest bookmark, a preempted sequence leaves one, and a step that failed half-way costs its sequences their states.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from rimuru_cli.engine.bookmarks import INTERVAL, Bookmark, Bookmarks, places_to_keep
from rimuru_cli.engine.kv_blocks import KVBlocks, Match
from rimuru_cli.engine.request import RequestStatus
from rimuru_cli.engine.room import Room
from rimuru_cli.engine.scheduler import ScheduledRows, Scheduler, Worth
from rimuru_cli.engine.sequence import Sequence
from rimuru_cli.engine.state_blocks import StateBlocks


class HybridScheduler(Scheduler):
    """A scheduler that takes states with its sequences.

    Args:
        blocks, states, bookmarks: who owns pages.
        room: makes room for them.
        worth: as of `Scheduler`.

    Attributes:
        interval: tokens of a long prompt between states that are kept.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        states: StateBlocks,
        bookmarks: Bookmarks,
        room: Room,
        worth: Worth = lambda blocks, joins: True,
        *,
        max_batch_tokens: int,
        max_sequences: int,
    ) -> None:
        super().__init__(blocks, lambda: 0, lambda pages: False, worth, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
        self._states = states
        self._bookmarks = bookmarks
        self._space = room
        self.interval = INTERVAL
        room.running = lambda: self.running

    def schedule(self) -> list[ScheduledRows]:
        """See `Scheduler.schedule`; takes blocks for the states that are to be kept on the way, too, as far as there is room."""
        plan = super().schedule()
        for rows in plan:
            sequence = rows.sequence
            for place in sequence.keep_at:
                due = sequence.computed < place <= sequence.computed + rows.count
                if due and place not in sequence.keeping and self._space.for_bookmark():
                    sequence.keeping[place] = self._states.allocate()
        return plan

    def computed(self, plan: Items[ScheduledRows]) -> None:
        """See `Scheduler.computed`: what was to be kept can be resumed from now."""
        size = self._blocks.block_tokens
        for sequence in (rows.sequence for rows in plan):
            for place in [place for place in sequence.keep_at if place <= sequence.computed]:
                sequence.keep_at.remove(place)
                states = sequence.keeping.pop(place, None)
                if states is not None:
                    path = self._blocks.remember(sequence.blocks[: place // size], sequence.tokens[:place])
                    self._blocks.adopt(sequence.blocks, path)
                    self._bookmarks.keep(states, path, place)
        self._space.trim()

    def torn(self, plan: Items[ScheduledRows]) -> None:
        """See `Scheduler.torn`: some layers have taken these tokens into their states and others have not."""
        for rows in reversed(plan):
            self._forget(rows.sequence)
            self._preempt(rows.sequence)

    def _spare(self, num_blocks: int) -> bool:
        return self._space.has(num_blocks, 0)

    def _room(self, num_blocks: int, whole: int, *, joins: bool = False) -> bool:
        return self._space.make(num_blocks, 0, worth=lambda: not whole or self._worth(whole, joins))

    def _store(self, sequence: Sequence) -> None:
        path = self._blocks.remember(sequence.blocks, sequence.tokens[: sequence.computed])
        if sequence.states is not None and sequence.computed:
            self._states.settle(sequence.states)
            self._bookmarks.keep(sequence.states, path, sequence.computed)
            sequence.states = None
        self._forget(sequence)
        self._blocks.release(sequence.blocks)
        sequence.drop_blocks()
        self._space.trim()

    def _forget(self, sequence: Sequence) -> None:
        if sequence.states is not None:
            self._states.free(sequence.states)
            sequence.states = None
        while sequence.keeping:
            self._states.free(sequence.keeping.popitem()[1])
        sequence.keep_at = []

    def _admit(self, sequence: Sequence) -> bool:
        """See `Scheduler._admit`; what the tree holds of a text is of use up to the longest bookmark only."""
        blocks, size, known = self._blocks, self._blocks.block_tokens, sequence.tokens[:-1]
        match = blocks.match(known)
        parted = len(match.blocks) * size + match.partial_tokens
        bookmark = self._bookmarks.best(match, known)
        if not self._fits(sequence, match, bookmark):
            if bookmark is None or not self._fits(sequence, match, None):
                blocks.release(match.blocks)
                assert self.running, "a sequence that was accepted does not fit into the pool on its own"
                return False
            bookmark = None
        whole = len(match.blocks)
        self._forget(sequence)
        sequence.states = self._states.allocate()
        sequence.blocks += match.blocks + blocks.allocate(blocks.blocks_for(len(sequence.tokens)) - whole)
        if bookmark is None:
            self._states.clear(sequence.states)
        else:
            self._states.copy(bookmark.states, sequence.states)
            if bookmark.length % size:
                blocks.copy_tokens(bookmark.blocks[-1], sequence.blocks[whole], bookmark.length % size)
            self._bookmarks.used(bookmark)
            sequence.computed = bookmark.length
        sequence.keep_at = places_to_keep(sequence.computed, len(sequence.tokens), parted, size, self.interval)
        self.running.append(sequence)
        sequence.request.status = RequestStatus.RUNNING
        return True

    def _fits(self, sequence: Sequence, match: Match, bookmark: Bookmark | None) -> bool:
        """Make room for a sequence that resumes from a bookmark, or from nothing; matched blocks behind it are released."""
        whole = 0 if bookmark is None else bookmark.length // self._blocks.block_tokens
        self._blocks.release(match.blocks[whole:])
        del match.blocks[whole:]
        # One spare block for each running sequence, lest the newcomer be preempted as soon as one of them grows.
        own = self._blocks.blocks_for(len(sequence.tokens)) - whole
        wanted = own + len(self.running)
        self._bookmarks.pinned = bookmark
        try:
            return self._space.make(wanted, 1, match.blocks, worth=lambda: not self.running or self._worth(max(1, own), True))
        finally:
            self._bookmarks.pinned = None
