"""Copies of one expert's bytes into its pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES
from rimuru_cli.engine.memory.page_pool import PagePool

WASTED = 8
"""Pages that follow each other are one copy unless more than this part of one is empty."""


def copy_expert(pool: PagePool, pages: Sequence[int], content: Tensor, sizes: Sequence[int]) -> int:
    """Queue the copy of one expert: what its pages hold, and the little that is empty between pages that follow each other.

    Args:
        pages: its pages, perhaps with others behind them.
        content: uint8, its pages' bytes; in page-locked memory where they are to be copied beside computing.
        sizes: bytes that each of its pages holds.

    Returns:
        Bytes that are copied.
    """
    page_bytes = content.numel() // len(sizes)
    first = copied = 0
    for tile, size in enumerate(sizes):
        ends = tile + 1 == len(sizes) or not contiguous(pages[tile : tile + 2], page_bytes)
        if ends or (page_bytes - size) * WASTED > page_bytes:
            start, end = first * page_bytes, tile * page_bytes + size
            pool.bytes_of(pages[first], end - start).copy_(content[start:end], non_blocking=True)
            first, copied = tile + 1, copied + end - start
    return copied


def contiguous(pages: Sequence[int], page_bytes: int) -> bool:
    """Whether pages follow each other without gaps."""
    return page_bytes % ENTRY_BYTES == 0 and all(b - a == page_bytes // ENTRY_BYTES for a, b in pairwise(pages))
