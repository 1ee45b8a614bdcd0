"""Which tokens are computed in a step, and the pages they need: continuous batching with chunked prefill and preemption.

Every step takes one token of each sequence that is generating (decode), then fills up to `max_batch_tokens` with pieces of prompts
(prefill), oldest request first. Pages are taken before the step runs. If they are lacking, in this order: blocks kept only for
reuse are evicted, experts are retired down to their floor (`make_room`, decided by the adjuster), and as a last resort the youngest
sequence is preempted: its pages are freed and it will be computed again from its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.request import RequestStatus
from rimuru_cli.engine.sequence import Sequence
from rimuru_cli.engine.state_blocks import StateBlock

# Asks for experts to be retired until so many KV pages are free in all; returns whether they are. If not, nothing was retired.
MakeRoom = Callable[[int], bool]
# Whether a sequence of so many token blocks is worth the experts that leave for it (0: none has to), and whether it does not run yet.
Worth = Callable[[int, bool], bool]


@dataclass(slots=True, eq=False)  # hundreds are made for every step
class ScheduledRows:
    """Tokens computed .. computed + count - 1 of a sequence, computed in this step."""

    sequence: Sequence
    count: int

    @property
    def keep(self) -> list[tuple[int, StateBlock]]:
        """Where states are to be kept, in models that have any: after so many of these rows, copied into that block."""
        done = self.sequence.computed
        return [(place - done, block) for place, block in sorted(self.sequence.keeping.items()) if done < place <= done + self.count]

    @property
    def samples(self) -> bool:
        """Whether the last row is the sequence's newest token, so that the next one is sampled from it."""
        sequence = self.sequence
        return self.count == len(sequence.tokens) - sequence.computed


