"""Integers as compressed-tensors stores them: 4 and 8 bits in words (`pack-quantized`), 8 bits plainly (`int-quantized`).

Packed: `X.weight_packed` I32 [N, ceil(K * bits / 32)], lowest bits first, codes plus 2^(bits - 1); `X.weight_scale` [N, groups];
`X.weight_shape` holds N and K; `X.weight_zero_point` I32 [ceil(N * bits / 32), groups], packed along the outputs.
Plain: `X.weight` I8 [N, K], `X.weight_scale`, `X.weight_zero_point` I8 like the scales. w = (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.quantization.nibbles import unpack_nibbles, write_nibbles
from rimuru_models.quantization.scheme import FLOAT_SCALES, Array, Bytes, Part, Parts, Scheme, Shape, groups_of, input_groups, per_row

_FLOATS = tuple(FLOAT_SCALES)
_EXTRAS = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")


def scale_shapes(rows: int, columns: int, group: int) -> tuple[Shape, ...]:
    """Shapes of scales: one a group; where a group is the whole row, one a row or one for all."""
    return ((rows, groups_of(columns, group)),) if group else ((rows, 1), (rows,), (1,), (), (1, 1))


@dataclass(frozen=True)
class PackedInts(Scheme):
    """Codes packed into words of 32 bits.

    Attributes:
        bits: 4 or 8.
        group: inputs that share a scale; 0: the whole row.
        symmetric: there are no zero points.
    """

    extras: ClassVar[tuple[str, ...]] = _EXTRAS

    bits: Literal[4, 8]
    group: int
    symmetric: bool

    @property
    def label(self) -> str:
        """What people call its codes."""
        return f"int{self.bits}"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Codes, scales, the shape, zero points, and the group of each input."""
        scales = scale_shapes(rows, columns, self.group)
        parts = {
            "values": Part(".weight_packed", ("I32",), ((rows, -(-columns * self.bits // 32)),)),
            "scale": Part(".weight_scale", _FLOATS, scales),
            "shape": Part(".weight_shape", ("I64", "I32"), ((2,),), optional=True),
            "order": Part(".weight_g_idx", ("I32",), ((columns,),), optional=True),
        }
        if not self.symmetric:
            packed = (-(-rows * self.bits // 32), groups_of(columns, self.group))
            parts["zeros"] = Part(".weight_zero_point", ("I32",), (packed,))
        return parts

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """int4 without sign, int8 with."""
        scale = FLOAT_SCALES[dtypes["scale"]]
        offset: Literal["none", "zero"] = "none" if self.symmetric else "zero"
        if self.bits == 8:
            return PackedFormat("int8", self.group, scale, offset)
        return PackedFormat("int4", self.group, scale, offset, bias=8 if self.symmetric else 0)

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """Codes and zero points are stored with the same amount added, which cancels out."""
        raw = parts.arrays["values"][start:stop].view(np.uint8)
        if self.bits == 4:
            write_nibbles(raw, columns, out)
        else:
            np.bitwise_xor(raw[:, :columns], 128, out=out)

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """As stored."""
        array = parts.arrays["scale"]
        return array[start:stop] if self.group else per_row(array, len(parts.arrays["values"]), start, stop)

    def offsets(self, parts: Parts, start: int, stop: int) -> Array | None:
        """Unpacked."""
        if self.symmetric:
            return None
        words = np.ascontiguousarray(parts.arrays["zeros"].T)
        if self.bits == 4:
            return unpack_nibbles(words, stop)[:, start:].T
        return (words.view(np.uint8)[:, start:stop].T ^ 128).view(np.int8)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        """The stored shape must be the one of the config, and inputs lie in the order of their groups."""
        shape, order = parts.arrays.get("shape"), parts.arrays.get("order")
        if shape is not None and shape.tolist() != [rows, columns]:
            raise parts.error(f"says that its shape is {shape.tolist()}, but config.json makes it {[rows, columns]}.")
        if order is not None and not np.array_equal(order, input_groups(columns, self.group)):
            raise parts.error(
                "was quantised with act-order: its inputs do not lie in the order of their groups (weight_g_idx), which is not supported.",
                hint="Supported: compressed-tensors with actorder null, 'weight' or 'static'. Get such a version of this model.",
            )


@dataclass(frozen=True)
class PlainInts(Scheme):
    """Codes of 8 bits, one a byte.

    Attributes:
        group, symmetric: as of `PackedInts`.
    """

    extras: ClassVar[tuple[str, ...]] = _EXTRAS

    group: int
    symmetric: bool

    @property
    def label(self) -> str:
        """What people call its codes."""
        return "int8"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Codes, scales, zero points."""
        scales = scale_shapes(rows, columns, self.group)
        zeros = Part(".weight_zero_point", ("I8",), scales, optional=self.symmetric)
        return {
            "values": Part(".weight", ("I8",), ((rows, columns),)),
            "scale": Part(".weight_scale", _FLOATS, scales),
            "zeros": zeros,
        }

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """int8."""
        return PackedFormat("int8", self.group, FLOAT_SCALES[dtypes["scale"]], "zero" if "zeros" in dtypes else "none")

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """As stored."""
        out[...] = parts.arrays["values"][start:stop].view(np.uint8)

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """As stored."""
        return self._of_rows(parts, "scale", start, stop)

    def offsets(self, parts: Parts, start: int, stop: int) -> Array | None:
        """As stored."""
        return self._of_rows(parts, "zeros", start, stop) if "zeros" in parts.arrays else None

    def _of_rows(self, parts: Parts, role: str, start: int, stop: int) -> Array:
        array = parts.arrays[role]
        return array[start:stop] if self.group else per_row(array, len(parts.arrays["values"]), start, stop)
