"""When to hand pages from experts to sequences and back: Algorithm 1 of the paper (arXiv 2610.40305), a pure function.

Letters as in the paper: R_b is the number of blocks that the scheduler still lacks, F_b the number of free blocks. A block is the
size of one expert page, and an expert frees `pages_per_expert` of them (three, or more where projections are tiled).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Reason = Literal["sequences need pages", "too few free blocks", "free blocks to spare", "steady"]


@dataclass(frozen=True)
class AdjusterConstants:
    """The paper's constants. Between `low_free` and `high_free` free blocks nothing moves (hysteresis)."""

    low_free: int = 2
    high_free: int = 9
    max_expand: int = 5


@dataclass(frozen=True)
class AdjusterStats:
    """What one decision is based on.

    Attributes:
        required_blocks: R_b, blocks that scheduled sequences lack beyond what is free.
        free_blocks: F_b, blocks free right now.
        pages_per_expert: expert pages that one expert occupies; where layers differ, of the layer whose experts have the most.
        shrinkable: resident experts above the floor.
        expandable: experts that are not resident.
    """

    required_blocks: int
    free_blocks: int
    pages_per_expert: int
    shrinkable: int
    expandable: int


@dataclass(frozen=True)
class Decision:
    """Experts to retire and experts to admit; at most one of the two is positive."""

    shrink: int
    expand: int
    reason: Reason


AdjusterPolicy = Callable[[AdjusterStats], Decision]


def hold(stats: AdjusterStats) -> Decision:
    """Nothing ever moves by itself: a fixed cache of experts."""
    return Decision(0, 0, "steady")


def decide(stats: AdjusterStats, constants: AdjusterConstants = AdjusterConstants()) -> Decision:
    """Algorithm 1: shrink when sequences lack blocks, keep a small reserve, expand when there is plenty.

        R_b > 0              shrink ceil((R_b + 1) / pages_per_expert)
        else F_b < low       shrink 1
        else F_b > high      expand min(max_expand, floor((F_b - high) / pages_per_expert))

    Counts are capped by what can be retired or admitted at all.
    """
    if stats.required_blocks > 0:
        wanted = -(-(stats.required_blocks + 1) // stats.pages_per_expert)
        return Decision(min(wanted, stats.shrinkable), 0, "sequences need pages")
    if stats.free_blocks < constants.low_free:
        return Decision(min(1, stats.shrinkable), 0, "too few free blocks")
    if stats.free_blocks > constants.high_free:
        spare = (stats.free_blocks - constants.high_free) // stats.pages_per_expert
        expand = min(constants.max_expand, spare, stats.expandable)
        if expand > 0:
            return Decision(0, expand, "free blocks to spare")
    return Decision(0, 0, "steady")
