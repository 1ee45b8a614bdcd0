"""What the MoE kernels cost over packed weights: beside what the bandwidth allows for their own bytes, and beside bfloat16 in the same run.

Pages hold random codes (`packed.py`), in order of the experts or shuffled; times come from CUDA graphs whose replays take turns, as in
`kernels.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rimuru_cli.bench.kernels import MOE_SHAPES, MoeShape, replay_times
from rimuru_cli.bench.packed import QUANTS, random_codes
from rimuru_kernels.fused_moe import MoeWorkspace, expert_page_bytes, launch, packed_launch
from rimuru_kernels.packed_weights import PackedFormat, pack, page_bytes

SHAPES = ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 4096)
FLOOR_BYTES_PER_SECOND = 4.1e12
"""What a large copy reached on an H200, reads and writes together."""
PLAIN = "bfloat16"
IN_ORDER, SHUFFLED = "pages in order", "pages shuffled"
_KINDS = 4


def run_packed_bench(
    *,
    shapes: Sequence[str] = SHAPES,
    quants: Sequence[str] = tuple(QUANTS),
    tokens: Sequence[int] = TOKENS,
    rounds: int = 11,
    seed: int = 0,
) -> dict[str, Any]:
    """Times the MoE op over packed weights on the CUDA device, activations in bfloat16, routing random.

    Args:
        shapes: names in `MOE_SHAPES`; quants: names in `packed.QUANTS`; tokens: numbers of tokens.
        rounds: samples per variant; the median counts.
        seed: of activations, routing and placement.

    Returns:
        JSON-able: "device" and "rows", each with shape, quant, tokens, "us" of shuffled pages, "in_order_us", "floor_us" (the bytes of the
        experts in use, at 4.1 TB/s), "floor_share" of the time, "bfloat16_us" and "rate" beside bfloat16 (above 1: faster).

    Raises:
        ValueError: no CUDA device, an unknown shape or quantisation.
    """
    unknown = [name for name in shapes if name not in MOE_SHAPES] + [name for name in quants if name not in QUANTS]
    if unknown:
        raise ValueError(f"no such shape or quantisation: {', '.join(unknown)}; there are {', '.join((*MOE_SHAPES, *QUANTS))}")
    if not torch.cuda.is_available():
        raise ValueError("kernels are timed on a CUDA device, and there is none here")
    rows = []
    for name in shapes:
        shape = MOE_SHAPES[name]
        plain = _PlainLayer(shape, seed)
        for quant in quants:
            layer = _PackedLayer(shape, QUANTS[quant], seed)
            rows += [
                {"shape": name, "quant": quant, "tokens": count} | _measure(shape, plain, layer, count, rounds, seed) for count in tokens
            ]
            del layer
        del plain
        torch.cuda.empty_cache()
    return {"op": "packed-moe", "device": torch.cuda.get_device_name(), "dtype": PLAIN, "rounds": rounds, "rows": rows}


class _PlainLayer:
    """Random bfloat16 experts in shuffled pages."""

    def __init__(self, shape: MoeShape, seed: int) -> None:
        draw = torch.Generator(device="cuda").manual_seed(seed)
        matrix = shape.f * shape.d
        values = torch.empty(3 * shape.num_experts, matrix, dtype=torch.bfloat16, device="cuda")
        for page in values:
            page.copy_(torch.randn(matrix, generator=draw, device="cuda").mul_(shape.d**-0.5))
        self.pool = values.view(torch.uint8).view(-1)
        places = torch.randperm(3 * shape.num_experts, generator=draw, device="cuda").view(-1, 3)
        self.entries = (places * (matrix * 2 // 256)).to(torch.int32).contiguous()


class _PackedLayer:
    """Random packed experts, a few kinds copied, in pages in order and, the same pages, shuffled."""

    def __init__(self, shape: MoeShape, formats: tuple[PackedFormat, PackedFormat], seed: int) -> None:
        draw = torch.Generator(device="cuda").manual_seed(seed)
        experts, _, d, f = shape
        self.formats = formats
        size = expert_page_bytes(formats, f, d)
        self.expert_bytes = 2 * page_bytes(formats[0], f, d) + page_bytes(formats[1], d, f)
        pages = torch.zeros(2 * 3 * experts, size, dtype=torch.uint8, device="cuda")
        places = torch.randperm(3 * experts, generator=draw, device="cuda").view(experts, 3)
        in_order = 3 * experts + torch.arange(3 * experts, device="cuda").view(experts, 3)
        for part, (rows, columns) in enumerate(((f, d), (f, d), (d, f))):
            fmt = formats[part // 2]
            for kind in range(_KINDS):
                content = pack(random_codes(fmt, rows, columns, 10 * kind + part), fmt).cuda()
                for entries in (places, in_order):
                    pages[entries[kind::_KINDS, part], : len(content)] = content
        self.pool = pages.view(-1)
        self.entries = {
            IN_ORDER: (in_order * (size // 256)).to(torch.int32).contiguous(),
            SHUFFLED: (places * (size // 256)).to(torch.int32).contiguous(),
        }


def _measure(shape: MoeShape, plain: _PlainLayer, layer: _PackedLayer, tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    e, k, d, f = shape
    calls = 16 if tokens <= 8 else 8 if tokens <= 128 else 2
    draw = torch.Generator(device="cuda").manual_seed(seed)
    xs = [torch.randn(tokens, d, generator=draw, device="cuda").to(torch.bfloat16) for _ in range(calls)]
    ids = [torch.rand(tokens, e, generator=draw, device="cuda").topk(k)[1].contiguous() for _ in range(calls)]
    weights = torch.rand(tokens, k, generator=draw, device="cuda")
    workspace = MoeWorkspace(tokens, k, e, f, d, torch.bfloat16, torch.device("cuda"))
    out = torch.empty_like(xs[0])

    def packed(entries: Tensor) -> Callable[[], None]:
        def calls_in_turn() -> None:
            for x, chosen in zip(xs, ids, strict=True):
                packed_launch.run(x, chosen, weights, layer.pool, entries, layer.formats, f, out, workspace)

        return calls_in_turn

    def beside() -> None:
        places = launch.paged_weights(plain.pool, plain.entries, torch.bfloat16)
        for x, chosen in zip(xs, ids, strict=True):
            launch.run(x, chosen, weights, places, f, out, workspace)

    variants = {PLAIN: beside} | {name: packed(entries) for name, entries in layer.entries.items()}
    us = {name: seconds / calls * 1e6 for name, seconds in replay_times(variants, rounds).items()}
    used = statistics.fmean(float(len(set(chosen.flatten().tolist()))) for chosen in ids)
    floor = used * layer.expert_bytes / FLOOR_BYTES_PER_SECOND * 1e6
    return {
        "us": round(us[SHUFFLED], 2),
        "in_order_us": round(us[IN_ORDER], 2),
        "floor_us": round(floor, 2),
        "floor_share": round(floor / us[SHUFFLED], 3),
        "bfloat16_us": round(us[PLAIN], 2),
        "rate": round(us[PLAIN] / us[SHUFFLED], 3),
    }
