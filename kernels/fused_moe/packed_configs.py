"""Block shapes of the MoE kernels over packed weights, chosen by tables as in `configs.py`. Measurements: `docs/results`."""

from __future__ import annotations

from typing import NamedTuple

from rimuru_kernels.packed_weights.format import LOW_BITS, PackedFormat
from rimuru_kernels.sizes import sorts


class PackedRowsConfig(NamedTuple):
    """Blocks of one of the two row kernels.

    Attributes:
        units: pieces of 16 bytes of a weight row that lie side by side in the lanes, a power of two; shorter rows take fewer.
        warps: of a program. With units (and slots) they say how many rows are taken at once.
        turns: so many times that a program does that; a multiple of held.
        held: turns whose weights are on their way at once.
        registers: most that a lane gets, so that more programs run side by side, or 0: what the compiler chooses.
    """

    units: int
    warps: int
    turns: int
    held: int
    registers: int = 0


class DirectConfig(NamedTuple):
    """Blocks of one grouped product by `packed_direct`: weight rows of a program (of each of gate and up), stages of its pipeline."""

    rows: int
    stages: int


class PackedGemmConfig(NamedTuple):
    """Blocks of one grouped product.

    tile_tokens (BM); weight_rows (BN, of each of gate and up); depth: bytes of a weight row that one product takes, as far as they share a
    scale; repeat: so many times that in one turn of the loop; group: tiles that walk side by side; halves: tiles that are at most half full
    do half the work; swap: weights are the first operand, so that their numbers go from registers into the matrix units.
    direct: the blocks of `packed_direct`, which does it for this tile_tokens where it can; the rest is for where it cannot.
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
    direct: DirectConfig | None = None


class PackedPlan(NamedTuple):
    """How one call is computed. With `rows` set, pair by pair; else as grouped products (both with the same tile_tokens)."""

    rows: tuple[PackedRowsConfig, PackedRowsConfig] | None
    gemm: tuple[PackedGemmConfig, PackedGemmConfig] | None


RowsTable = tuple[tuple[float, PackedRowsConfig, PackedRowsConfig], ...]
"""(Pairs up to which it is used, gate and up, down)."""

# Few pairs: everything is on its way at once, or nearly so, in a single wave of programs. More: programs live longer, and activations are
# prepared less often.
_SINGLE, _COUPLE, _ALL = 8.0, 16.0, float("inf")
ROWS_4_BITS: RowsTable = (
    (_COUPLE, PackedRowsConfig(32, 4, 6, 2), PackedRowsConfig(8, 4, 4, 4)),
    (_ALL, PackedRowsConfig(32, 4, 12, 3), PackedRowsConfig(8, 4, 8, 2)),
)
ROWS_TWO_LEVELS: RowsTable = (
    (_COUPLE, PackedRowsConfig(32, 4, 6, 2), PackedRowsConfig(8, 4, 4, 4)),
    (_ALL, PackedRowsConfig(32, 4, 12, 2), PackedRowsConfig(8, 4, 8, 2, registers=128)),
)
ROWS_5_AND_6_BITS: RowsTable = (
    (_SINGLE, PackedRowsConfig(32, 4, 2, 2), PackedRowsConfig(32, 8, 8, 4)),
    (_COUPLE, PackedRowsConfig(32, 4, 2, 2), PackedRowsConfig(8, 4, 8, 2)),
    (_ALL, PackedRowsConfig(32, 4, 12, 1), PackedRowsConfig(8, 4, 8, 2, registers=128)),
)
ROWS_INT8: RowsTable = (
    (_SINGLE, PackedRowsConfig(32, 2, 2, 2), PackedRowsConfig(16, 4, 4, 4)),
    (_ALL, PackedRowsConfig(32, 2, 2, 2), PackedRowsConfig(16, 4, 8, 4)),
)
ROWS_FP8: RowsTable = (
    (_SINGLE, PackedRowsConfig(64, 4, 2, 2), PackedRowsConfig(16, 4, 4, 4)),
    (_ALL, PackedRowsConfig(32, 4, 2, 2), PackedRowsConfig(16, 4, 4, 4)),
)

Table = tuple[tuple[float, PackedGemmConfig, PackedGemmConfig], ...]
"""(Pairs per expert up to which it is used, gate and up, down)."""

# Up to 5 pairs per expert tiles of 8 are read a second time for few experts only.
_FEWEST, _FEW, _SOME, _MANY = 5.0, 11.0, 40.0, float("inf")


def _direct(wide: DirectConfig, tall: DirectConfig) -> tuple[float, PackedGemmConfig, PackedGemmConfig]:
    """The row of a table for the fewest pairs, with blocks for where weights cannot go directly to the matrix units."""
    plain = PackedGemmConfig(8, 64, 32, 2, 1, 4, 3, swap=True)
    return _FEWEST, plain._replace(direct=wide), plain._replace(direct=tall)


_PAST_FEWEST_4_BITS: Table = (
    (_FEW, PackedGemmConfig(16, 32, 32, 2, 1, 2, 3), PackedGemmConfig(16, 64, 32, 2, 1, 4, 3)),
    (_SOME, PackedGemmConfig(32, 64, 32, 2, 1, 4, 3, swap=True), PackedGemmConfig(32, 64, 32, 1, 1, 4, 4, swap=True)),
    (70.0, PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True), PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True)),
    (_MANY, PackedGemmConfig(128, 64, 32, 1, 4, 4, 3, True, True), PackedGemmConfig(128, 128, 32, 1, 4, 8, 3, True, True)),
)
_PAST_FEWEST_8_BITS: Table = (
    (_FEW, PackedGemmConfig(16, 64, 64, 2, 1, 4, 3), PackedGemmConfig(16, 64, 64, 2, 1, 4, 3)),
    (_SOME, PackedGemmConfig(32, 64, 32, 2, 1, 4, 3, swap=True), PackedGemmConfig(32, 64, 32, 2, 1, 4, 3, swap=True)),
    (70.0, PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True), PackedGemmConfig(64, 64, 32, 1, 4, 4, 4, swap=True)),
    (_MANY, PackedGemmConfig(128, 64, 32, 1, 4, 4, 4, True, True), PackedGemmConfig(128, 128, 32, 1, 4, 8, 3, True, True)),
)
GEMM_4_BITS: Table = (_direct(DirectConfig(16, 3), DirectConfig(32, 3)), *_PAST_FEWEST_4_BITS)
# Floats of 4 bits take more instructions to spread, which fewer warps do better.
GEMM_FP4: Table = (
    _direct(DirectConfig(16, 3), DirectConfig(32, 4)),
    *_PAST_FEWEST_4_BITS[:-1],
    (_MANY, PackedGemmConfig(128, 64, 32, 1, 4, 4, 3, True, True), PackedGemmConfig(128, 64, 32, 1, 4, 4, 3, True, True)),
)
GEMM_INT8: Table = (_direct(DirectConfig(16, 4), DirectConfig(32, 4)), *_PAST_FEWEST_8_BITS)
# Not measured as faster directly.
GEMM_5_BITS: Table = ((_FEWEST, *_PAST_FEWEST_4_BITS[0][1:]), *_PAST_FEWEST_4_BITS)
GEMM_FP8: Table = ((_FEWEST, *_PAST_FEWEST_8_BITS[0][1:]), *_PAST_FEWEST_8_BITS)
SMALLEST_CHUNK = 32
# float32 is for checking, not for speed.
GEMM_FLOAT32 = PackedGemmConfig(32, 32, 32, 1, 4, 4, 2)


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
        pairs = num_tokens * top_k
        wide, tall = (next(row for row in rows_table(fmt) if pairs <= row[0]) for fmt in formats)
        return PackedPlan((wide[1], tall[2]), None)
    if itemsize == 4:
        return PackedPlan(None, (GEMM_FLOAT32, GEMM_FLOAT32))
    pairs_per_expert = num_tokens * top_k / num_experts
    for (limit, gate_up, _), (_, _, down) in zip(*map(gemm_table, formats), strict=True):
        if pairs_per_expert <= limit and gate_up.tile_tokens == down.tile_tokens:
            return PackedPlan(None, (gate_up, down))
    raise AssertionError("the last row of the table has no limit")


def rows_table(fmt: PackedFormat) -> RowsTable:
    """The blocks of the row kernels for this format."""
    if LOW_BITS[fmt.values] == 8:
        return ROWS_FP8 if fmt.values == "fp8" else ROWS_INT8
    if fmt.values in ("int5", "int6"):
        return ROWS_5_AND_6_BITS
    return ROWS_TWO_LEVELS if fmt.two_levels else ROWS_4_BITS


def gemm_table(fmt: PackedFormat) -> Table:
    """The blocks of the grouped products of this format. All tables have the same limits and, but for the first row, tile_tokens."""
    if LOW_BITS[fmt.values] == 8:
        return GEMM_FP8 if fmt.values == "fp8" else GEMM_INT8
    if fmt.values == "int5":
        return GEMM_5_BITS
    return GEMM_FP4 if fmt.values == "fp4" else GEMM_4_BITS