class Scheduler:
    """Waiting and running sequences of one engine.

    Attributes:
        max_sequences: most that run at once.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        available_pages: Callable[[], int],
        make_room: MakeRoom,
        worth: Worth = lambda blocks, joins: True,
        *,
        max_batch_tokens: int,
        max_sequences: int,
    ) -> None:
        self._blocks = blocks
        self._available_pages = available_pages
        self._make_room = make_room
        self._worth = worth
        self._max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledRows]:
        """Choose the rows of the next step and take the pages they need. Empty only if nothing waits or runs."""
        plan: list[ScheduledRows] = []
        budget, size, preemptions = self._max_batch_tokens, self._blocks.block_tokens, self.preemptions
        answering: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in self.running:
            (answering if len(sequence.tokens) - sequence.computed == 1 else reading).append(sequence)
        if len(answering) <= budget:
            self.grow_all([s for s in answering if s.computed == len(s.blocks) * size])
        # Decoding first: a sequence that answers must not stall behind somebody's long prompt.
        for sequence in answering + reading:
            if budget == 0 or sequence.request.status is not RequestStatus.RUNNING:  # preempted meanwhile
                continue
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if sequence.computed + count <= len(sequence.blocks) * size or self._grow(sequence, count):
                plan.append(ScheduledRows(sequence, count))
                budget -= count
        if self.preemptions != preemptions:
            # A sequence taken into the plan may have been preempted by a later one's growth only if it was younger.
            plan = [rows for rows in plan if rows.sequence.request.status is RequestStatus.RUNNING]
        while budget > 0 and self.admit():
            sequence = self.running[-1]
            count = min(sequence.pending, budget)
            plan.append(ScheduledRows(sequence, count))
            budget -= count
        assert plan or not (self.running or self.waiting), "work is waiting but no row could be scheduled"
        return plan

    def admit(self) -> bool:
        """Start the one that waits longest, if it may; it is the last of those that run then."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        # Whoever is alone is not asked about: somebody has to run.
        if (self.running and not self._worth(0, True)) or not self._admit(self.waiting[0]):
            return False
        self.waiting.popleft()
        return True

    def grow_all(self, sequences: Items[Sequence]) -> bool:
        """Get a block for each of these that run if there is room for all without retiring experts; else nothing, and return False."""
        if not self._spare(len(sequences)):
            return False
        for sequence, block in zip(sequences, self._blocks.allocate(len(sequences)), strict=True):
            sequence.blocks.append(block)
        return True

    def grow(self, sequence: Sequence, blocks: int = 1) -> bool:
        """Get blocks for more tokens of a sequence that runs; False, and nothing has changed, if somebody would have to be preempted."""
        # Worth it or not is the youngest, who would have to give way.
        if not self._room(blocks, len(self.running[-1].blocks) + blocks if len(self.running) > 1 else 0):
            return False
        sequence.blocks += self._blocks.allocate(blocks)
        return True

    def computed(self, plan: Items[ScheduledRows]) -> None:
        """Called when the rows of a plan are computed and counted."""

    def torn(self, plan: Items[ScheduledRows]) -> None:
        """Called when the rows of a plan were perhaps computed in part. Keys and values of a token are the same however often."""

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out; what it computed stays in the tree for reuse."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._store(sequence)

    def _store(self, sequence: Sequence) -> None:
        self._blocks.remember(sequence.blocks, sequence.tokens[: sequence.computed])
        self._blocks.release(sequence.blocks)
        sequence.drop_blocks()

    def _spare(self, num_blocks: int) -> bool:
        """Make sure that so many blocks can be allocated now, if giving up text kept for reuse is enough."""
        wanted, available = num_blocks * self._blocks.num_layers, self._available_pages()
        if available + self._blocks.idle_pages < wanted:
            return False
        if available < wanted:
            self._blocks.evict(wanted - available)
        return True

    def _room(self, num_blocks: int, whole: int, *, joins: bool = False) -> bool:
        """Make sure that so many blocks can be allocated now, without preempting anyone; changes nothing and returns False if not.

        Blocks kept for reuse go first, experts only for what is lacking beyond them, and for a sequence, `whole` blocks long, that is worth
        it (0: it is alone, and nobody asks; `joins`: it does not run yet); whether the experts' floor allows it is asked before anything is
        given up.
        """
        if self._spare(num_blocks):
            return True
        wanted, idle = num_blocks * self._blocks.num_layers, self._blocks.idle_pages
        if not ((not whole or self._worth(whole, joins)) and self._make_room(wanted - idle)):
            return False
        self._blocks.evict(wanted - self._available_pages())
        return True

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Get the blocks for `count` more tokens, preempting younger sequences if need be; False if this one was preempted instead."""
        wanted = self._blocks.blocks_for(sequence.computed + count) - len(sequence.blocks)
        if wanted <= 0:
            return True
        while not self.grow(sequence, wanted):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._store(sequence)
        sequence.request.status = RequestStatus.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if all its present tokens fit beside what runs; reuse what the tree holds of them."""
        # One spare block for each running sequence, lest the newcomer be preempted as soon as one of them grows.
        spare = len(self.running)
        # At least the newest token is computed, since the next one is sampled from its result.
        match = self._blocks.match(sequence.tokens[:-1])
        shared = len(match.blocks)
        wanted = self._blocks.blocks_for(len(sequence.tokens)) - shared
        if match.partial is not None:
            self._blocks.hold(match.partial)
        whole = wanted if self.running else 0
        fits = self._room(wanted + spare, whole, joins=True)
        if not fits and match.partial is not None:
            self._blocks.release([match.partial])
            match.partial, match.partial_tokens = None, 0
            fits = self._room(wanted + spare, whole, joins=True)
        if not fits:
            self._blocks.release(match.blocks)
            assert self.running, "a sequence that was accepted does not fit into the pool on its own"
            return False
        sequence.blocks += match.blocks + self._blocks.allocate(wanted)
        sequence.computed = shared * self._blocks.block_tokens
        if match.partial is not None:
            self._blocks.copy_tokens(match.partial, sequence.blocks[shared], match.partial_tokens)
            self._blocks.release([match.partial])
            sequence.computed += match.partial_tokens
        self.running.append(sequence)
        sequence.request.status = RequestStatus.RUNNING
        return True
