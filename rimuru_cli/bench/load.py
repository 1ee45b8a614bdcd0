"""How fast experts come from a checkpoint's files into page-locked memory, beside what the same files give to a plain reader.

Both use the same number of threads and memory that nobody has touched before, and take turns; the best of their runs counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rimuru_cli.bench.link import Progress
from rimuru_cli.engine.device.pinned_host import PinnedHost, reading_threads
from rimuru_cli.engine.memory.backing import backing_for
from rimuru_models.errors import UsageError
from rimuru_models.readers import Reader, open_reader

_REQUEST = 8 << 20
_RUNS = 2
_CPU = torch.device("cpu")


def run_load_bench(
    model_dir: Path, *, cold: bool = False, budget: int | None = None, runs: int = _RUNS, progress: Progress | None = None
) -> dict[str, Any]:
    """Load all experts of a model into the host tier, and read the same bytes plainly.

    Args:
        cold: let the system forget the files before every run (where it can), so that the disk is measured and not its cache.
        budget: most bytes to load; None: all experts.
        runs: of each kind.

    Returns:
        JSON-able: "rows" (what, bytes, seconds, gb_per_s of the best run), "share" (loading's rate over plain reading's), "device" that the
        memory is locked for (None: not locked), "locked_bytes", "threads", "cold", "notices".

    Raises:
        NotFoundError, CheckpointError: no usable checkpoint.
        UsageError: its experts are quantised.
    """
    report = progress or (lambda stage, done, total: None)
    device = torch.device("cuda") if torch.cuda.is_available() else _CPU
    best: dict[str, tuple[float, int]] = {}
    notices: list[str] = []
    locked = 0
    with open_reader(model_dir) as reader:
        extents = _extents(reader, budget)
        if not extents:
            raise UsageError(
                f"The experts of {model_dir} are quantised; this bench compares with plain reading of plain ones.",
                hint="Name a model whose experts are BF16, F16 or F32.",
            )
        for run in range(runs):
            for index, (what, measure) in enumerate((("plain read", _plain), ("load experts", _load))):
                if cold and not _forget({path for path, _, _ in extents}):
                    notices = ["this system does not forget files on request: what is measured may be its cache"]
                report(what, 2 * run + index, 2 * runs)
                num_bytes, now_locked, seconds = measure(reader, device, extents, budget)
                locked = max(locked, now_locked)
                if what not in best or num_bytes / seconds > best[what][1] / best[what][0]:
                    best[what] = seconds, num_bytes
        report("load experts", 2 * runs, 2 * runs)
    rows = [
        {"what": what, "bytes": size, "seconds": round(seconds, 3), "gb_per_s": round(size / seconds / 1e9, 2)}
        for what, (seconds, size) in best.items()
    ]
    plain, load = (best[what][1] / best[what][0] for what in ("plain read", "load experts"))
    return {
        "bench": "load",
        "model": str(model_dir),
        "device": None if device is _CPU else torch.cuda.get_device_name(device),
        "locked_bytes": locked,
        "threads": reading_threads(),
        "cold": cold,
        "rows": rows,
        "share": round(load / plain, 3),
        "notices": notices,
    }


Extent = tuple[Path, int, int]


def _extents(reader: Reader, budget: int | None) -> list[Extent]:
    """Runs of the files that hold experts, in pieces as large as a plain reader would ask for."""
    experts = [(layer, expert) for layer in reader.config.moe_layers for expert in range(reader.config.num_experts)]
    every = {extent for layer, expert in experts for extent in reader.expert_extents(layer, expert) or ()}
    joined: list[list[Any]] = []
    for path, offset, size in sorted(every):
        if joined and joined[-1][0] == path and joined[-1][1] + joined[-1][2] == offset:
            joined[-1][2] += size
        else:
            joined.append([path, offset, size])
    pieces = [(path, offset + start, min(_REQUEST, size - start)) for path, offset, size in joined for start in range(0, size, _REQUEST)]
    if budget is None:
        return pieces
    kept, room = [], budget
    for path, offset, size in pieces:
        if room <= 0:
            break
        kept.append((path, offset, min(size, room)))
        room -= size
    return kept


def _plain(reader: Reader, device: torch.device, extents: list[Extent], budget: int | None) -> tuple[int, int, float]:
    """Read into plain memory: bytes read, none locked, and the seconds until all is there."""
    total = sum(size for _, _, size in extents)
    backing = backing_for(total, total, _CPU, large=True)
    target = memoryview(backing.data.numpy().data)
    starts = np.concatenate(([0], np.cumsum([size for _, _, size in extents]))).tolist()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(reading_threads()) as threads:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in {path for path, _, _ in extents}}

        def read(index: int) -> None:
            path, offset, size = extents[index]
            view, done = target[starts[index] : starts[index] + size], 0
            while done < size:
                if hasattr(os, "preadv"):
                    got = os.preadv(files[path].fileno(), [view[done:]], offset + done)
                else:
                    with path.open("rb", buffering=0) as own:
                        own.seek(offset + done)
                        got = own.readinto(view[done:])
                done += got or size

        started = time.perf_counter()
        list(threads.map(read, range(len(extents))))
        return total, 0, time.perf_counter() - started


def _load(reader: Reader, device: torch.device, extents: list[Extent], budget: int | None) -> tuple[int, int, float]:
    """Load into page-locked memory as an engine does: bytes of experts, bytes locked, and the seconds until all is there."""
    started = time.perf_counter()
    host = PinnedHost(reader, device, budget=budget)
    seconds = time.perf_counter() - started
    locked = host.pinned_bytes if device.type == "cuda" else 0
    num_bytes = int(host.pinned.sum()) * host.expert_bytes
    host.close()
    return num_bytes, locked, seconds


def _forget(paths: set[Path]) -> bool:
    """Ask the system to drop files from its cache; whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
