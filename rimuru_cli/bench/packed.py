"""Packed experts with random codes for the benches: pages of a few kinds, made once and copied."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, PackedFormat, pack, tile_rows
from rimuru_models.quantization.formats import LayerFormats

_INT4 = PackedFormat("int4", 32, "f16", bias=8)
_INT8 = PackedFormat("int8", 32, "f16")
_FP8 = PackedFormat("fp8", 128, "f32", group_rows=128)
_MXFP4 = PackedFormat("fp4", 32, "e8m0")
_NVFP4 = PackedFormat("fp4", 16, "e4m3", factor=True)
_Q4_K = PackedFormat("int4", 32, "u8*f16", "u8*f16")
_Q6_K = PackedFormat("int6", 16, "i8*f16", bias=32)

QUANTS: dict[str, LayerFormats] = {
    "int4": LayerFormats(_INT4, _INT4),
    "int8": LayerFormats(_INT8, _INT8),
    "fp8": LayerFormats(_FP8, _FP8),
    "mxfp4": LayerFormats(_MXFP4, _MXFP4),
    "nvfp4": LayerFormats(_NVFP4, _NVFP4),
    "q4_k": LayerFormats(_Q4_K, _Q4_K),
    "q4_k_m": LayerFormats(_Q4_K, _Q6_K),
}
"""What experts of random weights may be packed as: int4 and int8 in groups of 32, FP8 in blocks of 128, MXFP4, NVFP4, GGUF's K types."""

_SPREAD = 0.02  # standard deviation of a weight, about
_KINDS = 4


def random_codes(fmt: PackedFormat, rows: int, columns: int, seed: int) -> Codes:
    """A matrix [rows, columns] of random codes whose weights spread like a model's."""
    draw = torch.Generator().manual_seed(seed)
    levels = {"int8": 256, "int4": 16, "int5": 32, "int6": 64, "fp4": 16, "fp8": 256}[fmt.values]
    values = torch.randint(0, levels, (rows, columns), generator=draw, dtype=torch.uint8)
    if fmt.values == "int8":
        values = values.view(torch.int8)
    if fmt.values == "fp8":
        values &= 0xBF  # numbers below 2, no NaN
    groups, supers = fmt.groups(columns), -(-columns // 256)
    lines = -(-rows // fmt.group_rows)
    scale = _SPREAD / {"int8": 74, "int4": 4.6, "int5": 9.2, "int6": 18.5, "fp4": 3.0, "fp8": 0.6}[fmt.values]
    parts: dict[str, Tensor] = {}
    if fmt.two_levels:
        if fmt.scale.endswith("*f16"):
            dtype = torch.uint8 if fmt.scale == "u8*f16" else torch.int8
            parts["scales"] = torch.full((lines, groups), 32, dtype=dtype)
            parts["super_scales"] = torch.full((rows, supers), scale / 32, dtype=torch.float16)
        if fmt.offset == "u8*f16":
            parts["offsets"] = torch.full((rows, groups), 32, dtype=torch.uint8)
            parts["super_offsets"] = torch.full((rows, supers), scale * levels / 64, dtype=torch.float16)
    elif fmt.scale == "e8m0":
        parts["scales"] = torch.full((lines, groups), 127 - 7, dtype=torch.uint8)
    elif fmt.scale == "e4m3":
        parts["scales"] = torch.ones(lines, groups).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        parts["scales"] = torch.full(
            (lines, groups), scale, dtype={"f32": torch.float32, "f16": torch.float16}.get(fmt.scale, torch.bfloat16)
        )
    if fmt.factor:
        parts["factor"] = torch.tensor(scale)
    return Codes(values, **parts)


class RandomPages:
    """Pages of random experts: a few are made when first needed, all others are copies of them."""

    def __init__(self, formats: LayerFormats, f: int, d: int) -> None:
        self._formats, self._f, self._d = formats, f, d
        self._made: dict[tuple[int, int], list[list[Tensor]]] = {}
        self._lock = threading.Lock()

    def write(self, number: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        """Write one expert into its pages, gate tiles, then up tiles, then down tiles; `number` chooses which kind it is.

        Args:
            tiles: see `WeightReader.expert_packed`.
        """
        wide, down = (len(pages) // 3,) * 2 if tiles is None else tiles
        with self._lock:
            if (wide, down) not in self._made:
                self._made[wide, down] = [self._kind(kind, wide, down) for kind in range(_KINDS)]
        for page, content in zip(pages, self._made[wide, down][number % _KINDS], strict=True):
            # numpy and not torch: this runs in several threads, see `expert_files`.
            page.numpy()[: len(content)] = content.numpy()

    def _kind(self, kind: int, wide: int, down: int) -> list[Tensor]:
        """Pages of one expert; all tiles of a projection are full, where the last one has fewer rows as well."""
        gate_up, tall = self._formats
        own = [(gate_up, tile_rows(self._f, wide, gate_up.group_rows), self._d)] * (2 * wide)
        own += [(tall, tile_rows(self._d, down, tall.group_rows), self._f)] * down
        return [pack(random_codes(fmt, rows, columns, 1000 * kind + place), fmt) for place, (fmt, rows, columns) in enumerate(own)]
