"""Quantised blocks of GGUF: into the arrangement of pages (`rimuru_kernels.packed_weights`), nothing rounded, and as float32.

How the blocks of each type lie in a file (little endian; d and m are float16; "nibbles" of 16 bytes: the low four bits of byte j are
weight j, the high ones weight 16 + j):

    Q4_0    d, nibbles                        w = d (q - 8)
    Q4_1    d, m, nibbles                     w = d q + m
    Q5_0    d, 32 fifth bits, nibbles         w = d (q - 16)
    Q5_1    d, m, 32 fifth bits, nibbles      w = d q + m
    Q8_0    d, 32 int8                        w = d q
    MXFP4   exponent, nibbles of e2m1         w = 2^(exponent - 127) q
    Q4_K    d, dmin, 8 six-bit scales and minima in 12 bytes, four times 32 bytes whose low halves are 32 weights and whose high ones are
            the next 32                       w = d scale q - dmin minimum
    Q5_K    as Q4_K, with 32 bytes before the values: bit i of byte j is the fifth bit of weight 32 i + j
    Q6_K    two times 64 bytes whose low halves are 64 weights and whose high ones are the next; for each of the two 32 bytes: bits 2p and
            2p + 1 of byte j are the highest of weight 32 p + j; 16 int8 scales; d        w = d scale (q - 32)

A page takes 64 weights at a time: byte j of 32 has weights j and 32 + j. All of it is done on eight bytes at once, in 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, PageParts, dequantize, page_parts, unpack
from rimuru_kernels.packed_weights.format import Part
from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.kinds import BY_NAME, FLOATS, PACKED

Array = npt.NDArray[Any]

_LOW, _HIGH, _ONES, _TWOS = (np.uint64(byte * 0x0101010101010101) for byte in (0x0F, 0xF0, 0x01, 0x03))
# (shift, mask) of each step that exchanges the off-diagonal quarters of 2 x 2, 4 x 4 and 8 x 8 bits
_TRANSPOSITION = tuple(
    (np.uint64(s), np.uint64(m)) for s, m in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
)
_FIRST_OF_NIBBLES, _REST_OF_NIBBLES = np.uint64(0x1111111111111111), np.uint64(0x7777777777777777)
_NOT_A_NUMBER = 255  # among exponents
_CHUNK_WEIGHTS, _CHUNK_BYTES = 1 << 18, 1 << 18  # worked on at a time, so that all stays in the processor's caches


class _Page:
    """Some rows of the parts of a page, as arrays to write to."""

    def __init__(self, page: Array, parts: PageParts, rows: slice) -> None:
        self._page = page
        self._rows = rows
        self.parts = parts

    def part(self, part: Part, dtype: str) -> Array:
        """These rows of one part: [rows, elements of a row]."""
        whole = self._page[part.start : part.start + part.rows * part.row_bytes].view(dtype)
        return whole.reshape(part.rows, -1)[self._rows]


def _even(blocks: Array) -> Array:
    """Blocks of 32 weights [N, B], contiguous, with a block of zeros after an odd number: a page takes two at a time."""
    if not blocks.shape[1] % 2:
        return np.ascontiguousarray(blocks)
    return np.concatenate((blocks, np.zeros_like(blocks[:, :1])), axis=1)


def _write_nibbles(nibbles: Array, page: _Page) -> None:
    """16 bytes a block, [N, even number of blocks]. They are moved as complex numbers, which are 16 bytes that numpy copies at once."""
    first, second = (np.ascontiguousarray(nibbles[:, start::2]).view("<u8") for start in (0, 1))
    out = page.part(page.parts.values, "<c16")
    out[:, ::2] = (first & _LOW | (second & _LOW) << 4).view("<c16")
    out[:, 1::2] = (first >> 4 & _LOW | second & _HIGH).view("<c16")


def _write_scales(blocks: Array, page: _Page) -> None:
    page.part(page.parts.scales, "<u2")[:] = blocks["d"]
    if page.parts.offsets.rows:
        page.part(page.parts.offsets, "<u2")[:] = blocks["m"]


def _write_four_bits(blocks: Array, page: _Page) -> None:
    _write_scales(blocks, page)
    _write_nibbles(_even(blocks["q"]), page)


def _write_five_bits(blocks: Array, page: _Page) -> None:
    """Bit r of byte t in a page is bit t of byte r of the fifth bits of two blocks: a transposition of 8 x 8 bits, in three steps."""
    _write_four_bits(blocks, page)
    bits = _even(blocks["h"]).view("<u8")
    for shift, mask in _TRANSPOSITION:
        moved = (bits ^ bits >> shift) & mask
        bits = bits ^ moved ^ moved << shift
    page.part(page.parts.high, "<u8")[:] = bits


def _write_eight_bits(blocks: Array, page: _Page) -> None:
    _write_scales(blocks, page)
    page.part(page.parts.values, "V32")[:] = blocks["q"]


def _write_mxfp4(blocks: Array, page: _Page) -> None:
    if (blocks["e"] == _NOT_A_NUMBER).any():
        raise CheckpointError("a block of MXFP4 has a scale that is not a number.", hint="The file is damaged: download it again.")
    page.part(page.parts.scales, "u1")[:] = blocks["e"]
    codes = np.ascontiguousarray(blocks["q"]).view("<u8")
    # e2m1 has two zeros, which mean the same; ggml makes the first of both. So the sign of a code whose other bits are zero is cleared.
    some = (codes | codes >> 1 | codes >> 2) & _FIRST_OF_NIBBLES
    codes &= some << 3 | _REST_OF_NIBBLES
    _write_nibbles(_even(codes.view("<c16")), page)


def _write_k_scales(blocks: Array, page: _Page) -> None:
    """Six bits of 8 scales and 8 minima: bytes 0 to 3 and 4 to 7 have the first four of each, and the highest two bits of the others."""
    page.part(page.parts.super_scales, "<u2")[:] = blocks["d"]
    page.part(page.parts.super_offsets, "<u2")[:] = blocks["m"]
    scales, minima, rest = (np.ascontiguousarray(blocks["s"][:, :, word]) for word in range(3))
    for part, first, second in (
        (page.parts.scales, scales, rest & 0x0F0F0F0F),
        (page.parts.offsets, minima, rest >> 4 & 0x0F0F0F0F),
    ):
        out = page.part(part, "<u4")
        out[:, ::2] = first & 0x3F3F3F3F
        out[:, 1::2] = second | first >> 2 & 0x30303030


def _write_q4_k(blocks: Array, page: _Page) -> None:
    _write_k_scales(blocks, page)
    page.part(page.parts.values, "V128")[:] = blocks["q"]


def _write_q5_k(blocks: Array, page: _Page) -> None:
    _write_q4_k(blocks, page)
    out = page.part(page.parts.high, "<u8")
    words = [np.ascontiguousarray(blocks["h"][:, :, byte]) for byte in range(4)]
    for block in range(4):
        found = np.zeros_like(words[0])
        for byte, word in enumerate(words):
            for half in range(2):
                found |= (word >> 2 * block + half & _ONES) << 4 * half + byte
        out[:, block::4] = found


def _write_q6_k(blocks: Array, page: _Page) -> None:
    """Values are moved 32 bytes at a time, high bits 16."""
    page.part(page.parts.super_scales, "<u2")[:] = blocks["d"]
    page.part(page.parts.scales, "<c16")[:] = blocks["s"]
    values, high = page.part(page.parts.values, "V32"), page.part(page.parts.high, "<c16")
    first, second = (np.ascontiguousarray(blocks["q"][:, :, part::2]).view("<u8").reshape(len(blocks), -1) for part in range(2))
    values[:, ::2] = (first & _LOW | (second & _LOW) << 4).view("V32")
    values[:, 1::2] = (first >> 4 & _LOW | second & _HIGH).view("V32")
    first, second = (np.ascontiguousarray(blocks["h"][:, :, part::2]).view("<u8").reshape(len(blocks), -1) for part in range(2))
    for block in range(2):
        pieces = (first, second, first >> 2, second >> 2)
        high[:, block::2] = sum(
            ((piece >> 4 * block & _TWOS) << 2 * number for number, piece in enumerate(pieces)), np.zeros_like(first)
        ).view("<c16")


class _Blocks(NamedTuple):
    """One quantised type: its block as a numpy record, and what writes blocks [N, blocks of a row] to a page."""

    record: np.dtype[Any]
    write: Callable[[Array, _Page], None]


def _record(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype([field if len(field) == 2 else (field[0], field[1], (field[2],)) for field in fields])


_D, _M, _NIBBLES, _FIFTH_BITS, _SIX_BITS = ("d", "<u2"), ("m", "<u2"), ("q", "<c16"), ("h", "<u4"), ("s", "<u4", 3)
_BLOCKS: dict[str, _Blocks] = {
    "Q4_0": _Blocks(_record(_D, _NIBBLES), _write_four_bits),
    "Q4_1": _Blocks(_record(_D, _M, _NIBBLES), _write_four_bits),
    "Q5_0": _Blocks(_record(_D, _FIFTH_BITS, _NIBBLES), _write_five_bits),
    "Q5_1": _Blocks(_record(_D, _M, _FIFTH_BITS, _NIBBLES), _write_five_bits),
    "Q8_0": _Blocks(_record(_D, ("q", "V32")), _write_eight_bits),
    "MXFP4": _Blocks(_record(("e", "u1"), _NIBBLES), _write_mxfp4),
    "Q4_K": _Blocks(_record(_D, _M, _SIX_BITS, ("q", "V128")), _write_q4_k),
    "Q5_K": _Blocks(_record(_D, _M, _SIX_BITS, ("h", "<u8", 4), ("q", "V128")), _write_q5_k),
    "Q6_K": _Blocks(_record(("q", "V32", 4), ("h", "<c16", 4), ("s", "<c16"), _D), _write_q6_k),
}


def pack_blocks(kind: str, rows: Tensor, out: Tensor | None = None, height: int | None = None) -> Tensor:
    """Write rows of quantised blocks as the bytes of a page.

    Args:
        kind: a key of PACKED.
        rows: uint8 [N, bytes of a row], as they lie in the file; contiguous.
        out: contiguous uint8 [>= page_bytes] in main memory to write to; else a new tensor. Gaps between parts keep what they held.
        height: the page is one of so many rows, of which these are the first; None: these are all.

    Returns:
        uint8 [page_bytes(PACKED[kind], height or N, K)].

    Raises:
        CheckpointError: a scale that is not a number.
    """
    form = _BLOCKS[kind]
    assert rows.dtype is torch.uint8 and rows.is_contiguous(), "blocks as they lie in the file"
    blocks = rows.numpy().view(form.record)
    columns = blocks.shape[1] * BY_NAME[kind].weights
    parts = page_parts(PACKED[kind], len(blocks) if height is None else height, columns)
    page = torch.zeros(parts.num_bytes, dtype=torch.uint8) if out is None else out[: parts.num_bytes]
    step = max(1, _CHUNK_BYTES // rows.shape[1])
    for start in range(0, len(blocks), step):
        form.write(blocks[start : start + step], _Page(page.numpy(), parts, slice(start, min(start + step, len(blocks)))))
    return page


def codes_of(kind: str, rows: Tensor) -> Codes:
    """The same rows as plain parts; what they mean is `dequantize(codes, PACKED[kind])`."""
    columns = rows.shape[1] // BY_NAME[kind].num_bytes * BY_NAME[kind].weights
    return unpack(pack_blocks(kind, rows), PACKED[kind], len(rows), columns)


def floats_of(kind: str, rows: Tensor) -> Tensor:
    """Rows of any supported type as float32 [N, K]: an owned tensor, bit for bit what ggml's formulas give."""
    if kind in FLOATS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return rows.view(dtype).float() if dtype is not torch.float32 else rows.view(dtype).clone()
    columns = rows.shape[1] // BY_NAME[kind].num_bytes * BY_NAME[kind].weights
    out = torch.empty((len(rows), columns))
    step = max(1, _CHUNK_WEIGHTS // columns)
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(codes_of(kind, rows[start : start + step]), PACKED[kind])
    return out
