"""How packed experts lie in pages where a CPU computes: planes of four bits, as torch's own product of 4-bit matrices reads them. No torch.

That product takes codes of 4 bits in an arrangement of its own and computes Σ_k ((c_k - 8) s + z) x_k, scale s and zero z for each group of
columns, with x, s and z in bfloat16 and sums in float32. Codes of more bits are two planes,

    q - bias = 16 · high + low        high = floor((q - bias) / 16), from -8 to 7

the first with the scales 16 s and the codes high + 8. A page has the planes' codes, then scale and zero of each group and row of each
plane, as [groups, rows, 2]; rows are filled up to a multiple of 16, columns to whole groups. The smallest group that the product knows has
32 columns; groups of 16 are filled up to that, which only codes of one plane are small enough for.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

from rimuru_kernels.packed_weights.format import PackedFormat

_GROUPS = (256, 128, 64, 32)  # that the product knows
_ROWS = 16
_ALIGNMENT = 64


class PlaneParts(NamedTuple):
    """Where the parts of a page lie.

    Attributes:
        rows, columns: of the matrix, filled up.
        group: columns that share scale and zero; spread: only the first 16 of 32 are the matrix's.
        codes: where the codes of each plane begin; scales: likewise; num_bytes: of the page.
    """

    rows: int
    columns: int
    group: int
    spread: bool
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    num_bytes: int


def has_product() -> bool:
    """Whether this machine's processor is of the kind for which torch has a fast product of 4-bit matrices."""
    return platform.machine().lower() in ("x86_64", "amd64")


def in_planes(fmt: PackedFormat) -> bool:
    """Whether matrices of a format can be planes: multiples of scales, and groups of columns that the product knows."""
    group = fmt.group % 32 == 0 or (fmt.group == 16 and fmt.values == "int4")
    return group and fmt.values != "fp8" and fmt.group_rows == 1 and fmt.bias % 8 == 0


def plane_parts(fmt: PackedFormat, rows: int, columns: int) -> PlaneParts:
    """Where the parts of a matrix [rows, columns] lie."""
    spread = fmt.group == 16
    columns = -(-columns // 16) * 32 if spread else columns
    whole = 32 if spread else fmt.group or -(-columns // 32) * 32
    group = next(size for size in _GROUPS if whole % size == 0)
    rows, columns = -(-rows // _ROWS) * _ROWS, -(-columns // group) * group
    planes = 1 if fmt.values == "int4" else 2
    codes = tuple(plane * _aligned(rows * columns // 2) for plane in range(planes))
    end = planes * _aligned(rows * columns // 2)
    size = _aligned(columns // group * rows * 4)
    return PlaneParts(rows, columns, group, spread, codes, tuple(end + plane * size for plane in range(planes)), end + planes * size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
