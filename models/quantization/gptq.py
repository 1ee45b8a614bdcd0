"""GPTQ with 4 or 8 bits, without act-order. `quant_method: gptq`.

`X.qweight` I32 [K / p, N], p = 32 / bits consecutive inputs in a word, lowest bits first; `X.scales` [groups, N]; `X.qzeros` I32
[groups, N / p] likewise along the outputs; `X.g_idx` I32 [K], the group of each input. w = (q - zero) * scale. `checkpoint_format` gptq
stores zero - 1 (modulo 2^bits), gptq_v2 zero itself. The formula is that of AutoGPTQ's torch kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.fields import Fields
from rimuru_models.quantization.nibbles import unpack_nibbles, write_nibbles
from rimuru_models.quantization.scheme import FLOAT_SCALES, Array, Bytes, Part, Parts, Scheme, groups_of, input_groups

MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class Gptq(Scheme):
    """Integer codes along the inputs.

    Attributes:
        bits: 4 or 8.
        group: inputs that share a scale; 0: all.
        stored_less_one: zero points are stored less one (version 1).
    """

    bits: Literal[4, 8]
    group: int
    stored_less_one: bool

    @property
    def label(self) -> str:
        """What people call its codes."""
        return f"int{self.bits}"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Codes, scales, zero points, and the group of each input."""
        word, groups = 32 // self.bits, groups_of(columns, self.group)
        return {
            "values": Part(".qweight", ("I32",), ((-(-columns // word), rows),)),
            "scale": Part(".scales", ("F16", "BF16", "F32"), ((groups, rows),)),
            "zeros": Part(".qzeros", ("I32",), ((groups, -(-rows // word)),)),
            "order": Part(".g_idx", ("I32",), ((columns,),), optional=True),
        }

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """Codes with zero points, which even symmetric checkpoints may choose freely."""
        return PackedFormat("int4" if self.bits == 4 else "int8", self.group, FLOAT_SCALES[dtypes["scale"]], "zero")

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """Words turned from [inputs, outputs] to rows; 8-bit codes become signed."""
        words = np.ascontiguousarray(parts.arrays["values"][:, start:stop].T)
        if self.bits == 4:
            write_nibbles(words.view(np.uint8), columns, out)
        else:
            np.bitwise_xor(words.view(np.uint8)[:, :columns], 128, out=out)

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """Turned to rows."""
        return parts.arrays["scale"][:, start:stop].T

    def offsets(self, parts: Parts, start: int, stop: int) -> Array | None:
        """Unpacked and turned to rows."""
        words, count = parts.arrays["zeros"], parts.arrays["scale"].shape[1]
        if self.bits == 4:
            zeros = unpack_nibbles(words, count)[:, start:stop].T
            return (zeros + self.stored_less_one & 15).astype(np.uint8)
        zeros = np.ascontiguousarray(words).view(np.uint8)[:, start:stop].T
        return ((zeros + np.uint8(self.stored_less_one)) ^ 128).view(np.int8)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        """Inputs must lie in the order of their groups."""
        order = parts.arrays.get("order")
        if order is not None and not np.array_equal(order, input_groups(columns, self.group)):
            raise parts.error(
                "was quantised with act-order: its inputs do not lie in the order of their groups (g_idx), which is not supported.",
                hint="Supported: GPTQ with 4 and 8 bits whose inputs lie in order (desc_act false). Get such a version of this model.",
            )


def read_gptq(fields: Fields) -> tuple[Scheme, ...]:
    """The quantization_config of a GPTQ checkpoint.

    Raises:
        CheckpointError: other numbers of bits, overrides by module, an unknown arrangement.
    """
    bits = fields.integer("bits", 1, 64)
    if bits not in (4, 8):
        raise fields.error(f"GPTQ with {bits} bits is not supported; 4 and 8 bits are.")
    arrangement = fields.text("checkpoint_format", "gptq")
    if arrangement not in ("gptq", "gptq_v2"):
        raise fields.error(f"checkpoint_format {arrangement[:40]!r} is not supported; 'gptq' and 'gptq_v2' are.")
    for pattern in fields.mapping("dynamic"):
        if not pattern.startswith("-:"):
            raise fields.error(
                f"dynamic gives other settings for {pattern[:80]!r}; only modules that stay unquantised ('-:') are supported."
            )
    fields.flag("sym", True)
    fields.flag("desc_act", False)
    return (Gptq(bits, group_size(fields), arrangement == "gptq"),)


def group_size(fields: Fields, default: int = 128) -> int:
    """`group_size` (or `q_group_size`): from 1, or -1 for the whole row, which is returned as 0."""
    name = "group_size" if fields.present("group_size") else "q_group_size"
    size = fields.integer(name, -1, MAX_GROUP, default)
    if size == 0:
        raise fields.error("group_size is 0; expected a size, or -1 for whole rows.")
    return 0 if size == -1 else int(size)
