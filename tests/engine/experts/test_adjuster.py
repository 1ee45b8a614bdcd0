"""Algorithm 1: every branch, every constant, every cap."""

from __future__ import annotations

import pytest

from rimuru_cli.engine.experts.adjuster import AdjusterConstants, AdjusterStats, Decision, decide


def _stats(required: int, free: int, *, pages: int = 3, shrinkable: int = 1000, expandable: int = 1000) -> AdjusterStats:
    return AdjusterStats(required, free, pages, shrinkable, expandable)


@pytest.mark.parametrize(
    ("required", "shrink"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (8, 3), (9, 4), (30, 11)],
)
def test_lacking_blocks_shrink_by_a_third_rounded_up(required: int, shrink: int) -> None:
    assert decide(_stats(required, 0)) == Decision(shrink, 0, "sequences need pages")


@pytest.mark.parametrize("free", [0, 1, 5, 9, 10, 100])
def test_lacking_blocks_come_before_everything_else(free: int) -> None:
    assert decide(_stats(1, free)).shrink == 1


@pytest.mark.parametrize(("free", "shrink"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_a_small_reserve_is_kept(free: int, shrink: int) -> None:
    decision = decide(_stats(0, free))
    assert (decision.shrink, decision.expand) == (shrink, 0)
    assert decision.reason == ("too few free blocks" if shrink else "steady")


@pytest.mark.parametrize(
    ("free", "expand"),
    [(2, 0), (8, 0), (9, 0), (10, 0), (11, 0), (12, 1), (14, 1), (15, 2), (20, 3), (21, 4), (23, 4), (24, 5), (26, 5), (27, 5), (1000, 5)],
)
def test_plenty_expands_by_a_third_of_the_surplus_up_to_five(free: int, expand: int) -> None:
    decision = decide(_stats(0, free))
    assert (decision.shrink, decision.expand) == (0, expand)
    assert decision.reason == ("free blocks to spare" if expand else "steady")


def test_counts_are_capped_by_what_can_move() -> None:
    assert decide(_stats(30, 0, shrinkable=4)).shrink == 4
    assert decide(_stats(30, 0, shrinkable=0)).shrink == 0
    assert decide(_stats(0, 0, shrinkable=0)).shrink == 0
    assert decide(_stats(0, 1000, expandable=2)).expand == 2
    assert decide(_stats(0, 1000, expandable=0)) == Decision(0, 0, "steady")


def test_tiled_experts_free_more_pages_each() -> None:
    assert decide(_stats(24, 0, pages=24)).shrink == 2
    assert decide(_stats(23, 0, pages=24)).shrink == 1
    assert decide(_stats(0, 9 + 23, pages=24)).expand == 0
    assert decide(_stats(0, 9 + 24, pages=24)).expand == 1


def test_constants_are_parameters() -> None:
    constants = AdjusterConstants(low_free=4, high_free=20, max_expand=2)
    assert decide(_stats(0, 3), constants).shrink == 1
    assert decide(_stats(0, 4), constants).reason == "steady"
    assert decide(_stats(0, 22), constants).expand == 0
    assert decide(_stats(0, 23), constants).expand == 1
    assert decide(_stats(0, 500), constants).expand == 2
