"""What the page allocator costs: a token block over all layers of Qwen3-30B-A3B, and a long random trace. No model, no torch."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from rimuru_cli.engine.memory.allocator import OutOfPages, PageAllocator
from rimuru_cli.engine.memory.geometry import PageKind, PoolGeometry

NUM_LAYERS = 48
POOL_HUGE_PAGES = 4000
GOAL_MICROSECONDS = 150.0
TRACE_OPERATIONS = 100_000


def run_allocator_bench(repeats: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Times the allocator on pages of Qwen3-30B-A3B (experts of 3 x 3 MiB, KV blocks of 16 tokens: 32 KiB a layer).

    A token block is 48 KV pages, allocated together and freed together. It is timed in a pool that is empty, in one that is half full
    of scattered KV pages, and in one where every expert-sized page has a single free KV page left, so that 48 pages come from 48 places.

    Args:
        repeats: token blocks per pool.
        seed: of the scattering and of the trace.

    Returns:
        JSON-able: sizes in bytes, "token_block_us" (pool -> median, p99, max in microseconds), "trace", and whether the goal is met.
    """
    geometry = PoolGeometry.build(f=768, d=2048, weight_itemsize=2, kv_heads=4, head_dim=128, kv_itemsize=2, block_tokens=16)
    rng = random.Random(seed)
    timings: dict[str, dict[str, float]] = {}

    allocator = PageAllocator(geometry, POOL_HUGE_PAGES * geometry.huge_page_bytes)
    timings["empty"] = _time_token_blocks(allocator, repeats)
    pages = allocator.allocate(PageKind.KV, allocator.available(PageKind.KV))
    per_parent = geometry.layout(PageKind.KV).per_parent
    holes = [first + rng.randrange(per_parent) for first in range(0, len(pages), per_parent)]
    rng.shuffle(holes)
    allocator.free(pages[hole] for hole in holes)
    timings["nearly_full"] = _time_token_blocks(allocator, repeats)
    taken = set(holes)
    rest = [page for number, page in enumerate(pages) if number not in taken]
    rng.shuffle(rest)
    allocator.free(rest[: len(rest) // 2])
    timings["half_full"] = _time_token_blocks(allocator, repeats)
    allocator.check_integrity()

    return {
        "geometry": {
            "model": "Qwen3-30B-A3B",
            "num_layers": NUM_LAYERS,
            "expert_page_bytes": geometry.expert_page_bytes,
            "kv_page_bytes": geometry.kv_page_bytes,
            "huge_page_bytes": geometry.huge_page_bytes,
            "pool_bytes": allocator.pool_bytes,
        },
        "repeats": repeats,
        "token_block_us": timings,
        "goal_us": GOAL_MICROSECONDS,
        "goal_met": all(timing["median"] < GOAL_MICROSECONDS for timing in timings.values()),
        "trace": _time_trace(seed),
    }


def _time_token_blocks(allocator: PageAllocator, repeats: int) -> dict[str, float]:
    """Microseconds to allocate and free one token block over all layers."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        allocator.free(allocator.allocate(PageKind.KV, NUM_LAYERS))
        samples.append((time.perf_counter_ns() - start) / 1000)
    samples.sort()
    p99 = samples[min(len(samples) - 1, len(samples) * 99 // 100)]
    return {"median": round(statistics.median(samples), 2), "p99": round(p99, 2), "max": round(samples[-1], 2)}


def _time_trace(seed: int) -> dict[str, Any]:
    """Random operations on all four kinds of pages of Qwen3.5-122B-A10B (2 experts or 3 states a huge page), the pool mostly full."""
    geometry = PoolGeometry.from_bytes(6 << 20, 32_768, 4 << 20, 24_576)
    allocator = PageAllocator(geometry, 100 * geometry.huge_page_bytes)
    rng = random.Random(seed)
    counts = {PageKind.EXPERT: 3, PageKind.SSM: 36, PageKind.KV: NUM_LAYERS}
    held: list[list[int]] = []
    refused = 0
    start = time.perf_counter()
    for _ in range(TRACE_OPERATIONS):
        if held and rng.random() < 0.48:
            place = rng.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            allocator.free(held.pop())
            continue
        kind = rng.choice(geometry.kinds)
        try:
            if kind is PageKind.CONV:
                held.append([page for run in allocator.allocate_runs(kind, 36, 3) for page in run])
            else:
                held.append(allocator.allocate(kind, counts[kind]))
        except OutOfPages:
            refused += 1
    seconds = time.perf_counter() - start
    splits = allocator.splits
    allocator.check_integrity()
    for pages in held:
        allocator.free(pages)
    allocator.check_integrity()
    return {
        "operations": TRACE_OPERATIONS,
        "refused": refused,
        "seconds": round(seconds, 4),
        "operations_per_second": round(TRACE_OPERATIONS / seconds),
        "splits": splits,
        "fully_merged": allocator.free_bytes == allocator.pool_bytes,
    }
