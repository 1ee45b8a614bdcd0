"""For Triton kernels over rows of several sequences: which sequence a tile of rows belongs to, without reading anything on the host."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(cu_seqlens, num_seqs, tile, ROWS: tl.constexpr):
    """Sequence of a tile, its first row of all, its rows, and the tile's first row within it (not below its rows: an empty tile).

    Sequence s owns the tiles from cu_seqlens[s] / ROWS + s on: as many as it fills, or one more. There are T / ROWS + num_seqs tiles.
    """
    low, high = tile * 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens + middle) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    start = tl.load(cu_seqlens + low)
    return low, start, tl.load(cu_seqlens + low + 1) - start, (tile - (start // ROWS + low)) * ROWS


def num_tiles(rows: int, num_seqs: int, tile_rows: int) -> int:
    """Tiles to launch for so many rows of all sequences."""
    return rows // tile_rows + num_seqs
