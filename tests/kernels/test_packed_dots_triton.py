"""The row kernels with activations of two bytes, where products are sums of integers, against float64: every format, in turns."""

from __future__ import annotations

import pytest
import torch
from packed_moe import FORMATS, PackedLayer
from triton_device import DEVICE, ON_GPU, relative_error

from rimuru_kernels.fused_moe import packed_launch
from rimuru_kernels.fused_moe.packed_configs import PackedPlan, PackedRowsConfig, rows_table
from rimuru_kernels.packed_weights import page_parts
from rimuru_kernels.packed_weights.dots import multiplies_integers

AT_ONCE = PackedPlan((PackedRowsConfig(4, 4, 1, 1), PackedRowsConfig(2, 4, 1, 1)), None)
IN_TURNS = PackedPlan((PackedRowsConfig(2, 2, 2, 1), PackedRowsConfig(2, 2, 2, 1, registers=128)), None)
PLANS = {"at once": AT_ONCE, "in turns": IN_TURNS}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def run(layer: PackedLayer, plan: PackedPlan, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    workspace = layer.workspace(x.shape[0], ids.shape[1], x.dtype, DEVICE)
    out = torch.full_like(x, torch.nan, device=DEVICE)
    arguments = [t.to(DEVICE) for t in (x, ids, weights, layer.pool, layer.entries)]
    packed_launch.run(*arguments, layer.formats, layer.f, out, workspace, plan)
    return out.cpu()


@pytest.mark.parametrize("dtype", TOLERANCE if ON_GPU else [torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS if ON_GPU else ["in turns"])
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.values != "fp8"])
def test_every_format_against_float64(name: str, plan: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    assert multiplies_integers(fmt, 64, 64, 2)
    layer = PackedLayer((fmt, fmt), 2, 64, 64)
    x, ids, weights = torch.randn(1, 64).to(dtype), torch.tensor([[1, 0]] if ON_GPU else [[1]]), torch.rand(1, 2 if ON_GPU else 1)
    assert relative_error(run(layer, PLANS[plan], x, ids, weights), layer.expected(x, ids, weights)) < TOLERANCE[dtype]


def test_large_and_small_activations_together() -> None:
    """An outlier costs its neighbours no more than its own rounding to bfloat16 would."""
    fmt = FORMATS["int4"]
    layer = PackedLayer((fmt, fmt), 1, 64, 64)
    x = torch.randn(1, 64).to(torch.bfloat16)
    x[0, 37] = 300.0
    ids, weights = torch.tensor([[0]]), torch.ones(1, 1)
    assert relative_error(run(layer, AT_ONCE, x, ids, weights), layer.expected(x, ids, weights)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_numbers_that_are_none_stay_so(value: float) -> None:
    fmt = FORMATS["Q4_K"]
    layer = PackedLayer((fmt, fmt), 1, 64, 64)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = value
    out = run(layer, AT_ONCE, x, torch.tensor([[0]]), torch.ones(1, 1))
    assert bool((out == 0).all()) if value == 0.0 else bool(out.isnan().all())


def test_what_is_multiplied_as_numbers() -> None:
    for fmt, columns, itemsize in (
        (FORMATS["FP8 a row"], 64, 2),
        (FORMATS["int4"], 64, 4),
        (FORMATS["int4"], 96, 2),
        (FORMATS["Q8_0"], 40, 2),
    ):
        assert not multiplies_integers(fmt, 64, columns, itemsize)


@pytest.mark.parametrize("slots", [1, 2, 8, 32])
@pytest.mark.parametrize("columns", [64, 768, 2048, 7168, 16384])
@pytest.mark.parametrize("name", ["int4", "Q8_0", "FP8 in blocks", "Q6_K"])
def test_a_row_fits_the_lanes_of_a_program(name: str, columns: int, slots: int) -> None:
    fmt = FORMATS[name]
    quads = torch.zeros(1, columns // 4, dtype=torch.int64)
    for _, _, config in rows_table(fmt):
        blocks = packed_launch.row_blocks(fmt, 256, columns, config, slots, quads, torch.zeros(256, dtype=torch.uint8))
        lanes, taken = 32 * blocks["num_warps"], blocks["UNITS"] * slots * blocks["BN"]
        assert blocks["CHUNKS"] * blocks["UNITS"] * 16 >= page_parts(fmt, 256, columns).values.row_bytes
        assert blocks["num_warps"] <= 16 and (taken == lanes or taken > lanes == 512 or columns == 64)
