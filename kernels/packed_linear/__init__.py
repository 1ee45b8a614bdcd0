"""Products with a dense matrix that stays packed: few rows straight from its codes, many after parts of it have become numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from rimuru_kernels.packed_weights import PackedFormat, dequantize, page_bytes, page_parts, unpack
from rimuru_kernels.packed_weights.format import Part
from rimuru_kernels.sizes import PACKED_NUMBERS

__all__ = ["MAX_ROWS", "packed_linear", "packed_rows"]

MAX_ROWS = 8
"""Up to this many rows of x codes are read directly on a GPU; with more, matrix units win, numbers made on the way included."""


def packed_linear(x: Tensor, page: Tensor, fmt: PackedFormat, rows: int, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, W [rows, k] packed in a page.

    Args:
        x: [T, k], bfloat16, float16 or float32.
        page: uint8 [page_bytes or more], see `packed_weights`, on x's device.
        fmt: what is in it.
        rows: n, of the matrix.
        bias: [n] in x's dtype, or None.

    Returns:
        [T, n] new tensor in x's dtype. Few rows are summed in float32; for many, weights are rounded to x's dtype first.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if x.ndim != 2 or rows < 1 or page.ndim != 1 or page.dtype is not torch.uint8 or page.device != x.device:
        raise ValueError(f"packed_linear: x {list(x.shape)} on {x.device}, page {page.dtype} {list(page.shape)} on {page.device}")
    if page.numel() < page_bytes(fmt, rows, x.shape[1]) or (bias is not None and bias.shape != (rows,)):
        shape = None if bias is None else list(bias.shape)
        raise ValueError(
            f"packed_linear: a page of {page.numel()} bytes is too small for [{rows}, {x.shape[1]}], or bias {shape} is not [n]"
        )
    tokens = x.shape[0]
    if x.is_cuda and 0 < tokens <= MAX_ROWS:
        from rimuru_kernels.packed_linear import launch

        out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
        launch.few_rows(x.contiguous(), page, fmt, out)
        return out if bias is None else out.add_(bias)
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    step = max(1, PACKED_NUMBERS // x.shape[1] // fmt.group_rows) * fmt.group_rows
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part = _numbers(page, fmt, rows, x.shape[1], start, stop).to(x.dtype)
        out[:, start:stop] = linear(x, part, None if bias is None else bias[start:stop])
    return out


def packed_rows(page: Tensor, fmt: PackedFormat, shape: tuple[int, int], ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a packed matrix as numbers.

    Args:
        page: uint8, see `packed_linear`.
        shape: of the matrix.
        ids: int64 [T], rows in any order.

    Returns:
        [T, columns] of `dtype`.
    """
    alone = replace(fmt, group_rows=1)
    parts, wanted = page_parts(fmt, *shape), page_parts(alone, len(ids), shape[1])
    out = torch.zeros(wanted.num_bytes, dtype=torch.uint8, device=page.device)
    for name, part, target in zip(parts._fields, parts[:-1], wanted[:-1], strict=False):
        if part.rows:
            lines = ids // fmt.group_rows if name == "scales" else ids[:1] * 0 if name == "factor" else ids
            _lines(out, target).copy_(_lines(page, part).index_select(0, lines))
    return dequantize(unpack(out, alone, len(ids), shape[1]), alone).to(dtype)


def _numbers(page: Tensor, fmt: PackedFormat, rows: int, columns: int, start: int, stop: int) -> Tensor:
    """Rows start to stop as float32; start is a multiple of the rows that share a scale."""
    parts, wanted = page_parts(fmt, rows, columns), page_parts(fmt, stop - start, columns)
    out = torch.empty(wanted.num_bytes, dtype=torch.uint8, device=page.device)
    for name, part, target in zip(parts._fields, parts[:-1], wanted[:-1], strict=False):
        if part.rows:
            first = start // fmt.group_rows if name == "scales" else 0 if name == "factor" else start
            _lines(out, target).copy_(_lines(page, part)[first : first + target.rows])
    return dequantize(unpack(out, fmt, stop - start, columns), fmt)


def _lines(page: Tensor, part: Part) -> Tensor:
    return page[part.start : part.start + part.rows * part.row_bytes].view(part.rows, part.row_bytes)
