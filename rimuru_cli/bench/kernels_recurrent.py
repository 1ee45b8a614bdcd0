"""The kernels of recurrent layers beside what memory and matrix units allow, in Qwen3.5-35B-A3B's shape; Mamba-2's step in Granite's.

States lie in shuffled pages of one pool. Decode moves every state twice (read and written); so that they come from memory, several
pools take turns. The bandwidth that decode is measured against is that of a copy on the same card, in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.bench.graph_time import graph_microseconds
from rimuru_kernels.causal_conv1d import causal_conv1d_entries
from rimuru_kernels.gated_delta_rule import gated_delta_rule_entries
from rimuru_kernels.gated_delta_rule import reference as delta_rule_in_torch
from rimuru_kernels.mamba2 import state_space_entries
from rimuru_models.errors import UsageError

HEADS, KEY_HEADS, DIM, TAPS, CHUNK = 32, 16, 128, 4, 64
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
STATE = HEADS * DIM * DIM
MAMBA_HEADS, MAMBA_DIM, MAMBA_STATE = 128, 64, 128
BATCHES = (1, 4, 8, 16, 32, 64)
PROMPTS = ((512,), (4096,), (512,) * 8, (3000, 1, 900, 100, 7))
DECODE_GOAL = 0.6
GOAL_BATCH = 8
_ROTATED_BYTES = 512 << 20


class PagedStates:
    """Random float32 states, or rows, of `elements` each in shuffled pages of one pool; entries int32 [count]."""

    def __init__(self, count: int, elements: int, dtype: torch.dtype = torch.float32) -> None:
        page_bytes = elements * dtype.itemsize
        values = torch.randn(count, elements, device="cuda", dtype=dtype)
        self.pool = values.view(torch.uint8).view(-1)
        self.entries = (torch.randperm(count, device="cuda") * (page_bytes // 256)).to(torch.int32)


class Rows:
    """Random rows of the delta rule in bfloat16: q, k and v are parts of one matrix."""

    def __init__(self, tokens: int) -> None:
        self.mixed = torch.randn(tokens, CHANNELS, device="cuda", dtype=torch.bfloat16)
        q, k, v = self.mixed.split_with_sizes([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], 1)
        self.q, self.k, self.v = (part.view(tokens, -1, DIM) for part in (q, k, v))
        self.log_decay = -(torch.rand(tokens, HEADS, device="cuda") ** 4)
        self.beta = torch.rand(tokens, HEADS, device="cuda")

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, log decay and β, as the op takes them."""
        return self.q, self.k, self.v, self.log_decay, self.beta


def run_recurrent_bench() -> dict[str, Any]:
    """Rows for decode and prefill. Needs a GPU.

    Returns:
        JSON-able: device, copy_gb_per_s (read and written), matrix_tflops; `decode` rows (op, batch, us, gb_per_s, share of the copy's
        rate), `prefill` rows (op, tokens, sequences, us, gb_per_s and, for the delta rule, tflops, floor_us, times_floor, torch_us,
        difference from torch's), and whether decode's goal is met.
    """
    if not torch.cuda.is_available():
        raise UsageError("Kernels are measured on a GPU and this machine has none.")
    copied, matrix = copy_rate(), matrix_rate()
    decode = [row for batch in BATCHES for row in decode_rows(batch, copied)]
    prefill = [row for lengths in PROMPTS for row in prefill_rows(lengths, copied, matrix)]
    judged = [row["share"] for row in decode if row["op"] == "delta rule" and row["batch"] >= GOAL_BATCH]
    return {
        "bench": "recurrent",
        "device": torch.cuda.get_device_name(),
        "copy_gb_per_s": round(copied, 1),
        "matrix_tflops": round(matrix, 1),
        "decode": decode,
        "prefill": prefill,
        "decode_goal_met": all(share >= DECODE_GOAL for share in judged),
    }


def copy_rate() -> float:
    """GB/s that the GPU reads and writes together: of the driver's copy and a kernel that does as little, the better."""
    source = torch.randn(256 << 20, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target))
    return max(2 * source.numel() * 4 / graph_microseconds([way]) / 1e3 for way in ways)


