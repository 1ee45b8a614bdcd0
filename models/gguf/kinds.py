"""The types of tensors that GGUF knows: their names, and how many weights a block of how many bytes holds. No torch.

Sizes follow ggml's definitions of its blocks (github.com/ggml-org/ggml, ggml-common.h). Those that are not computed with are here so that a
header that has them is understood, and the refusal names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rimuru_kernels.packed_weights.format import PackedFormat


class Kind(NamedTuple):
    """One type. name: as people write it; weights: in a block; num_bytes: of a block."""

    name: str
    weights: int
    num_bytes: int


KINDS: dict[int, Kind] = {
    number: Kind(name, weights, num_bytes)
    for number, name, weights, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}

OTHERS: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that no file has any longer, or that exist only within computations: for the words of a refusal."""

BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS.values()}

FLOATS = ("F32", "F16", "BF16")
PACKED: dict[str, PackedFormat] = {
    "Q4_0": PackedFormat("int4", 32, "f16", bias=8),
    "Q4_1": PackedFormat("int4", 32, "f16", "min"),
    "Q5_0": PackedFormat("int5", 32, "f16", bias=16),
    "Q5_1": PackedFormat("int5", 32, "f16", "min"),
    "Q8_0": PackedFormat("int8", 32, "f16"),
    "Q4_K": PackedFormat("int4", 32, "u8*f16", "u8*f16"),
    "Q5_K": PackedFormat("int5", 32, "u8*f16", "u8*f16"),
    "Q6_K": PackedFormat("int6", 16, "i8*f16", bias=32),
    "MXFP4": PackedFormat("fp4", 32, "e8m0"),
}
"""Quantised types that are computed with, and what a page of each holds; `blocks.py` writes it."""
SUPPORTED = (*FLOATS, *PACKED)


def in_words(names: Iterable[tuple[str, int]]) -> str:
    """Types for people, those with most bytes first: "Q4_K and Q6_K". `names`: (name, bytes) of each tensor."""
    counted: Counter[str] = Counter()
    for name, num_bytes in names:
        counted[name] += num_bytes
    ordered = [name for name, _ in counted.most_common()]
    return ordered[0] if len(ordered) == 1 else ", ".join(ordered[:-1]) + f" and {ordered[-1]}" if ordered else "nothing"
