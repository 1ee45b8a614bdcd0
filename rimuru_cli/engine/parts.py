"""What an engine is made of, on the CPU or on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rimuru_cli.engine.experts.residency import Residency
from rimuru_cli.engine.experts.streaming import LoadingBuffers
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.stats import EngineInfo
from rimuru_models.interfaces import CausalLM

if TYPE_CHECKING:
    from rimuru_cli.engine.alike import Repeats
    from rimuru_cli.engine.bookmarks import Bookmarks
    from rimuru_cli.engine.config import EngineConfig, MemoryPlan
    from rimuru_cli.engine.device.experts import DeviceExperts
    from rimuru_cli.engine.device.pinned_host import ExpertSource, PinnedHost
    from rimuru_cli.engine.device.plan import DevicePlan
    from rimuru_cli.engine.device.runner import DeviceRunner
    from rimuru_cli.engine.device.streaming import ScratchPages
    from rimuru_cli.engine.experts.executor import PooledExperts
    from rimuru_cli.engine.experts.host_store import HostStore
    from rimuru_cli.engine.memory.allocator import PageAllocator
    from rimuru_cli.engine.model_runner import ModelRunner
    from rimuru_cli.engine.room import Room
    from rimuru_cli.engine.state_blocks import StateBlock, StateBlocks
    from rimuru_models.readers import Reader


@dataclass(frozen=True)
class Recurrent:
    """What a model with recurrent layers has besides: the states of sequences, those kept to resume from, and who makes room for them."""

    states: StateBlocks
    bookmarks: Bookmarks
    room: Room

    def check_integrity(self, running: Sequence[StateBlock], allocator: PageAllocator) -> None:
        """Every block of states has one owner, a running sequence or a checkpoint; raises AssertionError otherwise."""
        known = [*running, *(bookmark.states for bookmark in self.bookmarks.all())]
        assert len({id(block) for block in known}) == len(known) == len(self.states.live), (
            f"{len(known)} blocks of states are known, {len(self.states.live)} own pages"
        )
        ssm, conv = (sum(sizes) for sizes in zip(*(block.num_pages for block in known), strict=True)) if known else (0, 0)
        owned = allocator.owned(PageKind.SSM), allocator.owned(PageKind.CONV)
        assert (ssm, conv) == owned, f"{ssm} SSM and {conv} conv pages are known, {owned} are owned"


@dataclass
class Parts:
    """Everything an engine is made of; where there are two kinds, the first computes on the CPU and the second on a device."""

    info: EngineInfo
    plan: MemoryPlan | DevicePlan
    reader: Reader | ExpertSource
    model: CausalLM
    pool: PagePool
    blocks: KVBlocks
    host: HostStore | PinnedHost
    residency: Residency
    buffers: LoadingBuffers | ScratchPages
    loader: Loader
    experts: PooledExperts | DeviceExperts
    runner: ModelRunner | DeviceRunner
    eos_ids: frozenset[int]
    # The division of another ceiling, for the same model on the same device.
    replan: Callable[[EngineConfig], MemoryPlan | DevicePlan]
    recurrent: Recurrent | None = None
    # Bytes a second at which absent experts are brought to a device; None where they need not be brought.
    link_rate: float | None = None
    # Most rows of a step that is replayed as one captured graph; None where none is.
    captured_rows: int | None = None
    # Takes steps that are alike; None where every step is computed by itself, as everywhere but in simulations.
    repeats: Repeats | None = None
    # Seconds from any moment on: the machine's, or those of a simulation.
    clock: Callable[[], float] = time.perf_counter

    @property
    def lent(self) -> ScratchPages | None:
        """Pages that are lent to steps and can be called in between two of them; None where there are loading buffers at all times."""
        return None if isinstance(self.buffers, LoadingBuffers) else self.buffers

    @property
    def device(self) -> torch.device:
        """Where the pool lies and the model computes."""
        return self.pool.data.device
