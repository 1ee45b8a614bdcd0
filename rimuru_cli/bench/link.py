"""How fast bytes move here: between memory and the device in both directions, on the device, and out of memory into the processor.

Rates are decimal gigabytes (1e9 bytes) per second, the best of a few samples: whatever else runs only slows a copy down. A sample repeats
its copy until it takes long enough for the clock and waits for the device once, at its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]

MIB = 1 << 20
COPY_BYTES = (MIB, 16 * MIB, 256 * MIB)
QUICK_COPY_BYTES = (64 * MIB,)
# More than the caches of large processors hold, in pieces of at most 256 MiB.
_READ_BYTES = 512 * MIB
_PIECE_BYTES = 256 * MIB
_SAMPLES = 3
_SAMPLE_SECONDS = 0.05
_MOST_REPEATS = 1000

TO_DEVICE, TO_HOST, ON_DEVICE, HOST_READ = "host to device", "device to host", "copy on the device", "host memory read"
PAGE_LOCKED, PAGEABLE = "page-locked", "pageable"


class Rate(NamedTuple):
    """One measured rate.

    Attributes:
        what: TO_DEVICE, TO_HOST, ON_DEVICE or HOST_READ.
        how: kind of host memory, or the number of threads.
        num_bytes: of one copy.
        gb_per_s: a copy on the device counts its bytes twice, read and written.
    """

    what: str
    how: str
    num_bytes: int
    gb_per_s: float


def run_link_bench(*, quick: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Measure all rates of this machine; without a CUDA device, those of main memory only. A few seconds; `quick`: about one.

    Args:
        quick: one size of copies instead of several.

    Returns:
        JSON-able: "device" (name or None); "rows" (what, how, bytes, gb_per_s); "best": the best rate of page-locked copies in each
        direction, of pageable ones to the device, on the device, and of reading memory, in GB/s (None: not measured); "notices".
    """
    report = progress or (lambda stage, done, total: None)
    rates: list[Rate] = []
    notices: list[str] = []
    device = torch.device("cuda") if torch.cuda.is_available() else None
    if device is None:
        notices.append("no CUDA device found: only main memory was measured")
    else:
        rates, notices = copy_rates(device, QUICK_COPY_BYTES if quick else COPY_BYTES, report)
    rates += read_rates(_READ_BYTES // (2 if quick else 1), report)
    return {
        "bench": "link",
        "device": None if device is None else torch.cuda.get_device_name(device),
        "rows": [{"what": r.what, "how": r.how, "bytes": r.num_bytes, "gb_per_s": r.gb_per_s} for r in rates],
        "best": {
            "host_to_device": _best(rates, TO_DEVICE, PAGE_LOCKED),
            "device_to_host": _best(rates, TO_HOST, PAGE_LOCKED),
            "host_to_device_pageable": _best(rates, TO_DEVICE, PAGEABLE),
            "copy_on_device": _best(rates, ON_DEVICE),
            "host_read": _best(rates, HOST_READ),
        },
        "notices": notices,
    }


def copy_rates(device: torch.device, sizes: Sequence[int], report: Progress) -> tuple[list[Rate], list[str]]:
    """Rates of copies to, from and on a device, and what could not be measured.

    Args:
        sizes: bytes of a copy; those that need more than a quarter of the device's free memory are left out.
    """
    room = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else max(sizes)
    fitting = [size for size in sizes if size <= room]
    if not fitting:
        return [], [f"too little free device memory to measure copies ({room * 4} bytes)"]
    notices = []
    if len(fitting) < len(sizes):
        notices.append(f"copies above {max(fitting)} bytes were left out: the device has too little free memory")
    near, far = (torch.zeros(max(fitting), dtype=torch.uint8, device=device) for _ in range(2))
    rates = []
    done, total = 0, 4 * len(fitting) + 1
    for how in (PAGE_LOCKED, PAGEABLE):
        try:
            host = torch.empty(max(fitting), dtype=torch.uint8, pin_memory=how == PAGE_LOCKED)
        except RuntimeError as error:  # no device to lock pages for, or the driver refuses
            notices.append(f"page-locked memory was refused: {str(error).splitlines()[0]}")
            done += 2 * len(fitting)
            continue
        host.fill_(1)  # memory that was never written to has no pages of its own
        for what, target, source in ((TO_DEVICE, near, host), (TO_HOST, host, near)):
            for size in fitting:
                report("copies", done, total)
                rates.append(_copy_rate(what, how, target[:size], source[:size], device))
                done += 1
        del host
    report("copies", done, total)
    size = max(fitting)
    rates.append(_copy_rate(ON_DEVICE, "read and written", far[:size], near[:size], device, passes=2))
    return rates, notices


def read_rates(num_bytes: int, report: Progress) -> list[Rate]:
    """Rates of reading main memory with one thread and with one per processor.

    Args:
        num_bytes: to read; less if little memory is free.
    """
    piece = min(_PIECE_BYTES, max(MIB, int(psutil.virtual_memory().available) // 16))
    words = [np.ones(piece // 8, dtype=np.int64) for _ in range(max(1, num_bytes // piece))]
    threads = usable_processors()
    rates = []
    for index, count in enumerate(sorted({1, threads})):
        report("memory", index, 2)
        # Threads take equal shares of every piece. A maximum is the cheapest arithmetic that has to look at each word.
        parts = [share for block in words for share in np.array_split(block, count)]
        with ThreadPoolExecutor(count) as pool:
            seconds = _seconds(lambda pool=pool, parts=parts: list(pool.map(np.max, parts)), _no_wait)  # type: ignore[misc]
        total = sum(part.nbytes for part in parts)
        rates.append(Rate(HOST_READ, "1 thread" if count == 1 else f"{count} threads", total, round(total / seconds / 1e9, 2)))
    return rates


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _copy_rate(what: str, how: str, target: Tensor, source: Tensor, device: torch.device, *, passes: int = 1) -> Rate:
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else _no_wait
    seconds = _seconds(lambda: target.copy_(source, non_blocking=True), wait)
    return Rate(what, how, target.numel(), round(passes * target.numel() / seconds / 1e9, 2))


def _seconds(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of one call, best of the samples; `wait` returns when all calls are done."""

    def sample(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        return max(1e-9, time.perf_counter() - start) / repeats

    sample(1)  # the first one maps memory and wakes the device
    repeats = max(1, min(_MOST_REPEATS, int(_SAMPLE_SECONDS / sample(1))))
    return min(sample(repeats) for _ in range(_SAMPLES))


def _no_wait() -> None:
    """Calls that are done when they return."""


def _best(rates: Sequence[Rate], what: str, how: str | None = None) -> float | None:
    return max((r.gb_per_s for r in rates if r.what == what and how in (None, r.how)), default=None)
