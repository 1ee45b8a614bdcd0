"""Dense matrices that stay packed on a device: what a layer multiplies with is a tensor, a packed matrix, or several of them stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rimuru_kernels.packed_linear import packed_linear, packed_rows
from rimuru_kernels.packed_weights import Codes, PackedFormat
from rimuru_kernels.row_linear import row_linear


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, columns] as one page (see `packed_weights`): uint8 [page_bytes] on the device that computes."""

    page: Tensor
    fmt: PackedFormat
    rows: int
    columns: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the page."""
        return self.page.numel()


@dataclass(frozen=True)
class StackedMatrix:
    """Matrices of the same columns, one below the other, which differ in how they are stored."""

    parts: tuple[Tensor | PackedMatrix, ...]


Matrix = Tensor | PackedMatrix | StackedMatrix


def product(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [T, k], W [n, k] -> [T, n] in x's dtype."""
    if isinstance(matrix, Tensor):
        return row_linear(x, matrix, bias)
    if isinstance(matrix, PackedMatrix):
        return packed_linear(x, matrix.page, matrix.fmt, matrix.rows, bias)
    out = torch.cat([product(x, part) for part in matrix.parts], 1)
    return out if bias is None else out.add_(bias)


def rows_of(matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ids [T] of a matrix [n, k] as numbers: [T, k] of `dtype`."""
    if isinstance(matrix, Tensor):
        return embedding(ids, matrix)
    assert isinstance(matrix, PackedMatrix), "a table is one matrix"
    return packed_rows(matrix.page, matrix.fmt, (matrix.rows, matrix.columns), ids, dtype)


def cut(codes: Codes, fmt: PackedFormat, start: int, stop: int) -> Codes:
    """Rows start to stop of a matrix; where rows share a scale, `start` begins such rows."""
    per = fmt.group_rows
    assert start % per == 0, "rows that share a scale stay together"
    own, lines = slice(start, stop), slice(start // per, -(-stop // per))

    def rows(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[own]

    return Codes(
        codes.values[own], codes.scales[lines], rows(codes.super_scales), rows(codes.offsets), rows(codes.super_offsets), codes.factor
    )


def stack(pieces: Sequence[Codes]) -> Codes:
    """Matrices of one format, one below the other."""
    if len(pieces) == 1:
        return pieces[0]

    def all_of(parts: Sequence[Tensor | None]) -> Tensor | None:
        known = [part for part in parts if part is not None]
        return torch.cat(known) if known else None

    return Codes(
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.scales for piece in pieces]),
        all_of([piece.super_scales for piece in pieces]),
        all_of([piece.offsets for piece in pieces]),
        all_of([piece.super_offsets for piece in pieces]),
        pieces[0].factor,
    )


def can_stack(fmt: PackedFormat, first: Codes, second: Codes) -> bool:
    """Whether two matrices of one format can be one: the upper ends with whole groups of rows, and one factor holds for both."""
    whole = len(first.values) % fmt.group_rows == 0
    return whole and (first.factor is None or (second.factor is not None and bool(first.factor == second.factor)))
