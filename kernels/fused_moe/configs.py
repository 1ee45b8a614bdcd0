"""Block shapes of the MoE kernels, chosen by a table: what was fastest on an H200 among shapes that every card of compute capability 8.0
and up can launch (at most 101,376 bytes of shared memory a block, which is what 8.6, 8.9 and 12.0 have). Measurements: `docs/results`.
"""

from __future__ import annotations

from typing import NamedTuple

from rimuru_kernels.sizes import sorts


class RowsConfig(NamedTuple):
    """Blocks of one of the two row kernels: weight rows, columns read at a time, warps."""

    rows: int
    columns: int
    warps: int


class GemmConfig(NamedTuple):
    """Blocks of one grouped product.

    tile_tokens (BM), weight_rows (BN) and depth (BK); group: tiles that walk side by side; halves: tiles that are at most half full do half
    the work; described: the copy engine of compute capability 9.0 fetches the weights (elsewhere the same blocks without it).
    """

    tile_tokens: int
    weight_rows: int
    depth: int
    group: int
    warps: int
    stages: int
    halves: bool = False
    described: bool = False


class Plan(NamedTuple):
    """How one call is computed. With `rows` set, pair by pair; else as grouped products (both with the same tile_tokens)."""

    rows: tuple[RowsConfig, RowsConfig] | None
    gemm: tuple[GemmConfig, GemmConfig] | None


MAX_ONE_LAUNCH_PAIRS = 16384
"""Up to this many pairs, sorting in one launch is faster than counting first."""

ROWS_2_BYTES = (RowsConfig(2, 1024, 4), RowsConfig(2, 256, 4))
ROWS_4_BYTES = (RowsConfig(4, 512, 4), RowsConfig(2, 128, 4))

# (pairs per expert up to which it is used, gate and up, down), for weights of 2 bytes.
GEMM_2_BYTES: tuple[tuple[float, GemmConfig, GemmConfig], ...] = (
    (11.0, GemmConfig(16, 128, 128, 1, 4, 3), GemmConfig(16, 128, 128, 1, 4, 3)),
    (23.0, GemmConfig(32, 128, 128, 1, 4, 3), GemmConfig(32, 128, 128, 1, 4, 3)),
    (48.0, GemmConfig(64, 128, 64, 8, 4, 3, False, True), GemmConfig(64, 128, 64, 8, 4, 3, False, True)),
    (70.0, GemmConfig(128, 128, 64, 4, 4, 3, True, True), GemmConfig(128, 128, 64, 4, 4, 3, True, True)),
    (float("inf"), GemmConfig(128, 256, 32, 4, 8, 4, True, True), GemmConfig(128, 128, 64, 4, 4, 3, True, True)),
)
# float32 is for checking, not for speed.
GEMM_4_BYTES: tuple[tuple[float, GemmConfig, GemmConfig], ...] = (
    (float("inf"), GemmConfig(32, 64, 32, 4, 4, 3), GemmConfig(32, 64, 32, 4, 4, 3)),
)


def choose_plan(num_tokens: int, top_k: int, num_experts: int, itemsize: int) -> Plan:
    """The blocks for one call, from sizes that the host knows (so that a captured graph keeps them).

    Args:
        num_tokens: rows of x.
        top_k: slots per token.
        num_experts: experts of the layer.
        itemsize: bytes of a weight, 2 or 4.
    """
    if not sorts(num_tokens, top_k, num_experts):
        return Plan(ROWS_2_BYTES if itemsize == 2 else ROWS_4_BYTES, None)
    table = GEMM_2_BYTES if itemsize == 2 else GEMM_4_BYTES
    pairs_per_expert = num_tokens * top_k / num_experts
    for limit, gate_up, down in table:
        if pairs_per_expert <= limit:
            return Plan(None, (gate_up, down))
    raise AssertionError("the last row of the table has no limit")
