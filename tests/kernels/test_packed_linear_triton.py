"""A dense matrix that stays packed: products of few and of many rows, and rows looked up, against its numbers in float64."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, DTYPES, TOLERANCE, poisoned, relative_error

from rimuru_cli.bench.packed import QUANTS, random_codes
from rimuru_kernels.packed_linear import MAX_ROWS, launch, packed_linear, packed_rows
from rimuru_kernels.packed_weights import PackedFormat, dequantize, pack

FORMATS = {
    **{name: formats.gate_up for name, formats in QUANTS.items()},
    "q6_k": QUANTS["q4_k_m"].down,
    "int8 by rows": PackedFormat("int8", 0, "bf16"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_few_rows_against_float64(name: str, dtype: torch.dtype) -> None:
    tokens, n, k = 2, 9, 384
    fmt = FORMATS[name]
    codes = random_codes(fmt, n, k, 0)
    x = torch.randn(tokens, k).to(dtype)
    out = poisoned(tokens, n, dtype=dtype)
    launch.few_rows(x.to(DEVICE), pack(codes, fmt).to(DEVICE), fmt, out)
    assert relative_error(out, x.double() @ dequantize(codes, fmt).double().t()) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, MAX_ROWS + 1])
def test_any_number_of_rows_is_a_linear_layer(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rimuru_kernels.packed_linear.PACKED_NUMBERS", 60 * 256)  # several parts
    fmt = FORMATS[name]
    codes = random_codes(fmt, 300, 256, 1)
    x, bias = torch.randn(tokens, 256, device=DEVICE), torch.randn(300, device=DEVICE)
    expected = torch.nn.functional.linear(x, dequantize(codes, fmt).to(DEVICE), bias)
    torch.testing.assert_close(packed_linear(x, pack(codes, fmt).to(DEVICE), fmt, 300, bias), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_looked_up(name: str) -> None:
    fmt = FORMATS[name]
    codes = random_codes(fmt, 300, 256, 2)
    ids = torch.tensor([299, 0, 128, 127, 0], device=DEVICE)
    rows = packed_rows(pack(codes, fmt).to(DEVICE), fmt, (300, 256), ids, torch.float32)
    assert torch.equal(rows.cpu(), dequantize(codes, fmt)[ids.cpu()])


def test_what_does_not_go_together() -> None:
    fmt = FORMATS["int4"]
    page = pack(random_codes(fmt, 8, 64, 0), fmt).to(DEVICE)
    x = torch.randn(2, 64, device=DEVICE)
    for arguments in ((x[0], page, fmt, 8), (x, page[:-1], fmt, 8), (x, page, fmt, 9), (x, page.view(1, -1), fmt, 8)):
        with pytest.raises(ValueError, match="packed_linear"):
            packed_linear(*arguments)
    with pytest.raises(ValueError, match="bias"):
        packed_linear(x, page, fmt, 8, torch.zeros(7, device=DEVICE))
