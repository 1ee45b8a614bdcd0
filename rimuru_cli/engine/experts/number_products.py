"""Packed matrices as bfloat16 numbers: written from packed ones, and multiplied with by torch's own products.

A page has them as [rows, width], columns in the order in which their codes come out of their bytes (see `code_order.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from rimuru_cli.engine.experts.packed_products import PackedTile, Workspace
from rimuru_kernels.packed_weights import PackedFormat


class NumberTile:
    """How one kind of tile is written and multiplied.

    Args:
        fmt: of the packed matrices; rows, columns: of a tile; space: scratch.
    """

    def __init__(self, fmt: PackedFormat, rows: int, columns: int, space: Workspace) -> None:
        self.rows = rows
        self._packed = PackedTile(fmt, rows, columns, space)
        self._space = space
        self._width = self._packed.width

    def write(self, packed: Sequence[Tensor], pages: Sequence[Tensor]) -> None:
        """Write packed matrices into pages, all uint8, of at least `page_bytes` and two bytes a number."""
        for source, page in zip(packed, pages, strict=True):
            self._packed.numbers(source, self._at(page))

    def product(self, pages: Sequence[Tensor], x: Tensor) -> Tensor:
        """Products of n matrices, one row each: x float32 [1, columns], for all, or [n, columns] -> float32 [n, rows]."""
        rows = self._packed.ordered(x).bfloat16()
        out = torch.empty(len(pages), self.rows, dtype=torch.bfloat16)
        for index, page in enumerate(pages):
            torch.mv(self._at(page), rows[index % len(rows)], out=out[index])
        return out.float()

    def rows_product(self, page: Tensor, x: Tensor) -> Tensor:
        """Products of one matrix with many rows: x float32 [m, columns] -> float32 [m, rows]."""
        numbers, rows = self._at(page), self._packed.ordered(x).bfloat16()
        if fast_bfloat16():
            return linear(rows, numbers).float()
        # As the product of one row: bfloat16 factors, sums in float32.
        out, wide = torch.empty(len(x), self.rows), rows.float()
        most = max(1, self._space.floats.numel() // self._width)
        for start in range(0, self.rows, most):
            part = numbers[start : start + most]
            floats = self._space.floats[: part.numel()].view_as(part).copy_(part)
            torch.mm(wide, floats.t(), out=out[:, start : start + most])
        return out

    def _at(self, page: Tensor) -> Tensor:
        return page[: self.rows * self._width * 2].view(torch.bfloat16).view(self.rows, self._width)


@cache
def fast_bfloat16() -> bool:
    """Whether this processor multiplies matrices of bfloat16 by instructions of its own."""
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
