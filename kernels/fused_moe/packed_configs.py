"""Block shapes of the MoE kernels over packed weights, chosen by tables as in `configs.py`. Measurements: `docs/results`."""

from __future__ import annotations

from typing import NamedTuple

from rimuru_kernels.packed_weights.format import LOW_BITS, PackedFormat
from rimuru_kernels.sizes import sorts


class PackedRowsConfig(NamedTuple):
    """Blocks of one of the two row kernels: weight rows of a program, one after the other, and warps."""

    rows: int
    warps: int


class PackedGemmConfig(NamedTuple):
    """Blocks of one grouped product.

    tile_tokens (BM); weight_rows (BN, of each of gate and up); depth: bytes of a weight row that one product takes, as far as they share a
    scale; repeat: so many times that in one turn of the loop; group: tiles that walk side by side; halves: tiles that are at most half full
    do half the work; swap: weights are the first operand, so that their numbers go from registers into the matrix units.
    """

    tile_tokens: int
    weight_rows: int
    depth: int
    repeat: int
    group: int
    warps: int
    stages: int
    halves: bool = False
    swap: bool = False


class PackedPlan(NamedTuple):
    """How one call is computed. With `rows` set, pair by pair; else as grouped products (both with the same tile_tokens)."""

    rows: tuple[PackedRowsConfig, PackedRowsConfig] | None
    gemm: tuple[PackedGemmConfig, PackedGemmConfig] | None


ROWS_4_BITS = (PackedRowsConfig(4, 2), PackedRowsConfig(4, 8))
"""Gate and up, down."""
ROWS_8_BITS = (PackedRowsConfig(4, 2), PackedRowsConfig(4, 4))

Table = tuple[tuple[float, PackedGemmConfig, PackedGemmConfig], ...]
"""(Pairs per expert up to which it is used, gate and up, down)."""

_FEW, _SOME, _MANY = 11.0, 40.0, float("inf")
GEMM_4_BITS: Table = (
    (_FEW, PackedGemmConfig(16, 32, 32, 2, 1, 2, 3), PackedGemmConfig(16, 64, 32, 2, 1, 4, 3)),
    (_SOME, PackedGemmConfig(32, 64, 32, 2, 1, 4, 3, swap=True), PackedGemmConfig(32, 64, 32, 1, 1, 4, 4, swap=True)),
    (70.0, PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True), PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True)),
    (_MANY, PackedGemmConfig(128, 64, 32, 1, 4, 4, 3, True, True), PackedGemmConfig(128, 128, 32, 1, 4, 8, 3, True, True)),
)
# Floats of 4 bits take more instructions to spread, which fewer warps do better.
GEMM_FP4: Table = (
    *GEMM_4_BITS[:-1],
    (_MANY, PackedGemmConfig(128, 64, 32, 1, 4, 4, 3, True, True), PackedGemmConfig(128, 64, 32, 1, 4, 4, 3, True, True)),
)
GEMM_8_BITS: Table = (
    (_FEW, PackedGemmConfig(16, 64, 64, 2, 1, 4, 3), PackedGemmConfig(16, 64, 64, 2, 1, 4, 3)),
    (_SOME, PackedGemmConfig(32, 64, 32, 2, 1, 4, 3, swap=True), PackedGemmConfig(32, 64, 32, 2, 1, 4, 3, swap=True)),
    (70.0, PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True), PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True)),
    (_MANY, PackedGemmConfig(128, 64, 32, 1, 4, 4, 4, True, True), PackedGemmConfig(128, 128, 32, 1, 4, 8, 3, True, True)),
)
SMALLEST_CHUNK = 32
# float32 is for checking, not for speed.
GEMM_FLOAT32 = PackedGemmConfig(32, 32, 32, 1, 4, 4, 2)


def unit_bytes(fmt: PackedFormat) -> int:
    """Bytes of a row whose codes (of one half) share a scale: what a row kernel sums before it scales."""
    return 32 if fmt.group % 32 == 0 else 16


def same_bytes(fmt: PackedFormat, most: int) -> int:
    """Bytes of a row whose codes (of one half) share a scale, at most `most`, a power of two from 16 on.

    In 4-bit rows codes of 32 neighbouring columns take up the same halves of 32 bytes, so more than 32 bytes span twice as many columns.
    """
    nibbles = LOW_BITS[fmt.values] == 4
    while most > 16 and fmt.group % (most * 2 if nibbles and most > 32 else most):
        most //= 2
    return most


def chunks(fmt: PackedFormat, config: PackedGemmConfig) -> tuple[int, int, int]:
    """How a weight row is taken: bytes of one product, bytes of them that share a scale, and products in one turn of the loop."""
    same = same_bytes(fmt, config.depth)
    chunk = max(same, SMALLEST_CHUNK)
    return chunk, min(same, chunk), config.depth * config.repeat // chunk


def choose_plan(num_tokens: int, top_k: int, num_experts: int, formats: tuple[PackedFormat, PackedFormat], itemsize: int) -> PackedPlan:
    """The blocks for one call, from sizes that the host knows (so that a captured graph keeps them).

    Args:
        num_tokens: rows of x.
        top_k: slots per token.
        num_experts: experts of the layer.
        formats: of gate and up, and of down.
        itemsize: bytes of an activation.
    """
    if not sorts(num_tokens, top_k, num_experts):
        return PackedPlan((rows_table(formats[0])[0], rows_table(formats[1])[1]), None)
    if itemsize == 4:
        return PackedPlan(None, (GEMM_FLOAT32, GEMM_FLOAT32))
    pairs_per_expert = num_tokens * top_k / num_experts
    for (limit, gate_up, _), (_, _, down) in zip(*map(gemm_table, formats), strict=True):
        if pairs_per_expert <= limit:
            return PackedPlan(None, (gate_up, down))
    raise AssertionError("the last row of the table has no limit")


def rows_table(fmt: PackedFormat) -> tuple[PackedRowsConfig, PackedRowsConfig]:
    """The blocks of the row kernels, for gate and up, and for down of this format."""
    return ROWS_8_BITS if LOW_BITS[fmt.values] == 8 else ROWS_4_BITS


def gemm_table(fmt: PackedFormat) -> Table:
    """The blocks of the grouped products of this format. All tables have the same limits and tile_tokens."""
    return GEMM_8_BITS if LOW_BITS[fmt.values] == 8 else GEMM_FP4 if fmt.values == "fp4" else GEMM_4_BITS
