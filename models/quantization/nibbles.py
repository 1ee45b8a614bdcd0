"""4-bit codes, from the order of a file to that of a page. No torch: one thread, so that several can load side by side.

Files keep column 2i of a row in the low half of byte i and column 2i + 1 in the high half; a page keeps columns j and 32 + j of each 64
in byte j (see `rimuru_kernels.packed_weights.format`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 32  # of 64 columns
_HALF = np.dtype("V16")  # half of a block: numpy moves it as one
_WORD = np.dtype("<u2")
_CHUNK = 1 << 16  # bytes worked on at a time: they stay in the core's cache


def write_nibbles(source: NDArray[np.uint8], columns: int, out: NDArray[np.uint8]) -> None:
    """Rearrange rows.

    Args:
        source: [N, at least ceil(columns / 2)], in the order of files.
        columns: how many codes of a row count.
        out: [N, ceil(columns / 64) * 32]; codes beyond `columns` become 0.
    """
    whole = columns // 64 * BLOCK_BYTES
    if whole:
        _write_blocks(source[:, :whole], out[:, :whole])
    left = columns % 64
    if left:
        last = np.zeros((source.shape[0], BLOCK_BYTES), np.uint8)
        used = -(-left // 2)
        last[:, :used] = source[:, whole : whole + used]
        if left % 2:
            last[:, used - 1] &= 15
        _write_blocks(last, out[:, whole : whole + BLOCK_BYTES])


def _write_blocks(source: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    rows, row_bytes = source.shape
    blocks = row_bytes // BLOCK_BYTES
    step = max(1, _CHUNK // row_bytes)
    low, high = np.empty((min(rows, step), blocks), _HALF), np.empty((min(rows, step), blocks), _HALF)
    for start in range(0, rows, step):
        halves = source[start : start + step].view(_HALF).reshape(-1, blocks, 2)
        count = len(halves)
        low[:count], high[:count] = halves[:, :, 0], halves[:, :, 1]
        # The word for bytes a and b of the two halves is b:a; in the page its two middle nibbles have changed places.
        word = high[:count].view(np.uint8).astype(_WORD)
        word <<= 8
        word |= low[:count].view(np.uint8)
        swap = word >> 4
        swap ^= word
        swap &= 0x00F0
        word ^= swap
        swap <<= 4
        word ^= swap
        out[start : start + step] = word.view(np.uint8)


def unpack_nibbles(source: NDArray[Any], columns: int) -> NDArray[np.uint8]:
    """[N, words or bytes of 4-bit codes] -> uint8 [N, columns], lowest bits first."""
    raw = np.ascontiguousarray(source).view(np.uint8)
    return np.stack((raw & 15, raw >> 4), -1).reshape(len(raw), -1)[:, :columns]


def transpose_words(words: NDArray[np.int32], order: tuple[int, ...]) -> NDArray[np.uint8]:
    """Codes that lie along the outputs, eight in a word, as codes along the inputs.

    Args:
        words: int32 [K, N / 8], contiguous or a view; nibble i of a word, counted from the low end, is output 8 n + order[i].
        order: a permutation of 0 .. 7.

    Returns:
        uint8 [N, ceil(K / 8) * 4] in the order of files; codes beyond K are 0.
    """
    inputs, outputs = words.shape
    if inputs % 8:
        words = np.concatenate((words, np.zeros((-inputs % 8, outputs), words.dtype)))
    # planes[k, n, j]: input 8 j + k of the eight outputs of word n. Three rounds of swaps turn an 8 x 8 square of nibbles over.
    planes = np.array(words.view(np.uint32).reshape(-1, 8, outputs).transpose(1, 2, 0), order="C")  # a copy, always
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        shift, pairs = 4 * distance, planes.reshape(4 // distance, 2, distance, *planes.shape[1:])
        low, high = pairs[:, 0], pairs[:, 1]
        swap = low >> np.uint32(shift)
        swap ^= high
        swap &= np.uint32(mask)
        high ^= swap
        swap <<= np.uint32(shift)
        low ^= swap
    out = np.empty((outputs, 8, planes.shape[2]), np.uint32)
    for place, output in enumerate(order):
        out[:, output] = planes[place]
    return out.reshape(outputs * 8, -1).view(np.uint8)
