"""States of sequences in one pool of bytes, named by page entries, and views of states named by where they lie.

A page entry is the page's offset in units of 256 bytes; a negative one names no page (a padded row of a captured step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ENTRY_BYTES = 256
"""Bytes per unit of a page entry."""

_ALIGNED = 16  # bytes that one thread loads at once


class Places(NamedTuple):
    """Where states lie: `base` is typed and its first element the origin; state i starts offsets[i] * unit elements behind it."""

    base: Tensor
    offsets: Tensor
    unit: int


def check_entries(name: str, pool: Tensor, entries: Tensor, pages: tuple[int, ...], device: torch.device) -> int:
    """Whether entries [S, *pages] can name pages of a pool, both on a device. Their values are not read.

    Returns:
        S, the number of sequences.

    Raises:
        ValueError: they do not; `name` is the op's.
    """
    if pool.dtype is not torch.uint8 or pool.ndim != 1 or not pool.is_contiguous() or pool.data_ptr() % _ALIGNED:
        raise ValueError(f"{name}: the pool must be uint8 [bytes], aligned to {_ALIGNED}, not {pool.dtype} {list(pool.shape)}")
    if entries.dtype is not torch.int32 or entries.ndim != 1 + len(pages) or entries.shape[1:] != pages or not entries.is_contiguous():
        wanted = ", ".join(map(str, ("S", *pages)))
        raise ValueError(f"{name}: entries must be contiguous int32 [{wanted}], not {entries.dtype} {list(entries.shape)}")
    if pool.device != device or entries.device != device:
        raise ValueError(f"{name}: the rows lie on {device}, the pool on {pool.device}, its entries on {entries.device}")
    return len(entries)


def check_bounds(name: str, cu_seqlens: Tensor | None, seqs: int, rows: int, device: torch.device) -> None:
    """Whether cu_seqlens [seqs + 1] can name the rows of sequences; None: one row each. Its values are not read.

    Raises:
        ValueError: it cannot; `name` is the op's.
    """
    if cu_seqlens is None:
        if rows != seqs:
            raise ValueError(f"{name}: {rows} rows of {seqs} sequences need cu_seqlens; without it a sequence has one row")
    elif cu_seqlens.dtype is not torch.int32 or cu_seqlens.shape != (seqs + 1,) or not cu_seqlens.is_contiguous():
        raise ValueError(f"{name}: cu_seqlens must be contiguous int32 [{seqs + 1}], not {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    elif cu_seqlens.device != device:
        raise ValueError(f"{name}: the rows lie on {device}, cu_seqlens on {cu_seqlens.device}")


def typed_pool(pool: Tensor, dtype: torch.dtype) -> Tensor:
    """The pool's bytes as elements of a dtype, a view."""
    return pool[: len(pool) // dtype.itemsize * dtype.itemsize].view(dtype)


def places_in_pool(pool: Tensor, entries: Tensor, dtype: torch.dtype) -> Places:
    """Pages of a pool whose states have this dtype."""
    return Places(typed_pool(pool, dtype), entries, ENTRY_BYTES // dtype.itemsize)


def places_of(rows: Sequence[Tensor]) -> Places | None:
    """Where these tensors lie, each contiguous; None if their dtypes differ or one is not aligned to 16 bytes.

    They need not share an allocation: addresses of a device are one space.
    """
    dtype, itemsize = rows[0].dtype, rows[0].element_size()
    if any(row.dtype is not dtype or row.data_ptr() % _ALIGNED for row in rows):
        return None
    base = min(rows, key=Tensor.data_ptr)
    offsets = [(row.data_ptr() - base.data_ptr()) // _ALIGNED for row in rows]
    return Places(base, torch.tensor(offsets, dtype=torch.int64, device=base.device), _ALIGNED // itemsize)


def view_pages(pool: Tensor, entry: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The state [shape], contiguous, in the page at an entry, a view.

    Raises:
        ValueError: the page ends behind the pool.
    """
    data, first, size = typed_pool(pool, dtype), entry * (ENTRY_BYTES // dtype.itemsize), math.prod(shape)
    if first + size > len(data):
        raise ValueError(f"The page at entry {entry}, {size * dtype.itemsize} bytes, ends behind the pool's {len(pool)} bytes.")
    return data[first : first + size].view(shape)


def sequence_rows(cu_seqlens: Tensor | None, seqs: int) -> list[tuple[int, int]]:
    """First row and the row after the last of each sequence; without cu_seqlens each has one row."""
    if cu_seqlens is None:
        return [(row, row + 1) for row in range(seqs)]
    bounds: list[int] = cu_seqlens.tolist()
    return list(pairwise(bounds))
