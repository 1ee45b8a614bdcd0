"""Products with packed matrices on a CPU, against the numbers that the codes mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import rounded

from rimuru_cli.bench.packed import QUANTS
from rimuru_cli.engine.experts import code_scratch, number_products, plane_products
from rimuru_cli.engine.experts.number_products import NumberTile
from rimuru_cli.engine.experts.packed_products import PackedTile, Workspace
from rimuru_cli.engine.experts.pages import decoded_columns
from rimuru_cli.engine.experts.plane_products import PlaneTile
from rimuru_cli.engine.experts.planes import in_planes
from rimuru_kernels.packed_weights import Codes, PackedFormat, dequantize, pack, page_bytes

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
    # Products with unit vectors are the numbers themselves.
    torch.testing.assert_close(kind.rows_product(pages[0], torch.eye(columns)).t().double(), numbers[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["int4", "fp8", "q6_k"])
def test_blocks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of rows, and several matrices at once, give what one piece gives."""
    fmt = FORMATS[name]
    codes = [_codes(fmt, 256, 320, i) for i in range(5)]
    pages, x = [_page(c, fmt) for c in codes], torch.randn(1, 320)
    whole = PackedTile(fmt, 256, 320, Workspace(320)).product(pages, x)
    monkeypatch.setattr(code_scratch, "block_weights", lambda columns: 3 * 448)
    torch.testing.assert_close(PackedTile(fmt, 256, 320, Workspace(320)).product(pages, x), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "nvfp4", "q5_k", "q6_k", "int4 in odd groups"])
@pytest.mark.parametrize("made", ["packed", "numbers"])
def test_a_page_is_left_as_it_is(made: str, name: str) -> None:
    """Nothing that is computed from a page changes it, or what lies behind it."""
    fmt, space = FORMATS[name], Workspace(320)
    kind = (PackedTile if made == "packed" else NumberTile)(fmt, 48, 320, space)
    packed = _page(_codes(fmt, 48, 320, 3), fmt)
    page = torch.full((48 * 384 * 2 + 64,), 255, dtype=torch.uint8)
    before = packed.clone()
    kind.write([packed], [page])
    size = page_bytes(fmt, 48, 320) if made == "packed" else 48 * decoded_columns(fmt, 320) * 2
    assert bool((page[size:] == 255).all())
    written, x = page.clone(), torch.randn(2, 320)
    first = kind.product([page, page], x), kind.rows_product(page, x)
    again = kind.product([page, page], x), kind.rows_product(page, x)
    assert torch.equal(packed, before) and torch.equal(page, written)
    assert all(torch.equal(*both) for both in zip(first, again, strict=True))