def matrix_rate() -> float:
    """TFLOP/s of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / graph_microseconds([lambda: a @ b]) / 1e6


def decode_rows(batch: int, copied: float) -> list[dict[str, Any]]:
    """One row for each of `batch` sequences: the delta rule, the convolution, Mamba-2's step."""
    moved = {
        "delta rule": 2 * batch * STATE * 4,
        "convolution": batch * CHANNELS * 2 * (2 * (TAPS - 1) + 2),
        "mamba-2": 2 * batch * MAMBA_HEADS * MAMBA_DIM * MAMBA_STATE * 4,
    }
    makers: dict[str, Callable[[int], Callable[[], object]]] = {
        "delta rule": _delta_call,
        "convolution": _convolution_call,
        "mamba-2": _mamba_call,
    }
    rows = []
    for op, make in makers.items():
        sets = max(1, min(16, _ROTATED_BYTES // moved[op]))
        us = graph_microseconds([make(batch) for _ in range(sets)], repeats=4)
        rate = moved[op] / us / 1e3
        rows.append({"op": op, "batch": batch, "us": round(us, 2), "gb_per_s": round(rate, 1), "share": round(rate / copied, 3)})
    return rows


def prefill_rows(lengths: tuple[int, ...], copied: float, matrix: float) -> list[dict[str, Any]]:
    """Prompts of these lengths in one call: the delta rule beside its floor and torch's products, and the convolution."""
    tokens, chunks = sum(lengths), sum(-(-length // CHUNK) for length in lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    rows, states = Rows(tokens), PagedStates(len(lengths), STATE)
    us = graph_microseconds([_delta_prefill_call(rows, states, bounds)])
    # k kᵀ, q kᵀ, w, y, scores u; then w S, kᵀ u, q S. The triangular system is not counted.
    flops = chunks * HEADS * 2 * (CHUNK * CHUNK * 5 * DIM + CHUNK * 3 * DIM * DIM)
    moved = tokens * (CHANNELS + HEADS * DIM) * 2 + tokens * HEADS * 8 + 2 * len(lengths) * STATE * 4
    floor = max(flops / matrix / 1e6, moved / copied / 1e3)
    torch_us, difference = _beside_torch(rows, lengths)
    common = {"tokens": tokens, "sequences": len(lengths)}
    delta = {"op": "delta rule"} | common | {"us": round(us, 1), "gb_per_s": round(moved / us / 1e3, 1)}
    delta |= {"tflops": round(flops / us / 1e6, 1), "floor_us": round(floor, 1), "times_floor": round(us / floor, 2)}
    delta |= {"torch_us": round(torch_us, 1), "difference": float(f"{difference:.1e}")}
    pages = PagedStates(len(lengths) * (TAPS - 1), CHANNELS, torch.bfloat16)
    us = graph_microseconds([_convolution_call(tokens, pages, bounds)])
    convolution = {"op": "convolution"} | common | {"us": round(us, 1), "gb_per_s": round(2 * tokens * CHANNELS * 2 / us / 1e3, 1)}
    return [delta, convolution, _mamba_prefill_row(lengths, copied, matrix)]


def _mamba_prefill_row(lengths: tuple[int, ...], copied: float, matrix: float) -> dict[str, Any]:
    """Mamba-2's state space over prompts, beside its floor."""
    tokens, chunks = sum(lengths), sum(-(-length // CHUNK) for length in lengths)
    x, dt, a_log, b, c, d = _mamba_inputs(tokens)
    states = PagedStates(len(lengths), MAMBA_HEADS * MAMBA_DIM * MAMBA_STATE)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    us = graph_microseconds([lambda: state_space_entries(x, dt, a_log, b, c, d, states.pool, states.entries, bounds)])
    # c bᵀ for the one group; then for each head its product with x, c Sᵀ and x bᵀ.
    heads = MAMBA_HEADS * MAMBA_DIM
    flops = chunks * 2 * CHUNK * (CHUNK * MAMBA_STATE + CHUNK * heads + 2 * MAMBA_STATE * heads)
    moved = tokens * (2 * heads + 2 * MAMBA_STATE) * 2 + tokens * MAMBA_HEADS * 4 + 2 * len(lengths) * heads * MAMBA_STATE * 4
    floor = max(flops / matrix / 1e6, moved / copied / 1e3)
    row = {"op": "mamba-2", "tokens": tokens, "sequences": len(lengths), "us": round(us, 1), "gb_per_s": round(moved / us / 1e3, 1)}
    return row | {"tflops": round(flops / us / 1e6, 1), "floor_us": round(floor, 1), "times_floor": round(us / floor, 2)}


def _beside_torch(rows: Rows, lengths: tuple[int, ...]) -> tuple[float, float]:
    """Microseconds of the plain torch form in float32, and ‖kernel - torch‖ / ‖torch‖ of outputs from the same states."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    states = PagedStates(len(lengths), STATE)
    views = [states.pool[int(entry) * 256 :][: STATE * 4].view(torch.float32).view(HEADS, DIM, DIM) for entry in states.entries]
    start = [view.clone() for view in views]
    times = []
    for _ in range(2):
        copies = [state.clone() for state in start]
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        expected = delta_rule_in_torch.gated_delta_rule(*rows.parts, copies, bounds.tolist())
        last.record()
        torch.cuda.synchronize()
        times.append(float(first.elapsed_time(last)) * 1000.0)
    out = gated_delta_rule_entries(*rows.parts, states.pool, states.entries, bounds.to("cuda", torch.int32))
    pairs = [(out, expected), *zip(views, copies, strict=True)]
    return times[-1], max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def _delta_call(batch: int) -> Callable[[], object]:
    rows, states = Rows(batch), PagedStates(batch, STATE)
    return lambda: gated_delta_rule_entries(*rows.parts, states.pool, states.entries)


def _delta_prefill_call(rows: Rows, states: PagedStates, bounds: Tensor) -> Callable[[], object]:
    return lambda: gated_delta_rule_entries(*rows.parts, states.pool, states.entries, bounds)


def _convolution_call(rows: int, pages: PagedStates | None = None, bounds: Tensor | None = None) -> Callable[[], object]:
    x = torch.randn(rows, CHANNELS, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(TAPS, CHANNELS, device="cuda", dtype=torch.bfloat16)
    states = pages or PagedStates(rows * (TAPS - 1), CHANNELS, torch.bfloat16)
    entries = states.entries.view(-1, TAPS - 1)
    return lambda: causal_conv1d_entries(x, weight, None, states.pool, entries, bounds)


def _mamba_call(batch: int) -> Callable[[], object]:
    states, inputs = PagedStates(batch, MAMBA_HEADS * MAMBA_DIM * MAMBA_STATE), _mamba_inputs(batch)
    return lambda: state_space_entries(*inputs, states.pool, states.entries)


def _mamba_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, dt, a_log, b, c and d, as the op takes them."""
    x = torch.randn(tokens, MAMBA_HEADS, MAMBA_DIM, device="cuda", dtype=torch.bfloat16)
    b, c = (torch.randn(tokens, 1, MAMBA_STATE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a_log, d = torch.rand(2, MAMBA_HEADS, device="cuda")
    return x, torch.rand(tokens, MAMBA_HEADS, device="cuda"), a_log, b, c, d
