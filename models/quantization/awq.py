"""AWQ with 4 bits, in the arrangement "gemm". `quant_method: awq`.

`X.qweight` I32 [K, N / 8], eight outputs in a word; nibble i, counted from the low end, is output [0, 2, 4, 6, 1, 3, 5, 7][i] of them;
`X.qzeros` I32 [groups, N / 8] likewise; `X.scales` [groups, N]. w = (q - zero) * scale. The formula is that of AutoAWQ's `packing_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.fields import Fields
from rimuru_models.quantization.gptq import group_size
from rimuru_models.quantization.nibbles import transpose_words, unpack_nibbles, write_nibbles
from rimuru_models.quantization.scheme import FLOAT_SCALES, Array, Bytes, Part, Parts, Scheme, groups_of

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Scheme):
    """Integer codes along the outputs.

    Attributes:
        group: inputs that share a scale; 0: all.
        zeros: zero points are stored; otherwise all are 8.
    """

    group: int
    zeros: bool

    @property
    def label(self) -> str:
        """What people call its codes."""
        return "int4"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Codes, scales, and zero points (some writers store them although they are all 8)."""
        words, groups = -(-rows // 8), groups_of(columns, self.group)
        return {
            "values": Part(".qweight", ("I32",), ((columns, words),)),
            "scale": Part(".scales", ("F16", "BF16", "F32"), ((groups, rows),)),
            "zeros": Part(".qzeros", ("I32",), ((groups, words),), optional=not self.zeros),
        }

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """int4."""
        zeros = "zeros" in dtypes
        return PackedFormat("int4", self.group, FLOAT_SCALES[dtypes["scale"]], "zero" if zeros else "none", 0 if zeros else 8)

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """Squares of eight inputs and eight outputs turned over."""
        begin = start // 8
        rows = transpose_words(parts.arrays["values"][:, begin : -(-stop // 8)], ORDER)
        write_nibbles(rows[start - 8 * begin : stop - 8 * begin], columns, out)

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """Turned to rows."""
        return parts.arrays["scale"][:, start:stop].T

    def offsets(self, parts: Parts, start: int, stop: int) -> Array | None:
        """Unpacked, put in order and turned to rows."""
        words = parts.arrays.get("zeros")
        if words is None:
            return None
        nibbles = unpack_nibbles(words, words.shape[1] * 8).reshape(len(words), -1, 8)
        return nibbles[:, :, np.argsort(ORDER)].reshape(len(words), -1)[:, start:stop].T


def read_awq(fields: Fields) -> tuple[Scheme, ...]:
    """The quantization_config of an AWQ checkpoint.

    Raises:
        CheckpointError: other numbers of bits or arrangements.
    """
    bits = fields.integer("bits" if fields.present("bits") else "w_bit", 1, 64, 4)
    if bits != 4:
        raise fields.error(f"AWQ with {bits} bits is not supported; 4 bits are.")
    version = fields.text("version", "gemm")
    if version.lower() != "gemm":
        raise fields.error(f"the AWQ arrangement {version[:40]!r} is not supported; 'gemm' is.")
    return (Awq(group_size(fields), fields.flag("zero_point", True)),)
