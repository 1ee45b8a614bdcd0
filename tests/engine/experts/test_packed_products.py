"""Products with packed matrices on a CPU, against the numbers that the codes mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import rounded

from rimuru_cli.bench.packed import QUANTS
from rimuru_cli.engine.experts import packed_products
from rimuru_cli.engine.experts.packed_products import PackedTile, Workspace
from rimuru_cli.engine.experts.plane_products import PlaneTile, products
from rimuru_cli.engine.experts.planes import in_planes
from rimuru_kernels.packed_weights import Codes, PackedFormat, dequantize, pack

FORMATS: dict[str, PackedFormat] = {
    **{name: formats.gate_up for name, formats in QUANTS.items()},
    "q6_k": QUANTS["q4_k_m"].down,
    "q5_k": PackedFormat("int5", 32, "u8*f16", "u8*f16"),
    "q4_1": PackedFormat("int4", 32, "f16", "min"),
    "awq": PackedFormat("int4", 128, "f16", "zero"),
    "int4 by rows": PackedFormat("int4", 0, "f32", bias=8),
    "int8 by rows": PackedFormat("int8", 0, "bf16"),
    "int8 with zeros": PackedFormat("int8", 64, "f16", "zero"),
    "int4 in groups of 16": PackedFormat("int4", 16, "bf16", bias=8),
    "int4 in odd groups": PackedFormat("int4", 24, "bf16", bias=8),
    "int5": PackedFormat("int5", 32, "f16", bias=16),
}
SIZES = st.tuples(st.integers(1, 150), st.integers(1, 200).map(lambda k: 2 * k))


def _codes(fmt: PackedFormat, rows: int, columns: int, seed: int) -> Codes:
    torch.manual_seed(seed)
    codes = rounded(torch.randn(rows, columns) * 0.05, fmt)
    if fmt.offset == "zero":
        assert codes.offsets is not None
        low, high = (-9, 9) if fmt.values == "int8" else (0, 16)
        codes.offsets = torch.randint(low, high, codes.offsets.shape).to(codes.offsets.dtype)
    return codes


def _page(codes: Codes, fmt: PackedFormat) -> torch.Tensor:
    """The page of a matrix, with something else behind it."""
    return torch.cat((pack(codes, fmt), torch.full((64,), 255, dtype=torch.uint8)))


@pytest.mark.parametrize("name", FORMATS)
@given(size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_products_are_those_of_the_numbers(name: str, size: tuple[int, int], seed: int) -> None:
    fmt, (rows, columns) = FORMATS[name], size
    matrices = [_codes(fmt, rows, columns, seed + i) for i in range(3)]
    kind = PackedTile(fmt, rows, columns, Workspace(columns))
    pages = [_page(codes, fmt) for codes in matrices]
    numbers = [dequantize(codes, fmt).double() for codes in matrices]
    x = torch.randn(3, columns)
    for rows_of_x in (x, x[:1]):
        expected = torch.stack([number @ row for number, row in zip(numbers, rows_of_x.double().expand(3, -1), strict=True)])
        scale = max(float((number.abs() @ row.abs()).max()) for number, row in zip(numbers, x.double(), strict=True))
        assert float((kind.product(pages, rows_of_x) - expected).abs().max()) <= 2e-6 * max(scale, 1e-6)
    torch.testing.assert_close(kind.weights(pages[0], torch.empty(rows, columns)).double(), numbers[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["int4", "fp8", "q6_k"])
def test_blocks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of rows, and several matrices at once, give what one piece gives."""
    fmt = FORMATS[name]
    codes = [_codes(fmt, 256, 320, i) for i in range(5)]
    pages, x = [_page(c, fmt) for c in codes], torch.randn(1, 320)
    whole = PackedTile(fmt, 256, 320, Workspace(320)).product(pages, x)
    monkeypatch.setattr(packed_products, "block_weights", lambda columns: 3 * 448)
    torch.testing.assert_close(PackedTile(fmt, 256, 320, Workspace(320)).product(pages, x), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if in_planes(fmt)])
@given(size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_planes_are_as_near_as_bfloat16_allows(name: str, size: tuple[int, int], seed: int) -> None:
    fmt, (rows, columns) = FORMATS[name], size
    codes = _codes(fmt, rows, columns, seed)
    kind = PlaneTile(fmt, rows, columns)
    page = torch.full((kind.parts.num_bytes + 64,), 255, dtype=torch.uint8)
    kind.write(codes, page)
    assert bool((page[kind.parts.num_bytes :] == 255).all())
    x, numbers = torch.randn(2, columns), dequantize(codes, fmt)
    # Each plane is rounded by itself, in steps of its largest numbers.
    scale = numbers.abs().amax(1, keepdim=True).clamp_min(float(numbers.abs().max()) / 4) * x.abs().sum(1)
    out = products(kind, [page, page], x)
    assert bool(((out - x @ numbers.t()).abs() <= 0.02 * scale.t() + 1e-6).all())
    assert torch.equal(out[:1], products(kind, [page.clone()], x[:1])), "it matters where a page lies"


def test_four_bits_of_simple_scales_are_exact_in_planes() -> None:
    """Scales that bfloat16 holds, and x and results of few bits, leave nothing to round."""
    fmt = PackedFormat("int4", 32, "f16", bias=8)
    values = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    codes = Codes(values, torch.full((16, 2), 0.25, dtype=torch.float16))
    kind = PlaneTile(fmt, 16, 64)
    page = torch.zeros(kind.parts.num_bytes, dtype=torch.uint8)
    kind.write(codes, page)
    x = torch.zeros(1, 64)
    x[0, ::16] = 1.0
    assert torch.equal(products(kind, [page], x), x @ dequantize(codes, fmt).t())
