"""Rows of several sequences in one tensor, one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


def check_rows(name: str, rows: Tensor, cu_seqlens: Sequence[int], num_sequences: int) -> None:
    """Whether cu_seqlens cuts the rows of a tensor into so many sequences.

    Raises:
        ValueError: it does not; `name` is the op's.
    """
    if len(cu_seqlens) != num_sequences + 1 or cu_seqlens[0] != 0 or any(stop < start for start, stop in pairwise(cu_seqlens)):
        raise ValueError(f"{name}: cu_seqlens {list(cu_seqlens)} does not name the rows of {num_sequences} sequences")
    if rows.ndim < 1 or cu_seqlens[-1] != rows.shape[0]:
        raise ValueError(f"{name}: cu_seqlens ends at {cu_seqlens[-1]}, the tensor {list(rows.shape)} has other rows")
