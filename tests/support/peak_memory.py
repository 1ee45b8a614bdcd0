"""How much memory a piece of work takes at its height: what torch and numpy allocate, not the files that are mapped."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak_of(work: Callable[[], T]) -> tuple[int, T]:
    """Bytes at the height of `work`, at most, and what it returns."""
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = work()
        numpy_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    events = sorted((e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    now = highest = 0
    for _, num_bytes in events:
        now += num_bytes
        highest = max(highest, now)
    return highest + numpy_peak, result
