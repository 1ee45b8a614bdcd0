"""What the MoE kernels cost on this graphics card: against the same kernels over contiguous weights, torch's grouped products, the floor.

Times come from CUDA graphs: every variant of one size is captured once, the variants are replayed in turn, and medians over the rounds
count, so that drifting clocks meet all variants alike. Up to 8 tokens a graph holds many calls with different tokens, so that no weights
come from a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class MoeShape(NamedTuple):
    """Experts, experts per token, hidden size, expert intermediate size of one layer."""

    num_experts: int
    top_k: int
    d: int
    f: int


MOE_SHAPES = {
    "Qwen3-30B-A3B": MoeShape(128, 8, 2048, 768),
    "Qwen1.5-MoE-A2.7B": MoeShape(60, 4, 2048, 1408),
    "Qwen3.5-35B-A3B": MoeShape(256, 8, 2048, 512),
}
MOE_TOKENS = tuple(1 << power for power in range(14))
FLOOR_BYTES_PER_SECOND = 4.0e12
FLOOR_FLOPS_PER_SECOND = 790e12
BASELINE = "contiguous"
BASELINE_AGAIN = "contiguous again"
PLACEMENTS = ("pages in order", "pages shuffled", "75 % pages, 25 % buffer", "50 % pages, 50 % buffer")
SAME = ("pages shuffled", "pages shuffled 2", "pages shuffled 3", "pages shuffled 4")
"""One placement captured as often as there are placements: how far these are apart is noise."""
GROUPED_MM = "torch._grouped_mm"
DENSE = "torch.matmul"
"""The same arithmetic as two dense products with one expert's weights: what no MoE layer can beat on this card, in its present state."""
DENSE_FROM_TOKENS = 1024


def run_kernel_bench(
    op: str = "fused_moe", *, shapes: Sequence[str] = tuple(MOE_SHAPES), tokens: Sequence[int] = MOE_TOKENS, rounds: int = 21, seed: int = 0
) -> dict[str, Any]:
    """Times an op of rimuru_kernels on the CUDA device, in bfloat16 and with random routing.

    Args:
        op: "fused_moe".
        shapes: names in MOE_SHAPES.
        tokens: numbers of tokens.
        rounds: samples per variant; the median counts.
        seed: of weights, activations, routing and placement.

    Returns:
        JSON-able: "device", "op" and "rows", each with shape, tokens, "us" (variant -> median microseconds), "overhead_percent" (placement
        -> against the same kernel over contiguous weights), "noise_percent" (between four captures of one placement), "spread_percent"
        (between placements), "floor_us", "times_floor".

    Raises:
        ValueError: an unknown op or shape, or no CUDA device.
    """
    import torch

    if op != "fused_moe":
        raise ValueError(f"no kernel benchmark of this name: {op!r}; there is 'fused_moe'")
    unknown = [name for name in shapes if name not in MOE_SHAPES]
    if unknown:
        raise ValueError(f"no such shape: {', '.join(unknown)}; there are {', '.join(MOE_SHAPES)}")
    if not torch.cuda.is_available():
        raise ValueError("kernels are timed on a CUDA device, and there is none here")
    rows = []
    for name in shapes:
        layer = _Layer(MOE_SHAPES[name], seed)
        rows += [{"shape": name, "tokens": count} | _measure(layer, count, rounds) for count in tokens]
        del layer
        torch.cuda.empty_cache()
    return {"op": op, "device": torch.cuda.get_device_name(), "dtype": "bfloat16", "rounds": rounds, "rows": rows}


def moe_floor_seconds(shape: MoeShape, tokens: int, experts_used: float) -> float:
    """Least time of one layer: the used experts' weights read once, or the arithmetic, whichever is longer."""
    weights = experts_used * 3 * shape.d * shape.f * 2 / FLOOR_BYTES_PER_SECOND
    return max(weights, tokens * shape.top_k * 3 * shape.d * shape.f * 2 / FLOOR_FLOPS_PER_SECOND)


class _Layer:
    """One layer's random experts: contiguous, in shuffled pages of a pool, and in order behind them (the loading buffer)."""

    def __init__(self, shape: MoeShape, seed: int) -> None:
        import torch

        self.shape = shape
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        e, _, d, f = shape
        matrix = f * d
        self.pool = torch.empty(6 * e * matrix * 2, dtype=torch.uint8, device="cuda")
        pages = self.pool.view(torch.bfloat16).view(6 * e, matrix)
        self.gate_up = torch.empty(e, 2 * f, d, dtype=torch.bfloat16, device="cuda")
        self.down = torch.empty(e, d, f, dtype=torch.bfloat16, device="cuda")
        shuffled = torch.randperm(3 * e, generator=self.generator, device="cuda").view(e, 3)
        in_order = torch.arange(3 * e, 6 * e, device="cuda").view(e, 3)
        for expert in range(e):
            values = torch.randn(3, matrix, generator=self.generator, device="cuda").mul_(d**-0.5).to(torch.bfloat16)
            pages[shuffled[expert]] = values
            pages[in_order[expert]] = values
            self.gate_up[expert] = values[:2].view(2 * f, d)
            self.down[expert] = values[2].view(d, f)
        unit = matrix * 2 // 256
        share = torch.rand(e, 1, generator=self.generator, device="cuda")
        self.entries: dict[str, Tensor] = {
            name: (page * unit).to(torch.int32).contiguous()
            for name, page in zip(
                PLACEMENTS,
                (in_order, shuffled, torch.where(share < 0.75, shuffled, in_order), torch.where(share < 0.5, shuffled, in_order)),
                strict=True,
            )
        }


