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


def recorded_hits(resident_share: float) -> float:
    """Share of selections that hit in an ordinary conversation, between 0 and 1; straight lines between the points of RECORDED.

    Args:
        resident_share: of all experts, between 0 and 1.
    """
    share = min(1.0, max(0.0, resident_share))
    index = bisect_right(RECORDED, share, key=lambda point: point[0])
    if index == len(RECORDED):
        return 1.0
    (left, low), (right, high) = RECORDED[index - 1], RECORDED[index]
    return low + (high - low) * (share - left) / (right - left)


def uniform_hits(resident_share: float) -> float:
    """Share of selections that hit when every expert is equally likely at every token: the worst case for keeping some of them."""
    return min(1.0, max(0.0, resident_share))
