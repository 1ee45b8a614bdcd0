"""The kinds of tiles that packed experts are on a CPU, and which one each projection of a layer is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from rimuru_cli.engine.experts.number_products import NumberTile
from rimuru_cli.engine.experts.packed_products import PackedTile, Workspace
from rimuru_cli.engine.experts.pages import ExpertPages, Lying
from rimuru_cli.engine.experts.plane_products import PlaneTile
from rimuru_kernels.packed_weights import PackedFormat

_KINDS: dict[Lying, type[PackedTile] | type[PlaneTile] | type[NumberTile]] = {
    "packed": PackedTile,
    "planes": PlaneTile,
    "numbers": NumberTile,
}


class CpuTile(Protocol):
    """One kind of tile: packed matrices [rows, columns] of one format, lying in pages in one way."""

    def write(self, packed: Sequence[Tensor], pages: Sequence[Tensor]) -> None:
        """Write matrices, packed as for a device, into pages."""
        ...

    def product(self, pages: Sequence[Tensor], x: Tensor) -> Tensor:
        """Products of n matrices, one row each: x float32 [1, columns], for all, or [n, columns] -> float32 [n, rows]."""
        ...

    def rows_product(self, page: Tensor, x: Tensor) -> Tensor:
        """Products of one matrix with many rows: x float32 [m, columns] -> float32 [m, rows]."""
        ...


class CpuTiles:
    """The tiles of a model, with scratch of their own: for one thread.

    Args:
        pages: how experts lie in pages.
    """

    def __init__(self, pages: ExpertPages) -> None:
        self._pages = pages
        self._space = Workspace(max(pages.f, pages.d))
        self._made = cache(self._make)

    def of(self, layer: int, projection: int) -> CpuTile | None:
        """The tile of a MoE layer's gate (0), up (1) or down (2); None: plain numbers."""
        fmt = self._pages.format(layer, projection)
        if fmt is None:
            return None
        return self._made(self._pages.lying(layer, projection), fmt, *self._pages.tile_shape(layer, projection))

    def _make(self, lying: Lying, fmt: PackedFormat, rows: int, columns: int) -> CpuTile:
        return _KINDS[lying](fmt, rows, columns, self._space)
