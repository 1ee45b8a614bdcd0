"""Time on the GPU without launch gaps: calls are captured in a graph, replays are timed with events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_microseconds(calls: Sequence[Callable[[], object]], *, replays: int = 15, repeats: int = 1) -> float:
    """Median time of one call in microseconds.

    Args:
        calls: are captured one after the other; several calls over different buffers keep the data out of the cache.
        replays: timed replays of the graph, after three that are not.
        repeats: how often `calls` stand in the graph; short kernels need some hundred for a steady figure.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and allocates what is allocated once
            call()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    samples: list[float] = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(float(start.elapsed_time(stop)) * 1000.0 / (len(calls) * repeats))
    return statistics.median(samples)
