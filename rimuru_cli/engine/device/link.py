"""How fast experts come over the link, measured while a model is loaded, and which way is quicker for a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rimuru_cli.engine.device.copying import copy_expert
from rimuru_cli.engine.device.pinned_host import PinnedHost
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_kernels.expert_fetch import FetchPlan, fetch

_EXPERTS = 8
_REPEATS = 5


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second from page-locked memory to the device; the defaults are for a device that is emulated.

    Attributes:
        fetch: by a kernel that reads main memory itself (on demand).
        copy: by the copy engine (streamed).
        measured: whether they were.
    """

    fetch: float = 50e9
    copy: float = 55e9
    measured: bool = False


def measure_link(pool: PagePool, host: PinnedHost, pages_per_expert: int) -> LinkRates:
    """Time both ways with a few experts and pages that are free; takes some tens of milliseconds.

    Where nothing can be measured (no CUDA device, a pool without free pages, nothing page-locked) the defaults are returned.
    """
    count = min(_EXPERTS, host.num_experts, pool.allocator.available(PageKind.EXPERT) // pages_per_expert)
    if not pool.data.is_cuda or count == 0 or not bool((host.pointers[0, :count] != 0).all()):
        return LinkRates()
    pages, tiles = sorted(pool.allocate(PageKind.EXPERT, count * pages_per_expert)), host.pages.layer_pages[0]
    try:
        device, page_bytes = pool.data.device, pool.geometry.expert_page_bytes
        plan = FetchPlan.create(host.num_experts, pages_per_expert, count, device)
        plan.sources.copy_(host.pointers[0, :count])
        plan.pages.copy_(torch.tensor(pages, dtype=torch.int32).view(count, pages_per_expert))
        plan.count.fill_(count)

        def copy() -> None:
            for slot in range(count):
                own = pages[slot * pages_per_expert : (slot + 1) * pages_per_expert]
                copy_expert(pool, own, host.run(0, slot, 1), host.tile_sizes(0))

        num_bytes = count * host.layer_bytes[0]
        seconds = _seconds(lambda: fetch(plan, pool.data, page_bytes, (0, tiles))), _seconds(copy)
        return LinkRates(num_bytes / seconds[0], num_bytes / seconds[1], measured=True)
    finally:
        pool.free(pages)


def _seconds(call: Callable[[], None]) -> float:
    """Least seconds of a few runs, by events on the device; the first compiles."""
    call()
    best = float("inf")
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def on_demand_is_quicker(rows: int, top_k: int, miss_rate: float, absent: Sequence[int], rates: LinkRates) -> bool:
    """Whether fetching what a step will miss takes less time than streaming all absent experts.

    A row's k selections miss with probability m, spread over a layer's a absent experts; T rows then miss a (1 - (1 - k m / a)^T) different
    experts of it, as if rows chose independently. Streaming moves all a of every layer, by the faster copy engine. What is computed is the
    same either way and left out.

    Args:
        rows: T, tokens of the step.
        top_k: k, experts a token.
        miss_rate: m, share of selections that miss.
        absent: a of each layer.
        rates: of the link.
    """
    expected = sum(a * (1.0 - (1.0 - min(1.0, top_k * miss_rate / a)) ** rows) for a in absent if a)
    return rows == 1 or expected / rates.fetch <= sum(absent) / rates.copy
