"""What every format of quantised weights says of itself: the parts of one matrix, and how they become a page. No torch: plain arrays.

A checkpoint's matrix [N, K] (N outputs, K inputs) is kept as several tensors, its *parts*. A `Scheme` names them, says what their headers
must be, and writes rows of the matrix in the arrangement of `rimuru_kernels.packed_weights`. Values are moved, never rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rimuru_kernels.packed_weights.format import PackedFormat, Scale
from rimuru_models.errors import CheckpointError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]

# How each safetensors dtype is held: numbers that numpy does not know, as their bits.
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
DAMAGED = "The file is damaged, or was made so: download it again, or get another version of this model."
FLOAT_SCALES: dict[str, Scale] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
"""Dtypes of plain scales, and what a page calls them."""
_EXPONENTS = {"f32": np.uint32(0x7F800000), "f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}  # all set: infinite, or no number


class Part(NamedTuple):
    """What the header of one part must say.

    suffix: follows the matrix's name. dtypes, shapes: any of them will do. optional: it may be missing.
    """

    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


class Parts(NamedTuple):
    """The parts of one matrix as they lie in the files.

    arrays: role -> array (see `ARRAY_DTYPES`). dtypes: role -> safetensors name. where: names the matrix in errors.
    """

    arrays: Mapping[str, Array]
    dtypes: Mapping[str, str]
    where: str

    def error(self, what: str, hint: str | None = None) -> CheckpointError:
        """An error to raise, with the matrix named in front."""
        return CheckpointError(f"{self.where} {what}", hint=hint)


@dataclass(frozen=True)
class Scheme(ABC):
    """One way to keep a matrix. Subclasses are frozen dataclasses of the numbers that a quantization_config gives.

    Attributes:
        extras: suffixes of tensors that may lie beside the parts and are not needed (scales of activations, say).
        fused: whether all experts of a layer may be one tensor [E, N, K]; names then lack `.weight`, or keep it.
    """

    extras: ClassVar[tuple[str, ...]] = ()
    fused: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """What people call its codes: "int4", "FP8"."""

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Role -> part, of a matrix [rows, columns]. The first is the one that shows that a matrix is kept in this way."""

    @abstractmethod
    def packed(self, rows: int, columns: int, dtypes: Mapping[str, str], first: int = 0) -> PackedFormat:
        """What such a matrix is in a page.

        Args:
            rows, columns: of the matrix.
            dtypes: role -> dtype of the parts that are there.
            first: row of the stored tensor at which it begins (up, where gate and up are stored as one).
        """

    @abstractmethod
    def write_values(self, parts: Parts, start: int, stop: int, columns: int, out: Bytes) -> None:
        """Write rows start .. stop - 1 of a matrix of `columns` into `out`, uint8 [stop - start, row bytes of a page], all of it."""

    @abstractmethod
    def scales(self, parts: Parts, start: int, stop: int, fmt: PackedFormat) -> Array:
        """Scales of these rows, [ceil(rows / group_rows), groups], in the dtype of the page (bits where numpy has none)."""

    def offsets(self, parts: Parts, start: int, stop: int) -> Array | None:
        """Zero points of these rows, [rows, groups], uint8 (int8 for 8-bit codes); None where there are none."""
        return None

    def factor(self, parts: Parts) -> float | None:
        """What multiplies the whole matrix, if anything does."""
        return None

    def exact_scales(self, parts: Parts, start: int, stop: int) -> NDArray[np.float32] | None:
        """float32 scales [rows, groups] that already contain the factor, rounded as the format's own library rounds; None: no factor."""
        return None

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        """Check what only the data can tell, before a matrix is used for the first time.

        Raises:
            CheckpointError: the parts do not mean what they are read as.
        """
        return None


def all_finite(scales: Array, kind: Scale) -> bool:
    """Whether all scales, as a page holds them (bits where numpy has no such numbers), are finite numbers."""
    match kind:
        case "e8m0":
            return not bool((scales == 0xFF).any())
        case "e4m3":
            return not bool(((scales & 0x7F) == 0x7F).any())
        case _:
            bits = scales.view(f"<u{scales.dtype.itemsize}")
            largest = _EXPONENTS[kind]
            return not bool(((bits & largest) == largest).any())


def groups_of(columns: int, group: int) -> int:
    """Groups along a row; group 0 is the whole row."""
    return -(-columns // group) if group else 1


@cache
def input_groups(columns: int, group: int) -> NDArray[np.int32]:
    """The group of each input where inputs lie in the order of their groups: what a g_idx must be to be supported."""
    return (np.arange(columns) // (group or columns)).astype(np.int32)


def block_rows(array: Array, start: int, stop: int, block: int, kept: int) -> Array:
    """Rows of scales that belong to rows start .. stop - 1 of a matrix, of which `block` share one.

    Args:
        kept: rows that share a row of the result: `block`, or 1 where a block does not begin at `start`.
    """
    if kept == block:
        assert start % block == 0, "tiles of a matrix end between blocks"
        return array[start // block : -(-stop // block)]
    return array[np.arange(start, stop) // block]


def per_row(array: Array, rows: int, start: int, stop: int) -> Array:
    """A scale of the whole matrix, or one for each of its rows, as [stop - start, 1]."""
    if array.size == 1:
        return np.broadcast_to(array.reshape(1, 1), (stop - start, 1))
    return array.reshape(rows, -1)[start:stop]
