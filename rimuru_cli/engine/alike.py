"""Steps that are like the one before: every running sequence generates one token, nobody comes, nobody is preempted.

A simulation takes most of its steps like that. Everything that decides (loaded experts, pages for growing sequences, admission, the
adjuster, the runner's own choices) is asked in every step, by the same lines as ever; only what is counted for each sequence is put down
when it ends, or when the steps alike are over. What comes out is what single steps give; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.request import Request, RequestStatus
from rimuru_cli.engine.scheduler import ScheduledRows, Scheduler
from rimuru_cli.engine.sequence import Sequence as TokenSequence

MOST_STEPS = 256
"""Ctrl-C waits for so many at the most."""

TOKEN = 0
"""What is sampled, always."""

Output = TypeVar("Output")


class RepeatedSteps(Protocol):
    """A runner's work where one step is like the one before; every row's next token is `TOKEN`."""

    def forward(self, left: int) -> NDArray[np.int64]:
        """Compute the next step, of `left` before somebody leaves; returns int64 [rows], selections that found their expert resident."""
        ...

    def leave(self, place: int) -> None:
        """The sequence at this place has ended; those behind it move up."""
        ...


# Makes them for sequences that each go on by one row a step.
Repeats = Callable[[Sequence[ScheduledRows]], RepeatedSteps]


@dataclass(frozen=True)
class Around(Generic[Output]):
    """What an engine does around a step.

    Attributes:
        begin: makes experts visible that have arrived; returns the time.
        adjust: moves experts if that is due.
        end: counts a step, given its rows and when it began.
        put_down: counts steps of a sequence, given how many, the tokens that it got, and selections that found their expert resident.
        accept: appends a token, with which a sequence ends.
    """

    begin: Callable[[], float]
    adjust: Callable[[], None]
    end: Callable[[int, float], None]
    put_down: Callable[[TokenSequence, int, int, int], None]
    accept: Callable[[TokenSequence, int], Output]


def generates(sequence: TokenSequence) -> bool:
    """Whether a running sequence only goes on with an answer whose tokens nothing looks at."""
    request = sequence.request
    # The cheapest question that is answered with no comes first.
    return bool(
        len(sequence.tokens) - sequence.computed == 1
        and request.output_ids
        and request.params.ignore_eos
        and request.params.temperature == 0.0
        and not sequence.keep_at
    )


def take(
    engine: Around[Output],
    scheduler: Scheduler,
    repeats: Repeats,
    told: Callable[[list[Output]], bool],
    *,
    block_tokens: int,
    longest: int,
) -> list[Request]:
    """Take steps until one is of another kind, or until there were many.

    Args:
        told: given the outputs of those that ended with a step, after each; returns whether to go on.
        block_tokens: tokens of a block; longest: most tokens of any text.

    Returns:
        The requests that got a token in every one of these steps and go on.
    """
    if not scheduler.running or not all(map(generates, scheduler.running)):
        return []
    sequences = list(scheduler.running)
    repeated = repeats([ScheduledRows(sequence, 1) for sequence in sequences])
    hits: NDArray[np.int64] = np.zeros(len(sequences), dtype=np.int64)
    # Before which step each grows by a block, and after how many it ends.
    growing: dict[int, list[TokenSequence]] = {}
    ending: dict[int, list[TokenSequence]] = {}
    for sequence in sequences:
        growing.setdefault(len(sequence.blocks) * block_tokens - sequence.computed, []).append(sequence)
        ending.setdefault(max(1, min(sequence.limit, longest) - len(sequence.tokens)), []).append(sequence)
    done = 0
    try:
        while sequences and done < MOST_STEPS:
            began = engine.begin()
            wanting = [s for s in growing.pop(done, ()) if s.request.status is RequestStatus.RUNNING]
            if len(wanting) > 1:
                wanting.sort(key=sequences.index)  # in the order in which single steps ask
            if (wanting and not scheduler.grow_all(wanting) and not all(map(scheduler.grow, wanting))) or scheduler.admit():
                break  # a step of another kind goes on where this one stopped
            if wanting:
                growing.setdefault(done + block_tokens, []).extend(wanting)
            engine.adjust()
            hits += repeated.forward(min(ending) - done)
            done, rows = done + 1, len(sequences)
            ended = []
            for sequence in ending.pop(done, ()):
                place = sequences.index(sequence)
                engine.put_down(sequence, done, done - 1, int(hits[place]))
                ended.append(engine.accept(sequence, TOKEN))
                del sequences[place]
                hits = np.delete(hits, place)
                repeated.leave(place)
            engine.end(rows, began)
            if not told(ended):
                break
    finally:
        for sequence, count in zip(sequences, hits.tolist(), strict=True):
            engine.put_down(sequence, done, done, count)
    return [sequence.request for sequence in sequences]
