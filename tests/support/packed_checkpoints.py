"""Tiny checkpoints whose experts are read as packed: the values of a float checkpoint, rounded to a format by plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, PackedFormat, dequantize, pack, tile_rows
from rimuru_kernels.packed_weights.reference import FP4_VALUES
from rimuru_models.layout import dense_shapes
from rimuru_models.quantization.formats import LayerFormats, WeightFormats
from rimuru_models.weights import CheckpointReader, ExpertCodes, ExpertTensors

_LEVELS = {"int8": 127, "int4": 7, "int5": 15, "int6": 31}


def rounded(weight: Tensor, fmt: PackedFormat) -> Codes:
    """Codes whose weights are near `weight` [N, K]."""
    rows, columns = weight.shape
    group = fmt.group or columns
    groups = -(-columns // group)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - columns)).view(rows, groups, group)
    most = padded.abs().amax(2)
    lines = -(-rows // fmt.group_rows)
    if fmt.group_rows > 1:
        most = torch.nn.functional.pad(most, (0, 0, 0, lines * fmt.group_rows - rows)).view(lines, fmt.group_rows, groups).amax(1)
    largest = {"fp4": 6.0, "fp8": 448.0}.get(fmt.values) or float(_LEVELS[fmt.values])
    scale = (most / largest).clamp_min(1e-8)
    parts: dict[str, Tensor] = {}
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if fmt.scale in dtypes:
        parts["scales"] = scale.to(dtypes[fmt.scale])
    elif fmt.scale == "e8m0":
        parts["scales"] = (torch.log2(scale).ceil() + 127).clamp(0, 254).to(torch.uint8)
    elif fmt.scale == "e4m3":
        parts["factor"] = scale.max() / 448
        parts["scales"] = (scale / parts["factor"]).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        supers = -(-columns // 256)
        per = 256 // fmt.group
        upper = torch.nn.functional.pad(scale, (0, supers * per - groups)).view(rows, supers, per).amax(2) / 63
        parts["super_scales"] = upper.half()
        codes = scale / upper.half().float().repeat_interleave(per, 1)[:, :groups]
        parts["scales"] = codes.round().clamp(1, 63).to(torch.uint8 if fmt.scale == "u8*f16" else torch.int8)
        if fmt.offset == "u8*f16":  # symmetric: what is subtracted is half the range
            parts["super_offsets"] = parts["super_scales"] * (_LEVELS[fmt.values] + 1) / 2
            parts["offsets"] = (parts["scales"].float() * 2).to(torch.uint8)
    if fmt.offset == "zero":
        parts["offsets"] = torch.full(
            (rows, groups), 0 if fmt.values == "int8" else 8, dtype=torch.int8 if fmt.values == "int8" else torch.uint8
        )
    if fmt.offset == "min":
        parts["offsets"] = (-8 * scale).half()
    # The nearest of all codes, by what each of them would mean.
    signed = fmt.values == "int8"
    if fmt.values in ("fp4", "fp8"):
        whole = dequantize(Codes(torch.zeros(rows, columns, dtype=torch.uint8) + _one(fmt), **parts), fmt)
        target = weight.float() / whole
        if fmt.values == "fp8":
            return Codes(target.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), **parts)
        table = torch.tensor(FP4_VALUES)
        return Codes((target.unsqueeze(2) - table).abs().argmin(2).to(torch.uint8), **parts)
    dtype = torch.int8 if signed else torch.uint8
    at = [dequantize(Codes(torch.full((rows, columns), code, dtype=dtype), **parts), fmt) for code in (0, 1)]
    codes = ((weight.float() - at[0]) / (at[1] - at[0]).clamp_min(1e-12)).round()
    low, high = (-128, 127) if signed else (0, 2 ** int(fmt.values[3:]) - 1)
    return Codes(codes.clamp(low, high).to(dtype), **parts)


def _one(fmt: PackedFormat) -> int:
    """The code of 1.0."""
    return 2 if fmt.values == "fp4" else 0x38


class PackedReader(CheckpointReader):
    """A float checkpoint whose experts are handed out packed.

    Args:
        model_dir: of the float checkpoint.
        layers: formats of each sparse layer, in turn; None: this layer stays plain.
        dense: formats of the dense matrices, in turn; those that a family's layer stacks so may differ.
    """

    def __init__(self, model_dir: Path, layers: Sequence[LayerFormats | None], dense: Sequence[PackedFormat] = ()) -> None:
        super().__init__(model_dir)
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
        name = names[self.expert_dtype]
        kinds = {layer: layers[index % len(layers)] for index, layer in enumerate(self.config.moe_layers)}
        matrices = [n for n, shape in dense_shapes(self.config).items() if len(shape) == 2 and not n.endswith(".mlp.gate.weight")]
        packed = {n: dense[index % len(dense)] for index, n in enumerate(matrices)} if dense else {}
        self.formats = WeightFormats(kinds, packed, name, name)
        self.compute_dtype = self.expert_dtype
        self._codes: dict[tuple[int, int], ExpertCodes] = {}

    def dense_codes(self, name: str) -> tuple[Codes, PackedFormat] | None:
        fmt = self.formats.dense.get(name)
        return None if fmt is None else (rounded(super().dense_view(name), fmt), fmt)

    def dense_page(self, name: str) -> Tensor:
        held = self.dense_codes(name)
        assert held is not None
        return pack(*held)

    def dense_view(self, name: str) -> Tensor:
        held = self.dense_codes(name)
        return super().dense_view(name) if held is None else dequantize(*held)

    def expert_codes(self, layer: int, expert: int) -> ExpertCodes:
        key = layer, expert
        if key not in self._codes:
            formats = self.formats.experts[layer]
            assert formats is not None
            gate, up, down = super().expert(layer, expert)
            self._codes[key] = ExpertCodes(rounded(gate, formats.gate_up), rounded(up, formats.gate_up), rounded(down, formats.down))
        return self._codes[key]

    def expert_packed(self, layer: int, expert: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        formats = self.formats.experts[layer]
        assert formats is not None
        wide, down = (len(pages) // 3,) * 2 if tiles is None else tiles
        assert len(pages) == 2 * wide + down
        own = [pages[:wide], pages[wide : 2 * wide], pages[2 * wide :]]
        for projection, codes in enumerate(self.expert_codes(layer, expert)):
            fmt = formats.down if projection == 2 else formats.gate_up
            rows = tile_rows(len(codes.values), len(own[projection]), fmt.group_rows)
            for page, part in zip(own[projection], row_tiles(codes, fmt, rows), strict=True):
                pack(part, fmt, page, rows)

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """What the codes mean, so that the model in plain memory is the oracle."""
        formats = self.formats.experts[layer]
        if formats is None:
            return super().expert(layer, expert)
        gate, up, down = self.expert_codes(layer, expert)
        values = dequantize(gate, formats.gate_up), dequantize(up, formats.gate_up), dequantize(down, formats.down)
        return ExpertTensors(*(value.to(self.expert_dtype) for value in values))


def row_tiles(codes: Codes, fmt: PackedFormat, rows: int) -> Iterable[Codes]:
    """A matrix cut into row tiles of so many rows, the last one perhaps of fewer."""
    if rows >= len(codes.values):
        return [codes]
    assert rows % fmt.group_rows == 0
    parts = []
    for start in range(0, len(codes.values), rows):
        own = slice(start, start + rows)
        lines = slice(start // fmt.group_rows, -(-(start + rows) // fmt.group_rows))
        cut = {name: None if (part := getattr(codes, name)) is None else part[own] for name in ("super_scales", "offsets", "super_offsets")}
        parts.append(replace(codes, values=codes.values[own], scales=codes.scales[lines], **cut))
    return parts
