"""What graphics cards can do, by name: memory bandwidth and arithmetic, as their makers publish them.

Names are compared without "NVIDIA", "GeForce" and capacities, so "NVIDIA GeForce RTX 4090" and "RTX 4090" are one card; laptop chips carry
the name of a desktop card that is far faster, so they have rows of their own.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class CardRates(NamedTuple):
    """memory_gb_per_s: peak of the card's own memory; tflops: dense bfloat16 products summed in float32."""

    memory_gb_per_s: float
    tflops: float


UNKNOWN = CardRates(288.0, 22.0)
"""For cards that neither this table nor the driver knows: what the slowest desktop card of the last generations has (RTX 4060 Ti)."""

LINK_GB_PER_S_PER_LANE = {1: 0.2, 2: 0.39, 3: 0.77, 4: 1.55, 5: 3.4, 6: 6.8}
"""What copies of several MiB reach per lane by PCIe generation; generation 5 as measured (54.4 GB/s over 16 lanes), the others in
proportion to their rates and coding."""

USUAL_LINK_GB_PER_S = 16 * LINK_GB_PER_S_PER_LANE[4]
"""PCIe 4.0 x16, for a card that is only imagined."""

_CARDS = {
    "rtx 5090": CardRates(1792, 209),
    "rtx 5080": CardRates(960, 112),
    "rtx 5070 ti": CardRates(896, 88),
    "rtx 5070": CardRates(672, 62),
    "rtx 5060 ti": CardRates(448, 47),
    "rtx 5060": CardRates(448, 38),
    "rtx 5090 laptop gpu": CardRates(896, 95),
    "rtx 5080 laptop gpu": CardRates(896, 75),
    "rtx 5070 ti laptop gpu": CardRates(672, 55),
    "rtx 5070 laptop gpu": CardRates(384, 40),
    "rtx 4090": CardRates(1008, 165),
    "rtx 4090 d": CardRates(1008, 147),
    "rtx 4080 super": CardRates(736, 104),
    "rtx 4080": CardRates(717, 97),
    "rtx 4070 ti super": CardRates(672, 88),
    "rtx 4070 ti": CardRates(504, 80),
    "rtx 4070 super": CardRates(504, 71),
    "rtx 4070": CardRates(504, 58),
    "rtx 4060 ti": CardRates(288, 44),
    "rtx 4060": CardRates(272, 30),
    "rtx 4090 laptop gpu": CardRates(576, 65),
    "rtx 4080 laptop gpu": CardRates(432, 50),
    "rtx 4070 laptop gpu": CardRates(256, 31),
    "rtx 4060 laptop gpu": CardRates(256, 23),
    "rtx 4050 laptop gpu": CardRates(192, 18),
    "rtx 3090 ti": CardRates(1008, 80),
    "rtx 3090": CardRates(936, 71),
    "rtx 3080 ti": CardRates(912, 68),
    "rtx 3080": CardRates(760, 59),
    "rtx 3070 ti": CardRates(608, 43),
    "rtx 3070": CardRates(448, 40),
    "rtx 3060 ti": CardRates(448, 32),
    "rtx 3060": CardRates(360, 25),
    "rtx 3050": CardRates(224, 18),
    "rtx 3080 ti laptop gpu": CardRates(512, 37),
    "rtx 3080 laptop gpu": CardRates(448, 38),
    "rtx 3070 laptop gpu": CardRates(448, 32),
    "rtx 3060 laptop gpu": CardRates(336, 21),
    "rtx pro 6000 blackwell workstation edition": CardRates(1792, 250),
    "rtx 6000 ada generation": CardRates(960, 182),
    "rtx a6000": CardRates(768, 77),
    "rtx a5000": CardRates(768, 55),
    "rtx a4000": CardRates(448, 38),
    "l4": CardRates(300, 60),
    "l40s": CardRates(864, 181),
    "a10": CardRates(600, 62),
    "a10g": CardRates(600, 35),
    "a100-sxm4": CardRates(2039, 312),
    "a100-pcie": CardRates(1555, 312),
    "h100": CardRates(3350, 800),
    "h100 pcie": CardRates(2039, 500),
    "h200": CardRates(4800, 800),
}
_NOISE = re.compile(r"\b(?:nvidia|geforce|quadro|tesla|\d+ ?gb|hbm\d?e?|80g|40g)\b")


def plain_name(name: str) -> str:
    """A card's name as the table spells it: "NVIDIA GeForce RTX 4090" -> "rtx 4090"."""
    words = _NOISE.sub(" ", name.lower().replace("-sxm4-", "-sxm4 ").replace("-pcie-", "-pcie "))
    return " ".join(words.split()).strip("- ")


def known_rates(name: str) -> CardRates | None:
    """Published rates of a card; None when the table does not have it."""
    return _CARDS.get(plain_name(name))


def link_gb_per_s(generation: int, lanes: int) -> float | None:
    """What copies to a card reach over a PCIe link, in decimal GB per second; None for a generation that the table does not have."""
    per_lane = LINK_GB_PER_S_PER_LANE.get(generation)
    return None if per_lane is None or lanes < 1 else per_lane * lanes
