"""Into how many row tiles the experts of each layer are cut, where formats are mixed, so that pages of one size waste least. No torch.

The larger formats get more tiles: Q4_K in 2 and Q6_K in 3 have tiles of nearly one size. All pages have the size of some tile; for each
such size every matrix is cut into the fewest tiles that fit, and the size that takes the fewest bytes over all layers is chosen. A few
bytes do not count: sizes that take hardly more than the least compete by how few pages they make, because pages cost, too, and
then by whether pages of the KV cache fill them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rimuru_cli.engine.memory.geometry import round_to_entry, row_tilings
from rimuru_kernels.packed_weights.format import PackedFormat, tile_rows

MORE_TILES = 4
"""A matrix is cut into at most so many times as many tiles as it needs, or EASY_TILES."""
EASY_TILES = 8
SMALLEST_PAGE = 128
"""Nothing is cut for the sake of waste into pages smaller than this part of the largest that are allowed."""
NEAR = 64
"""Sizes that take at most this part more than the least count as equally good."""


class Matrix(NamedTuple):
    """A kind of projection: format (None: plain numbers), rows, columns."""

    fmt: PackedFormat | None
    rows: int
    columns: int


class LayerTiles(NamedTuple):
    """Row tiles of a layer's experts: of gate and of up each, and of down."""

    wide: int
    down: int

    @property
    def pages(self) -> int:
        """Pages of one expert."""
        return 2 * self.wide + self.down

    def of(self, projection: int) -> int:
        """Tiles of gate (0), up (1) or down (2)."""
        return self.down if projection == 2 else self.wide


Layer = tuple[Matrix, Matrix]
"""Gate (and up), and down, of a layer's experts."""
Content = Callable[[PackedFormat | None, int, int], int]
"""Bytes of a tile of a format, of so many rows and columns."""


def rows_of_tile(matrix: Matrix, tiles: int) -> int:
    """Rows of each tile of a matrix but the last; see `packed_weights.tile_rows`.

    Raises:
        ValueError: it cannot be cut into so many.
    """
    if matrix.fmt is None and matrix.rows % tiles:
        raise ValueError(f"plain numbers of {matrix.rows} rows are not cut into {tiles} unequal tiles")
    return tile_rows(matrix.rows, tiles, 1 if matrix.fmt is None else matrix.fmt.group_rows)


def choose_tiles(
    layers: Sequence[Layer], content: Content, max_page_bytes: int, grain: int = 1
) -> tuple[int, tuple[LayerTiles, ...]] | None:
    """The page size that wastes least over all layers, up to a part in `NEAR`, and each layer's tiles; None if none is small enough.

    Args:
        layers: kinds of each layer's matrices; both are plain, or none.
        content: see there.
        max_page_bytes: pages are at most that large.
        grain: bytes of which pages had better be a multiple, since they are split into such.
    """
    kinds = Counter(layers)
    sizes = {matrix: _tile_sizes(matrix, content, max_page_bytes) for layer in kinds for matrix in layer}
    whole = round_to_entry(max(content(*matrix) for matrix in sizes))
    candidates = {size for own in sizes.values() for size in own.values()} | {whole}
    if whole <= max_page_bytes:
        candidates = {size for size in candidates if size * SMALLEST_PAGE >= max_page_bytes or size == whole}
    candidates |= {round_to_entry(-(-size // grain) * grain) for size in candidates}
    made: list[tuple[int, int, int, dict[Layer, LayerTiles]]] = []
    for size in sorted(candidates):
        tiles = {layer: _fewest(layer, sizes, size) for layer in kinds}
        found = {layer: own for layer, own in tiles.items() if own is not None}
        if size <= max_page_bytes and len(found) == len(kinds):
            pages = sum(count * found[layer].pages for layer, count in kinds.items())
            made.append((pages * size, pages, size, found))
    if not made:
        return None
    least = min(total for total, *_ in made)
    near = [one for one in made if (one[0] - least) * NEAR <= least]
    _, _, size, chosen = min(near, key=lambda one: (one[1], one[2] % grain > 0, one[0]))
    return size, tuple(chosen[layer] for layer in layers)


def _tile_sizes(matrix: Matrix, content: Content, max_page_bytes: int) -> dict[int, int]:
    """Page sizes by number of tiles, as far as a matrix can be cut into so many."""
    needed = -(-content(*matrix) // max_page_bytes)
    sizes = {}
    for tiles in range(1, min(matrix.rows, max(EASY_TILES, MORE_TILES * needed)) + 1):
        try:
            sizes[tiles] = round_to_entry(content(matrix.fmt, rows_of_tile(matrix, tiles), matrix.columns))
        except ValueError:
            continue
    return sizes


def _fewest(layer: Layer, sizes: dict[Matrix, dict[int, int]], size: int) -> LayerTiles | None:
    """The fewest tiles of a layer's matrices that pages of this size hold; plain ones are cut alike, as their kernels expect."""
    wide, tall = layer
    if wide.fmt is None:
        for tiles in row_tilings(wide.rows, tall.rows):
            if max(sizes[matrix].get(tiles, size + 1) for matrix in layer) <= size:
                return LayerTiles(tiles, tiles)
        return None
    counts = [next((tiles for tiles, own in sizes[matrix].items() if own <= size), None) for matrix in layer]
    return None if counts[0] is None or counts[1] is None else LayerTiles(counts[0], counts[1])
