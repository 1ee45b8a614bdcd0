"""Matrices as planes of four bits (see `planes.py`): writing them, and multiplying with them by torch's own product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_cli.engine.experts.planes import PlaneParts, plane_parts
from rimuru_kernels.packed_weights import Codes, PackedFormat
from rimuru_kernels.packed_weights.format import SUPER_GROUP
from rimuru_kernels.packed_weights.reference import FP4_VALUES

_convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
_multiply = torch.ops.aten._weight_int4pack_mm_for_cpu


_FP4_HALVES = torch.tensor([int(2 * value) for value in FP4_VALUES], dtype=torch.int32)
"""What the codes of fp4 stand for, in halves."""


class PlaneTile:
    """How one kind of tile is written and multiplied.

    Args:
        fmt: of the codes; `in_planes` holds for it.
        rows, columns: of a tile.
    """

    def __init__(self, fmt: PackedFormat, rows: int, columns: int) -> None:
        self.fmt, self.rows, self.columns = fmt, rows, columns
        self.parts: PlaneParts = plane_parts(fmt, rows, columns)
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def write(self, codes: Codes, page: Tensor) -> None:
        """Write a matrix into a page, uint8 of at least `parts.num_bytes`."""
        fmt = self.fmt
        scale, added = group_terms(codes, fmt)
        values, bias = codes.values.int(), fmt.bias // 16 * 16
        if fmt.values == "fp4":
            values, scale = _FP4_HALVES[values], scale / 2
        scale = scale.bfloat16().float()  # one rounding for both planes, so that they fit together
        # Codes are taken less 8: what a bias takes off already need not be given back.
        added = added + scale * (8 + bias - fmt.bias)
        if len(self.parts.codes) == 1:
            planes, pairs = [values], [(scale, added)]
        else:
            values = values - bias
            planes, pairs = [(values >> 4) + 8, values & 15], [(16 * scale, torch.zeros_like(scale)), (scale, added)]
        for plane, pair, (stored, scales) in zip(planes, pairs, self._at(page), strict=True):
            stored.copy_(_convert(self._whole(plane), 1))
            if scales.shape[1] > self.rows:
                scales.zero_()
            scales[:, : self.rows] = torch.stack(pair, 2).transpose(0, 1).repeat_interleave(self._repeats(), 0)[: len(scales)]

    def _whole(self, plane: Tensor) -> Tensor:
        """Codes [rows, columns], filled up with zeros."""
        plane = self._spread(plane)
        more = self.parts.columns - plane.shape[1], self.parts.rows - self.rows
        return torch.nn.functional.pad(plane, (0, more[0], 0, more[1])) if any(more) else plane

    def ordered(self, x: Tensor) -> Tensor:
        """x [m, columns] as `product` takes it: bfloat16, filled up."""
        x = self._spread(x)
        if self.parts.columns > x.shape[1]:
            x = torch.nn.functional.pad(x, (0, self.parts.columns - x.shape[1]))
        return x.bfloat16()

    def _spread(self, rows: Tensor) -> Tensor:
        """Rows [m, columns] with every group of 16 columns filled up to 32 by zeros, where groups are spread."""
        if not self.parts.spread:
            return rows
        if self.columns % 16:
            rows = torch.nn.functional.pad(rows, (0, -self.columns % 16))
        return torch.nn.functional.pad(rows.view(len(rows), -1, 16), (0, 16)).view(len(rows), -1)

    def product(self, page: Tensor, x: Tensor) -> Tensor:
        """x [m, columns], `ordered` -> float32 [m, rows], products with the matrix in a page."""
        return self.products([page], [x])

    def products(self, pages: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Products of some matrices, each with its own x [m, columns], `ordered`: float32 [sum of m, rows], one below the other."""
        group, parts = self.parts.group, []
        for plane in range(len(self.parts.codes)):
            made = []
            for page, x in zip(pages, rows, strict=True):
                views = self._views.get(page.data_ptr())
                if views is None:
                    views = self._views[page.data_ptr()] = self._at(page)
                codes, scales = views[plane]
                made.append(_multiply(x, codes, group, scales))
            parts.append(made[0] if len(made) == 1 else torch.cat(made))
        out = parts[0].float()
        if len(parts) > 1:
            out += parts[1]
        return out if self.parts.rows == self.rows else out[:, : self.rows]

    def _repeats(self) -> int:
        """Groups of the product that one group of the format is; where a row is one group, all of them."""
        return 1 if self.parts.spread else (self.fmt.group or self.parts.columns) // self.parts.group

    def _at(self, page: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Codes uint8 [rows, columns / 2], and scales and zeros bfloat16 [groups, rows, 2] of each plane."""
        parts = self.parts
        groups, size = parts.columns // parts.group, parts.rows * parts.columns // 2
        return [
            (
                page[codes : codes + size].view(parts.rows, parts.columns // 2),
                page[scales : scales + groups * parts.rows * 4].view(torch.bfloat16).view(groups, parts.rows, 2),
            )
            for codes, scales in zip(parts.codes, parts.scales, strict=True)
        ]


def group_terms(codes: Codes, fmt: PackedFormat) -> tuple[Tensor, Tensor]:
    """Scale and what is added, w = scale · (q - bias) + added, float32 [rows, groups] each; of formats whose rows have their own scales."""
    per = SUPER_GROUP // fmt.group if fmt.two_levels else 1

    def two_levels(lower: Tensor, upper: Tensor) -> Tensor:
        return upper.float().repeat_interleave(per, 1)[:, : lower.shape[1]] * lower

    if fmt.scale == "e8m0":
        scale = torch.exp2(codes.scales.float() - 127)
    elif fmt.scale == "e4m3":
        scale = codes.scales.view(torch.float8_e4m3fn).float()
    else:
        scale = codes.scales.float() if codes.super_scales is None else two_levels(codes.scales, codes.super_scales)
    added = torch.zeros_like(scale)
    if codes.offsets is not None and fmt.offset == "u8*f16":
        assert codes.super_offsets is not None
        added = -two_levels(codes.offsets, codes.super_offsets)
    elif codes.offsets is not None:
        added = codes.offsets.float() if fmt.offset == "min" else -scale * codes.offsets
    return (scale, added) if codes.factor is None else (scale * codes.factor, added * codes.factor)


def products(kind: PlaneTile, pages: Sequence[Tensor], x: Tensor) -> Tensor:
    """Products of n matrices, one row each: x [1, columns], for all, or [n, columns] -> float32 [n, rows]."""
    ordered = kind.ordered(x)
    return kind.products(pages, [ordered] * len(pages) if len(ordered) == 1 else torch.split(ordered, 1))