def _rounding(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Bound of what bfloat16 factors and results lose of x @ numbers.T, [m, rows]: three roundings, each by at most a part in 256."""
    return (x.abs() @ numbers.abs().t()) * 3.02 / 256 + 1e-6


@pytest.mark.parametrize("name", FORMATS)
@given(size=SIZES, seed=st.integers(0, 99), own=st.booleans())
@settings(max_examples=6, deadline=None)
def test_numbers_are_as_near_as_bfloat16_allows(name: str, size: tuple[int, int], seed: int, own: bool) -> None:
    fmt, (rows, columns) = FORMATS[name], size
    codes, kind = _codes(fmt, rows, columns, seed), NumberTile(fmt, rows, columns, Workspace(columns))
    page = torch.full((rows * decoded_columns(fmt, columns) * 2,), 255, dtype=torch.uint8)
    kind.write([_page(codes, fmt)], [page])
    x, numbers = torch.randn(2, columns), dequantize(codes, fmt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_products, "fast_bfloat16", lambda: own)
        out = kind.rows_product(page, x)
    for made in (out, kind.product([page, page], x)):
        assert bool(((made - x @ numbers.t()).abs() <= _rounding(x, numbers)).all())
    assert torch.equal(kind.product([page.clone()], x[:1]), kind.product([page], x[:1])), "it matters where a page lies"


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if in_planes(fmt)])
@given(size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_planes_are_as_near_as_bfloat16_allows(name: str, size: tuple[int, int], seed: int) -> None:
    fmt, (rows, columns) = FORMATS[name], size
    codes = _codes(fmt, rows, columns, seed)
    kind = PlaneTile(fmt, rows, columns, Workspace(columns))
    page = torch.full((kind.parts.num_bytes + 64,), 255, dtype=torch.uint8)
    kind.write([_page(codes, fmt)], [page])
    assert bool((page[kind.parts.num_bytes :] == 255).all())
    x, numbers = torch.randn(2, columns), dequantize(codes, fmt)
    # Multiples and what is added to them are rounded by themselves, in steps of the largest numbers.
    scale = numbers.abs().amax(1, keepdim=True).clamp_min(float(numbers.abs().max()) / 4) * x.abs().sum(1)
    out = kind.product([page, page], x)
    assert bool(((out - x @ numbers.t()).abs() <= 0.02 * scale.t() + 1e-6).all())
    assert bool(((kind.rows_product(page, x) - x @ numbers.t()).abs() <= 0.02 * scale.t() + 1e-6).all())
    assert torch.equal(out[:1], kind.product([page.clone()], x[:1])), "it matters where a page lies"


def test_four_bits_of_simple_scales_are_exact_in_planes() -> None:
    """Scales that bfloat16 holds, and x and results of few bits, leave nothing to round."""
    fmt = PackedFormat("int4", 32, "f16", bias=8)
    values = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    codes = Codes(values, torch.full((16, 2), 0.25, dtype=torch.float16))
    kind = PlaneTile(fmt, 16, 64, Workspace(64))
    page = torch.zeros(kind.parts.num_bytes, dtype=torch.uint8)
    kind.write([_page(codes, fmt)], [page])
    x = torch.zeros(1, 64)
    x[0, ::16] = 1.0
    assert torch.equal(kind.product([page], x), x @ dequantize(codes, fmt).t())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["int4", "q4_k", "awq", "int4 by rows"])
def test_many_rows_at_once_are_as_few(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some number of rows on planes are multiplied in another way, to the same bound."""
    fmt, (rows, columns) = FORMATS[name], (128, 320)
    kind, codes = PlaneTile(fmt, rows, columns, Workspace(columns)), _codes(fmt, rows, columns, 2)
    page = torch.zeros(kind.parts.num_bytes, dtype=torch.uint8)
    kind.write([_page(codes, fmt)], [page])
    x = torch.randn(plane_products.MANY_ROWS, columns)
    few = torch.cat([kind.rows_product(page, part) for part in x.split(5)])
    monkeypatch.setattr(plane_products, "fast_bfloat16", lambda: own)
    many, another_way = kind.rows_product(page, x), plane_products.block_rows() > 0
    monkeypatch.setattr(plane_products, "block_rows", lambda: 0)
    torch.testing.assert_close(kind.rows_product(page, x), few, rtol=1e-6, atol=1e-6)
    bound = x.abs() @ dequantize(codes, fmt).abs().t()
    assert bool(((many - few).abs() <= bound * 2 / 256).all()) and torch.equal(many, few) != another_way


@pytest.mark.parametrize("name", ["q4_k", "awq", "int4 in groups of 16", "int4 by rows"])
@pytest.mark.parametrize(("rows", "columns"), [(128, 192), (64, 96), (80, 64), (200, 128), (48, 576), (576, 48), (50, 30), (7, 400)])
def test_planes_are_arranged_as_torch_does(name: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written without torch's own conversion is what that writes, to the byte, one by one and several at once."""
    known = plane_products.block_rows() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
    assert known, "torch has another arrangement now: absent experts are slow to convert"
    fmt = FORMATS[name]
    packed = [_page(_codes(fmt, rows, columns, seed), fmt) for seed in range(3)]
    kind = PlaneTile(fmt, rows, columns, Workspace(columns))
    monkeypatch.setattr(plane_products, "_SMALL", 0)
    alone = PlaneTile(fmt, rows, columns, Workspace(columns))
    made = {name: [torch.zeros(kind.parts.num_bytes, dtype=torch.uint8) for _ in packed] for name in ("together", "alone", "torch")}
    kind.write(packed, made["together"])
    alone.write(packed, made["alone"])
    monkeypatch.setattr(plane_products, "block_rows", lambda: 0)
    kind.write(packed, made["torch"])
    assert all(torch.equal(*pages) for pages in zip(made["alone"], made["torch"], strict=True))
    assert all(torch.equal(*pages) for pages in zip(made["together"], made["torch"], strict=True))
