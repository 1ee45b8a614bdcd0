"""Quantised matrices in pages: what is packed is what is unpacked, and the formula is computed element by element by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_moe import FORMATS

from rimuru_kernels.packed_weights import Codes, PackedFormat, dequantize, pack, page_bytes, page_parts, unpack
from rimuru_kernels.packed_weights.reference import FP4_VALUES


def random_codes(fmt: PackedFormat, rows: int, columns: int, seed: int) -> Codes:
    g = torch.Generator().manual_seed(seed)
    top = {"int8": 256, "fp8": 256, "int4": 16, "fp4": 16, "int5": 32, "int6": 64}[fmt.values]
    values = torch.randint(0, top, (rows, columns), generator=g, dtype=torch.int64).to(torch.uint8)
    if fmt.values == "fp8":
        values[(values & 127) == 127] = 0  # not a number
    if fmt.values == "int8":
        values = values.view(torch.int8)
    groups, supers = fmt.groups(columns), -(-columns // 256)
    shape = (-(-rows // fmt.group_rows), groups)
    plain = torch.rand(shape, generator=g) + 0.5
    byte = torch.randint(110, 120, shape, generator=g).to(torch.uint8)
    scales = {
        "f32": plain, "f16": plain.half(), "bf16": plain.bfloat16(), "e8m0": byte, "e4m3": plain.to(torch.float8_e4m3fn).view(torch.uint8),
        "u8*f16": byte // 2, "i8*f16": (byte // 2).view(torch.int8) - 55,
    }[fmt.scale]  # fmt: skip
    halves = (torch.rand((rows, supers), generator=g) + 0.1).half()
    offsets = {
        "none": None,
        "zero": torch.randint(0, 16, shape, generator=g).to(torch.int8 if fmt.values == "int8" else torch.uint8),
        "min": -plain.half(),
        "u8*f16": byte // 3,
    }[fmt.offset]
    return Codes(
        values,
        scales,
        halves if fmt.scale.endswith("*f16") else None,
        offsets,
        halves * 2 if fmt.offset == "u8*f16" else None,
        torch.tensor(0.37) if fmt.factor else None,
    )


def by_hand(codes: Codes, fmt: PackedFormat) -> torch.Tensor:
    rows, columns = codes.values.shape
    out = torch.empty(rows, columns, dtype=torch.float32)
    for n, k in itertools.product(range(rows), range(columns)):
        g = k // fmt.group if fmt.group else 0
        raw = codes.values[n, k]
        if fmt.values == "fp8":
            q = raw.view(torch.float8_e4m3fn).float()
        elif fmt.values == "fp4":
            q = torch.tensor(FP4_VALUES[int(raw)])
        else:
            q = raw.float() - fmt.bias
        scale = codes.scales[n // fmt.group_rows, g]
        if fmt.scale == "e8m0":
            s = torch.tensor(2.0) ** (int(scale) - 127)
        elif fmt.scale == "e4m3":
            s = scale.view(torch.float8_e4m3fn).float()
        else:
            s = scale.float()
        if codes.super_scales is not None:
            s = codes.super_scales[n, k // 256].float() * s
        if fmt.offset == "zero":
            q = q - codes.offsets[n, g].float()
        w = q * s
        if fmt.offset == "min":
            w = w + codes.offsets[n, g].float()
        elif fmt.offset == "u8*f16":
            w = w - codes.super_offsets[n, k // 256].float() * codes.offsets[n, g].float()
        out[n, k] = w if codes.factor is None else w * codes.factor
    return out


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_what_is_packed_is_what_is_unpacked(name, rows, columns, seed):
    fmt = FORMATS[name]
    codes = random_codes(fmt, rows, columns, seed)
    page = torch.full((page_bytes(fmt, rows, columns) + 256,), 0xA5, dtype=torch.uint8)
    packed = pack(codes, fmt, page)
    assert len(packed) == page_bytes(fmt, rows, columns)
    assert (page[len(packed) :] == 0xA5).all()
    again = unpack(packed, fmt, rows, columns)
    for part in ("values", "scales", "super_scales", "offsets", "super_offsets", "factor"):
        before, after = getattr(codes, part), getattr(again, part)
        assert (before is None) == (after is None), part
        if before is not None:
            assert before.dtype == after.dtype and torch.equal(before, after), part


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 65), (2, 257)])
def test_formula(name, rows, columns):
    fmt = FORMATS[name]
    codes = random_codes(fmt, rows, columns, 7)
    assert torch.equal(dequantize(codes, fmt), by_hand(codes, fmt))


def test_rows_that_share_a_scale():
    fmt = PackedFormat("fp8", 128, "f32", group_rows=128)
    codes = random_codes(fmt, 130, 129, 3)
    one = torch.ones_like(codes.values).fill_(0x38)  # 1.0
    codes.values.copy_(one)
    weights = dequantize(codes, fmt)
    assert weights[127, 127] == codes.scales[0, 0] and weights[128, 127] == codes.scales[1, 0] and weights[129, 128] == codes.scales[1, 1]


def test_places_of_four_bit_codes_are_those_of_the_description():
    codes = Codes(torch.zeros(1, 128, dtype=torch.uint8), torch.ones(1, 4))
    for column in (0, 31, 32, 63, 64 + 5, 64 + 37):
        codes.values.zero_()
        codes.values[0, column] = 9
        page = pack(codes, PackedFormat("int4", 32, "f32"))
        block, half, j = column // 64, column % 64 // 32, column % 32
        assert page[32 * block + j] == 9 << (4 * half)
        assert page[:64].count_nonzero() == 1


@pytest.mark.parametrize(("kind", "bits"), [("int5", 1), ("int6", 2)])
def test_places_of_high_bits_are_those_of_the_description(kind, bits):
    fmt = PackedFormat(kind, 32, "f32")
    start, width = page_parts(fmt, 1, 128).high.start, 8 * bits
    codes = Codes(torch.zeros(1, 128, dtype=torch.uint8), torch.ones(1, 4))
    for column in (0, 9, 33, 63, 64 + 20, 64 + 63):
        codes.values.zero_()
        codes.values[0, column] = ((1 << bits) - 1) << 4
        page = pack(codes, fmt)
        block, half, j = column // 64, column % 64 // 32, column % 32
        shift = 4 * half + j // 8 if bits == 1 else 2 * (2 * half + j // 16)
        assert page[start + width * block + j % width] == ((1 << bits) - 1) << shift
        assert page.sum() - page[page_parts(fmt, 1, 128).scales.start :].sum() == page[start + width * block + j % width]


def test_parts_start_at_whole_lines_and_do_not_overlap():
    for fmt in FORMATS.values():
        parts = page_parts(fmt, 7, 321)
        end = 0
        for part in parts[:-1]:
            if part.rows:
                assert part.start % 128 == 0 and part.start >= end
                end = part.start + part.rows * part.row_bytes
        assert end == parts.num_bytes


def test_bytes_of_real_shapes():
    """Qwen3-30B's gate: 768 x 2048."""
    assert page_bytes(PackedFormat("int4", 32, "e8m0"), 768, 2048) == 835_584
    assert page_bytes(FORMATS["NVFP4"], 768, 2048) == 884_740
    assert page_bytes(FORMATS["Q8_0"], 768, 2048) == 1_671_168
    assert page_bytes(FORMATS["FP8 in blocks"], 768, 2048) == 1_572_864 + 384


def test_refuses_what_does_not_go_together():
    with pytest.raises(ValueError, match="do not divide"):
        PackedFormat("int4", 48, "u8*f16")
    with pytest.raises(ValueError, match="neither offset nor bias"):
        PackedFormat("fp4", 32, "e8m0", "zero")
    fmt = FORMATS["GPTQ"]
    codes = random_codes(fmt, 2, 128, 1)
    codes.scales = codes.scales.float()
    with pytest.raises(ValueError, match="scales are"):
        pack(codes, fmt)
    codes = random_codes(fmt, 2, 128, 1)
    codes.offsets = None
    with pytest.raises(ValueError, match="offsets are"):
        pack(codes, fmt)