def _measure(layer: _Layer, tokens: int, rounds: int) -> dict[str, Any]:
    import torch

    from rimuru_kernels.fused_moe import MoeWorkspace, launch

    e, k, d, f = layer.shape
    calls = 16 if tokens <= 8 else 8 if tokens <= 512 else 2
    generator = layer.generator
    xs = [torch.randn(tokens, d, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(calls)]
    ids = [torch.rand(tokens, e, generator=generator, device="cuda").topk(k)[1].contiguous() for _ in range(calls)]
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    workspace = MoeWorkspace(tokens, k, e, f, d, torch.bfloat16, torch.device("cuda"))
    out = torch.empty_like(xs[0])

    def ours(places: launch.Weights) -> Callable[[], None]:
        def calls_in_turn() -> None:
            for x, chosen in zip(xs, ids, strict=True):
                launch.run(x, chosen, weights, places, f, out, workspace)

        return calls_in_turn

    baseline = ours(launch.contiguous_weights(layer.gate_up, layer.down))
    variants = {BASELINE: baseline, BASELINE_AGAIN: baseline}
    variants |= {name: ours(launch.paged_weights(layer.pool, entries, torch.bfloat16)) for name, entries in layer.entries.items()}
    shuffled = variants["pages shuffled"]
    variants |= dict.fromkeys(SAME, shuffled)
    variants[GROUPED_MM] = _grouped_mm(layer, xs, ids)
    if tokens >= DENSE_FROM_TOKENS:
        variants[DENSE] = _dense(layer, tokens * k, calls)
    medians = {name: seconds / calls * 1e6 for name, seconds in replay_times(variants, rounds).items()}
    base = statistics.fmean((medians[BASELINE], medians[BASELINE_AGAIN]))
    used = statistics.fmean(float(len(set(chosen.flatten().tolist()))) for chosen in ids)
    floor = moe_floor_seconds(layer.shape, tokens, used) * 1e6
    paged = [medians[name] for name in PLACEMENTS]
    return {
        "us": {name: round(value, 2) for name, value in medians.items()},
        "overhead_percent": {name: round(100 * (medians[name] / base - 1), 2) for name in PLACEMENTS},
        "overhead_us": round(statistics.fmean(paged) - base, 2),
        "noise_percent": _spread_percent([medians[name] for name in SAME]),
        "spread_percent": _spread_percent(paged),
        "experts_used": round(used, 1),
        "floor_us": round(floor, 1),
        "times_floor": round(statistics.fmean(paged) / floor, 3),
    }


def _spread_percent(values: list[float]) -> float:
    return round(100 * (max(values) / min(values) - 1), 2)


def _dense(layer: _Layer, pairs: int, calls: int) -> Callable[[], None]:
    import torch

    x = torch.randn(pairs, layer.shape.d, generator=layer.generator, device="cuda").to(torch.bfloat16)
    h = torch.randn(pairs, layer.shape.f, generator=layer.generator, device="cuda").to(torch.bfloat16)

    def calls_in_turn() -> None:
        for _ in range(calls):
            torch.matmul(x, layer.gate_up[0].t())
            torch.matmul(h, layer.down[0].t())

    return calls_in_turn


def _grouped_mm(layer: _Layer, xs: list[Tensor], ids: list[Tensor]) -> Callable[[], None]:
    """Two grouped products and the activation over rows that lie sorted already; without routing, gather and the sum over slots."""
    import torch

    e, k, _, f = layer.shape
    rows = [x[chosen.view(-1).sort(stable=True)[1] // k] for x, chosen in zip(xs, ids, strict=True)]
    ends = [torch.bincount(chosen.view(-1), minlength=e).cumsum(0).to(torch.int32) for chosen in ids]
    gate_up, down = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)

    def calls_in_turn() -> None:
        for row, end in zip(rows, ends, strict=True):
            hidden = torch._grouped_mm(row, gate_up, offs=end)
            torch._grouped_mm(torch.nn.functional.silu(hidden[:, :f]) * hidden[:, f:], down, offs=end)

    return calls_in_turn


def replay_times(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each variant, replayed in turn from CUDA graphs; every second round runs backwards."""
    import torch

    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, function in variants.items():
        function()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            function()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):
        for name in list(graphs)[:: -1 if number % 2 else 1]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graphs[name].replay()
            stop.record()
            stop.synchronize()
            if number >= 2:  # the first two warm up
                samples[name].append(start.elapsed_time(stop) / 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}
