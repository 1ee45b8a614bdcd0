"""A layer of packed experts at random places of a poisoned pool, and what it computes, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.fused_moe import MoeWorkspace, expert_page_bytes
from rimuru_kernels.packed_weights import Codes, PackedFormat, dequantize, pack, tile_rows

FORMATS = {
    "int8 a row": PackedFormat("int8", 0, "bf16"),
    "Q8_0": PackedFormat("int8", 32, "f16"),
    "int8 with zeros": PackedFormat("int8", 128, "f32", "zero"),
    "int4": PackedFormat("int4", 32, "bf16", bias=8),
    "int4 in wide groups": PackedFormat("int4", 128, "f16", bias=8),
    "GPTQ": PackedFormat("int4", 128, "f16", "zero"),
    "Q4_1": PackedFormat("int4", 32, "f16", "min"),
    "Q4_K": PackedFormat("int4", 32, "u8*f16", "u8*f16"),
    "Q5_0": PackedFormat("int5", 32, "f16", bias=16),
    "Q5_K": PackedFormat("int5", 32, "u8*f16", "u8*f16"),
    "Q6_K": PackedFormat("int6", 16, "i8*f16", bias=32),
    "FP8 in blocks": PackedFormat("fp8", 128, "f32", group_rows=128),
    "FP8 in blocks, E8M0": PackedFormat("fp8", 128, "e8m0", group_rows=128),
    "FP8 a row": PackedFormat("fp8", 0, "bf16"),
    "MXFP4": PackedFormat("fp4", 32, "e8m0"),
    "NVFP4": PackedFormat("fp4", 16, "e4m3", factor=True),
}

_BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4, "int5": 5, "int6": 6}
_SPREAD = {"int8": 74.0, "int4": 4.6, "int5": 9.2, "int6": 18.5, "fp4": 3.0, "fp8": 100.0}
"""Standard deviation of random codes, about."""


def random_matrix(fmt: PackedFormat, rows: int, columns: int, draw: torch.Generator) -> Codes:
    """Random codes with scales (and offsets) of their own in every group, so that weights spread by about columns ** -0.5."""
    values = torch.randint(0, 1 << _BITS[fmt.values], (rows, columns), generator=draw).to(torch.uint8)
    if fmt.values == "fp8":
        values[(values & 127) == 127] = 0  # not a number
    if fmt.values == "int8":
        values = values.view(torch.int8)
    middle = 0.0 if fmt.values in ("int8", "fp8", "fp4") else float((1 << _BITS[fmt.values]) // 2)
    shape, supers = (-(-rows // fmt.group_rows), fmt.groups(columns)), (rows, -(-columns // 256))
    plain = (torch.rand(shape, generator=draw) + 0.5) * (columns**-0.5 / _SPREAD[fmt.values])
    byte = torch.randint(20, 60, shape, generator=draw).to(torch.uint8)
    halves = ((torch.rand(supers, generator=draw) + 0.5) * (columns**-0.5 / _SPREAD[fmt.values] / 40)).half()
    scales = {
        "f32": plain, "f16": plain.half(), "bf16": plain.bfloat16(), "e8m0": (plain.log2().round() + 127).to(torch.uint8),
        "e4m3": (torch.rand(shape, generator=draw) + 0.5).to(torch.float8_e4m3fn).view(torch.uint8), "u8*f16": byte,
        "i8*f16": byte.view(torch.int8) * (1 - 2 * torch.randint(0, 2, shape, generator=draw).to(torch.int8)),
    }[fmt.scale]  # fmt: skip
    offsets = {
        "none": None,
        "zero": torch.randint(1, 15, shape, generator=draw).to(torch.int8 if fmt.values == "int8" else torch.uint8),
        "min": (-middle * plain).half(),
        "u8*f16": byte.flip(0),
    }[fmt.offset]
    return Codes(
        values,
        scales,
        halves if fmt.scale.endswith("*f16") else None,
        offsets,
        (halves.float() * middle).half() if fmt.offset == "u8*f16" else None,
        torch.tensor(columns**-0.5 / _SPREAD[fmt.values]) if fmt.factor else None,
    )


class PackedLayer:
    """Experts of formats (gate and up, down), each row tile a packed matrix; `present` are written, others have entries of -1.

    Args:
        tiles: of each projection, or of gate and of up, and of down.
        more: columns of the entries behind those of an expert's pages, which mean nothing.
    """

    def __init__(
        self,
        formats: tuple[PackedFormat, PackedFormat],
        experts: int,
        f: int,
        d: int,
        tiles: int | tuple[int, int] = 1,
        present: list[int] | None = None,
        *,
        more: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(experts)
        self.formats, self.f, self.d = formats, f, d
        self.tiles = wide, down = (tiles, tiles) if isinstance(tiles, int) else tiles
        self.page_bytes = expert_page_bytes(formats, f, d, wide, down)
        present = list(range(experts)) if present is None else present
        count = 2 * wide + down
        places = torch.randperm(len(present) * count + 3, generator=draw)[: len(present) * count].view(-1, count)
        # Every number that lies between pages, or in the gaps of one, is as large as it can be, or none.
        self.pool = torch.full(((len(present) * count + 3) * self.page_bytes,), 0xFF, dtype=torch.uint8)
        self.entries = torch.full((experts, count + more), -1, dtype=torch.int32)
        self.weights: dict[int, list[Tensor]] = {}
        for expert, pages in zip(present, places.tolist(), strict=True):
            matrices, column = [], 0
            for part, (rows, columns) in enumerate(((f, d), (f, d), (d, f))):
                fmt, made = formats[part // 2], []
                height = tile_rows(rows, self.tiles[part // 2], fmt.group_rows)
                for first in range(0, rows, height):
                    start = pages[column] * self.page_bytes
                    codes = random_matrix(fmt, min(height, rows - first), columns, draw)
                    pack(codes, fmt, self.pool[start : start + self.page_bytes], height)
                    self.entries[expert, column] = start // 256
                    made.append(dequantize(codes, fmt).double())
                    column += 1
                matrices.append(torch.cat(made))
            self.weights[expert] = matrices

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer's result in float64."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                if expert >= 0:
                    gate, up, down = self.weights[expert]
                    row = x[token].double()
                    out[token] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
        return out

    def workspace(self, tokens: int, top_k: int, dtype: torch.dtype, device: torch.device) -> MoeWorkspace:
        """Scratch full of what must not be read."""
        made = MoeWorkspace(max(99, tokens), top_k, self.entries.shape[0], self.f, self.d, dtype, device)
        made.hidden.fill_(torch.nan)
        made.contributions.fill_(torch.nan)
        for integers in (made.order, made.offsets, made.counts, made.table):
            integers.fill_(-(2**30))
        return made
