"""FP8 (e4m3) with one scale for each block of weights, as DeepSeek, Qwen and MiniMax publish it. `quant_method: fp8`.

`X.weight` F8_E4M3 [N, K] and `X.weight_scale_inv` [ceil(N / rows), ceil(K / columns)], which multiplies despite its name; its dtype is F32,
BF16 or E8M0. All experts of a layer may be one tensor: `experts.gate_up_proj` and `experts.gate_up_proj_scale_inv`.
Without `weight_block_size` one scale belongs to the whole matrix or to a row. The formula is that of transformers' `Fp8Dequantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.fields import Fields
from rimuru_models.quantization.scheme import FLOAT_SCALES, Array, Bytes, Part, Parts, Scheme, block_rows, groups_of, per_row

MAX_BLOCK = 1 << 16
_E8M0 = ("F8_E8M0", "U8")


@dataclass(frozen=True)
class Float8(Scheme):
    """e4m3 codes.

    Attributes:
        rows, columns: of a block that shares a scale; columns 0: the whole row, and with it one scale a row or a matrix.
        scale_suffix: how the scales are named.
    """

    extras: ClassVar[tuple[str, ...]] = (".input_scale", ".activation_scale")
    fused: ClassVar[bool] = True

    rows: int
    columns: int
    scale_suffix: str

    @property
    def label(self) -> str:
        """What people call its codes."""
        return "FP8"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The matrix, and its scales."""
        shapes: tuple[tuple[int, ...], ...] = ((-(-rows // self.rows), groups_of(columns, self.columns)),)
        if not self.columns:
            shapes = ((rows, 1), (rows,), (1,), (), (1, 1))
        scales = Part(self.scale_suffix, (*FLOAT_SCALES, *(_E8M0 if self.columns else ())), shapes)
        return {"weight": Part(".weight", ("F8_E4M3",), ((rows, columns),)), "scale": scales}

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """fp8, its blocks kept where they begin with the matrix."""
        scale = FLOAT_SCALES.get(dtypes["scale"], "e8m0")
        return PackedFormat("fp8", self.columns, scale, group_rows=1 if first % self.rows else self.rows)

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """As stored."""
        out[...] = parts.arrays["weight"][start:stop]

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """As stored, or repeated for each row."""
        array = parts.arrays["scale"]
        if not self.columns:
            return per_row(array, len(parts.arrays["weight"]), start, stop)
        return block_rows(array, start, stop, self.rows, fmt.group_rows)


def read_fp8(fields: Fields) -> tuple[Scheme, ...]:
    """The quantization_config of a block-wise FP8 checkpoint.

    Raises:
        CheckpointError: another kind of float, or blocks that are none.
    """
    kind = fields.text("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise fields.error(f"fmt {kind[:40]!r} is not supported; 'e4m3' is.")
    whole = (Float8(1, 0, ".weight_scale_inv"), Float8(1, 0, ".weight_scale"))
    block = fields.list_of("weight_block_size", int, 2)
    if block is None:
        # what transformers assumes where nothing is said; null says that there are no blocks
        return whole if "weight_block_size" in fields.values else (Float8(128, 128, ".weight_scale_inv"), *whole)
    if len(block) != 2 or not all(0 < size <= MAX_BLOCK for size in block):
        raise fields.error(f"weight_block_size must be two sizes from 1 to {MAX_BLOCK}.")
    return (Float8(block[0], block[1], ".weight_scale_inv"),)
