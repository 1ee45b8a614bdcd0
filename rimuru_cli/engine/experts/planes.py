"""How 4-bit experts lie in pages where a CPU computes: as torch's own product of 4-bit matrices reads them. No torch.

That product takes codes of 4 bits in an arrangement of its own and computes Σ_k ((c_k - 8) s + z) x_k, scale s and zero z for each group of
columns, with x, s and z in bfloat16 and sums in float32. A page has the codes, then scale and zero of each group and row, as
[groups, rows, 2]; rows are filled up to a multiple of 16, columns to whole blocks of 64 and whole groups. The smallest group that the
product knows has 32 columns; groups of 16 are filled up to that.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

from rimuru_kernels.packed_weights.format import BLOCK, PackedFormat

_GROUPS = (256, 128, 64, 32)  # that the product knows
_ROWS = 16
_ALIGNMENT = 64


class PlaneParts(NamedTuple):
    """Where the parts of a page lie.

    Attributes:
        rows, columns: of the matrix, filled up.
        group: columns that share scale and zero; spread: only the first 16 of 32 are the matrix's.
        scales: where they begin, behind the codes; num_bytes: of the page.
    """

    rows: int
    columns: int
    group: int
    spread: bool
    scales: int
    num_bytes: int


def has_product() -> bool:
    """Whether torch has a fast product of 4-bit matrices for this machine: its compiler for Windows leaves that out."""
    return platform.machine().lower() in ("x86_64", "amd64") and platform.system() != "Windows"


def in_planes(fmt: PackedFormat) -> bool:
    """Whether matrices of a format can lie so: 4-bit multiples of scales, and groups of columns that the product knows."""
    return fmt.values == "int4" and (fmt.group % 32 == 0 or fmt.group == 16) and fmt.group_rows == 1


def plane_parts(fmt: PackedFormat, rows: int, columns: int) -> PlaneParts:
    """Where the parts of a matrix [rows, columns] lie."""
    spread = fmt.group == 16
    columns = -(-columns // 16) * 32 if spread else columns
    whole = 32 if spread else fmt.group or BLOCK
    group = next(size for size in _GROUPS if whole % size == 0)
    step = max(group, BLOCK)
    rows, columns = -(-rows // _ROWS) * _ROWS, -(-columns // step) * step
    scales = -(-rows * columns // 2 // _ALIGNMENT) * _ALIGNMENT
    end = scales + columns // group * rows * 4
    return PlaneParts(rows, columns, group, spread, scales, -(-end // _ALIGNMENT) * _ALIGNMENT)
