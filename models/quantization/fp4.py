"""FP4 (e2m1) with a scale for each 16 or 32 inputs: NVFP4 and MXFP4, as compressed-tensors, NVIDIA's modelopt and gpt-oss store them.

compressed-tensors  `X.weight_packed` U8 [N, K / 2]; NVFP4: `X.weight_scale` F8_E4M3 [N, K / 16] and `X.weight_global_scale` F32, which
                    divides; MXFP4: `X.weight_scale` U8 [N, K / 32], powers of two
modelopt            `X.weight` U8 [N, K / 2], `X.weight_scale` F8_E4M3 [N, K / 16], `X.weight_scale_2` F32, which multiplies
gpt-oss             all experts of a layer: `experts.gate_up_proj_blocks` U8 [E, 2f, K / 32, 16] and `_scales` U8 [E, 2f, K / 32]
The even input of two lies in the low half of a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rimuru_kernels.packed_weights.format import PackedFormat
from rimuru_models.fields import Fields
from rimuru_models.quantization.nibbles import write_nibbles
from rimuru_models.quantization.scheme import Array, Bytes, Part, Parts, Scheme

# The 256 values of e4m3 as float32: sign, four bits of exponent (bias 7), three of mantissa; 0x7f is not a number.
_MAGNITUDES = [(m / 8) * 2.0**-6 if not e else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
_MAGNITUDES[127] = float("nan")
E4M3 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


@dataclass(frozen=True)
class Nvfp4(Scheme):
    """Groups of 16 with an e4m3 scale, and one float32 for the matrix.

    Attributes:
        maker: whose names the parts have.
    """

    extras: ClassVar[tuple[str, ...]] = (".input_scale", ".input_global_scale", ".input_quantizer._amax", ".weight_quantizer._amax")

    maker: Literal["compressed-tensors", "modelopt"]

    @property
    def label(self) -> str:
        """What people call its codes."""
        return "NVFP4"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Codes, scales, the scale of the matrix."""
        ours = self.maker == "compressed-tensors"
        return {
            "values": Part(".weight_packed" if ours else ".weight", ("U8",), ((rows, -(-columns // 2)),)),
            "scale": Part(".weight_scale", ("F8_E4M3",), ((rows, -(-columns // 16)),)),
            "factor": Part(".weight_global_scale" if ours else ".weight_scale_2", ("F32",), ((1,), (), (1, 1))),
        }

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """fp4."""
        return PackedFormat("fp4", 16, "e4m3", factor=True)

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """Rearranged."""
        write_nibbles(parts.arrays["values"][start:stop], columns, out)

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """As stored."""
        return parts.arrays["scale"][start:stop]

    def factor(self, parts: Parts) -> float | None:
        """The scale of the matrix, as something that multiplies."""
        stored = parts.arrays["factor"].reshape(())
        with np.errstate(over="ignore"):
            return float(stored if self.maker == "modelopt" else np.float32(1) / stored)

    def exact_scales(self, parts: Parts, start: int, stop: int) -> NDArray[np.float32] | None:
        """compressed-tensors divides each scale by the matrix's, modelopt multiplies."""
        scales: NDArray[np.float32] = E4M3[parts.arrays["scale"][start:stop]]
        stored = parts.arrays["factor"].reshape(())
        with np.errstate(all="ignore"):  # what is too large, or no number, stays so
            return (scales * stored if self.maker == "modelopt" else scales / stored).astype(np.float32)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        """A scale that divides must not be zero."""
        stored = parts.arrays["factor"].reshape(())
        if not np.isfinite(stored) or (self.maker == "compressed-tensors" and stored == 0):
            raise parts.error(f"has the global scale {float(stored)}, with which it means nothing.")


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """Groups of 32 with a power of two; `blocks`: as gpt-oss names the parts, else as compressed-tensors does."""

    extras: ClassVar[tuple[str, ...]] = (".input_scale", ".input_global_scale")
    fused: ClassVar[bool] = True

    blocks: bool

    @property
    def label(self) -> str:
        """What people call its codes."""
        return "MXFP4"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Codes and scales."""
        groups = -(-columns // 32)
        if self.blocks:
            return {
                "values": Part("_blocks", ("U8",), ((rows, groups, 16),)),
                "scale": Part("_scales", ("U8", "F8_E8M0"), ((rows, groups),)),
            }
        return {
            "values": Part(".weight_packed", ("U8",), ((rows, -(-columns // 2)),)),
            "scale": Part(".weight_scale", ("U8", "F8_E8M0"), ((rows, groups),)),
        }

    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """fp4."""
        return PackedFormat("fp4", 32, "e8m0")

    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """Rearranged."""
        write_nibbles(parts.arrays["values"][start:stop].reshape(stop - start, -1), columns, out)

    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """As stored."""
        return parts.arrays["scale"][start:stop]


def read_mxfp4(fields: Fields) -> tuple[Scheme, ...]:
    """The quantization_config of a gpt-oss style checkpoint: it has nothing to choose."""
    return (Mxfp4(blocks=True),)
