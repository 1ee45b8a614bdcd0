"""How often a selected expert is resident, as a function of the share of experts that are: measured locality, and none at all.

RECORDED comes from a routing recorded on Qwen3-30B-A3B (128 experts in each of 48 layers, top 6; 28 prompt tokens and 128 generated ones),
replayed through our policy: every layer keeps a fixed number of residents, scores decay by 0.95 a token, and a missing expert takes the
place of the worst resident (`kernels/expert_fetch/reference.py`). Hits are counted over the generated tokens. On a GPU the same recording
gave 79.5 % at 21.6 % resident, 92.0 % at 36.4 % and 96.3 % at 51.2 % (docs/results); the table gives 79.7, 92.0 and 96.2.
"""

from __future__ import annotations

from bisect import bisect_right

# (share of a layer's experts that are resident, share of selections that hit)
RECORDED: tuple[tuple[float, float], ...] = (
    (0.0, 0.0),
    (0.05, 0.379),
    (0.10, 0.590),
    (0.125, 0.644),
    (0.15, 0.690),
    (0.20, 0.779),
    (0.25, 0.834),
    (0.30, 0.878),
    (0.35, 0.914),
    (0.40, 0.935),
    (0.45, 0.952),
    (0.50, 0.961),
    (0.60, 0.972),
    (0.70, 0.981),
    (0.80, 0.987),
    (0.90, 0.994),
    (1.0, 1.0),
)


MANY_EXPERTS = 192
"""From here on a layer is nearer to one of 256 experts than to one of 128."""

# The same of a routing drawn for 256 experts, top 8, which has the recorded one's habits (bench/drawn_routing.py): the token before, or one
# long before, is repeated less often if there is more to choose from. On a GPU it gave 72.1 % at 15.3 % resident, 83.8 % at 28.6 % and
# 90.8 % at 42.3 % (docs/results: qwen3.5-35b-a3b); the table gives 73.4, 84.8 and 91.1. 512 experts, top 10, are within 1.5 points of it.
DRAWN: tuple[tuple[float, float], ...] = (
    (0.0, 0.0),
    (0.05, 0.487),
    (0.10, 0.656),
    (0.125, 0.697),
    (0.15, 0.732),
    (0.20, 0.783),
    (0.25, 0.825),
    (0.30, 0.858),
    (0.35, 0.884),
    (0.40, 0.904),
    (0.45, 0.920),
    (0.50, 0.933),
    (0.60, 0.948),
    (0.70, 0.962),
    (0.80, 0.975),
    (0.90, 0.988),
    (1.0, 1.0),
)


def likely_hits(resident_share: float, num_experts: int) -> float:
    """Share of selections that hit in an ordinary conversation, between 0 and 1.

    Args:
        resident_share: of all experts, between 0 and 1.
        num_experts: of a layer.
    """
    return _between(DRAWN, resident_share) if num_experts >= MANY_EXPERTS else recorded_hits(resident_share)


def recorded_hits(resident_share: float) -> float:
    """As `likely_hits`, of the recorded conversation itself."""
    return _between(RECORDED, resident_share)


def _between(table: tuple[tuple[float, float], ...], resident_share: float) -> float:
    """Straight lines between the points of a table."""
    share = min(1.0, max(0.0, resident_share))
    index = bisect_right(table, share, key=lambda point: point[0])
    if index == len(table):
        return 1.0
    (left, low), (right, high) = table[index - 1], table[index]
    return low + (high - low) * (share - left) / (right - left)


def uniform_hits(resident_share: float) -> float:
    """Share of selections that hit when every expert is equally likely at every token: the worst case for keeping some of them."""
    return min(1.0, max(0.0, resident_share))
