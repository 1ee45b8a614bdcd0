"""From the parts of a quantised matrix, as the files have them, to a page, to codes, to numbers."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, dequantize, page_parts, unpack
from rimuru_kernels.packed_weights.format import PackedFormat, first_rows
from rimuru_kernels.packed_weights.format import Part as PagePart
from rimuru_models.index import CheckpointIndex
from rimuru_models.quantization.scheme import ARRAY_DTYPES, DAMAGED, Array, Bytes, Parts, all_finite
from rimuru_models.quantization.stored import Stored

_PIECE_BYTES, _PIECE_WEIGHTS = 4 << 20, 1 << 19


def map_parts(stored: Stored, index: CheckpointIndex, mapping: Callable[[Path], mmap.mmap | bytes]) -> Parts:
    """The parts of a matrix as arrays over mapped files.

    Args:
        mapping: file -> its content.

    Raises:
        CheckpointError: the data contradict what the headers promise.
    """
    arrays: dict[str, Array] = {}
    dtypes: dict[str, str] = {}
    for role, name in stored.names.items():
        path, info = index.tensors[name]
        dtype, start = ARRAY_DTYPES[info.dtype], index.headers[path].data_offset + info.start
        array = np.frombuffer(mapping(path), dtype, (info.stop - info.start) // dtype.itemsize, start).reshape(info.shape)
        array.flags.writeable = False  # the mapping is private, so nothing else would notice
        arrays[role] = array if stored.index is None else array[stored.index]
        dtypes[role] = info.dtype
    first = next(iter(stored.names.values()))
    parts = Parts(arrays, dtypes, f"{index.tensors[first][0]}: the quantised matrix of tensor {first!r}")
    stored.scheme.check(parts, stored.rows, stored.columns)
    return parts


def write_page(stored: Stored, parts: Parts, page: Tensor, start: int = 0, stop: int | None = None, height: int | None = None) -> None:
    """Write rows start .. stop - 1 of a matrix (all, if not said) as the bytes of a page.

    Uses numpy and one thread, so that several may load at once. Gaps between the parts of a page keep what they held.

    Args:
        page: contiguous uint8 [>= page_bytes] on the CPU.
        height: the page is one of so many rows, of which these are the first; None: these are all.

    Raises:
        CheckpointError: a scale is not a finite number.
    """
    stop = stored.rows if stop is None else stop
    fmt, out = stored.fmt, page.numpy()
    rows = stop - start
    lies = first_rows(page_parts(fmt, rows if height is None else height, stored.columns), fmt, rows)
    first, last = stored.first + start, stored.first + stop
    values = _part(out, lies.values)
    piece = max(1, _PIECE_BYTES // values.shape[1])  # what a scheme turns over lies in memory beside the page
    for begin in range(0, rows, piece):
        end = min(rows, begin + piece)
        stored.scheme.write_values(parts, first + begin, first + end, stored.columns, values[begin:end])
    scales = stored.scheme.scales(parts, first, last, fmt)
    if not all_finite(scales, fmt.scale):
        raise parts.error(f"has a scale in {stored.names['scale']!r} that is not a finite number.", hint=DAMAGED)
    _put(out, lies.scales, scales)
    offsets = stored.scheme.offsets(parts, first, last)
    if offsets is not None:
        _put(out, lies.offsets, offsets)
    factor = stored.scheme.factor(parts)
    if factor is not None:
        _put(out, lies.factor, np.full((1, 1), factor, np.float32))


def read_page(stored: Stored, parts: Parts) -> Tensor:
    """A matrix as a page of its own: uint8 [page_bytes]. Little more than that is ever in memory."""
    page = torch.zeros(page_parts(stored.fmt, stored.rows, stored.columns).num_bytes, dtype=torch.uint8)
    write_page(stored, parts, page)
    return page


def read_codes(stored: Stored, parts: Parts) -> Codes:
    """The codes of a matrix, and what belongs to them."""
    return unpack(read_page(stored, parts), stored.fmt, stored.rows, stored.columns)


def read_floats(stored: Stored, parts: Parts) -> Tensor:
    """What a matrix means: float32 [N, K], the same bits as its format's own library gives. Little more than that is ever in memory."""
    fmt, rows, columns = stored.fmt, stored.rows, stored.columns
    out = torch.empty(rows, columns)
    step = min(rows, -(-max(1, _PIECE_WEIGHTS // columns) // fmt.group_rows) * fmt.group_rows)
    page = torch.zeros(page_parts(fmt, step, columns).num_bytes, dtype=torch.uint8)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        write_page(stored, parts, page, start, stop)
        codes = unpack(page, fmt, stop - start, columns)
        scales = stored.scheme.exact_scales(parts, stored.first + start, stored.first + stop)
        if scales is None:
            out[start:stop] = dequantize(codes, fmt)
        else:
            out[start:stop] = dequantize(Codes(codes.values, torch.from_numpy(scales)), PackedFormat(fmt.values, fmt.group, "f32"))
    return out


def _part(page: Bytes, part: PagePart) -> Bytes:
    return page[part.start : part.start + part.rows * part.row_bytes].reshape(part.rows, part.row_bytes)


def _put(page: Bytes, part: PagePart, values: Array) -> None:
    target = _part(page, part).view(values.dtype)
    assert target.shape == values.shape, "a scheme and its PackedFormat disagree"
    target[...] = values
