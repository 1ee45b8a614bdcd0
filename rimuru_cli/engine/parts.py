"""What an engine is made of, on the CPU or on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rimuru_cli.engine.experts.residency import Residency
from rimuru_cli.engine.experts.transfer import Loader
from rimuru_cli.engine.kv_blocks import KVBlocks
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.stats import EngineInfo
from rimuru_models.interfaces import CausalLM

if TYPE_CHECKING:
    from rimuru_cli.engine.config import MemoryPlan
    from rimuru_cli.engine.device.experts import DeviceExperts, NoBuffers
    from rimuru_cli.engine.device.pinned_host import ExpertSource, PinnedHost
    from rimuru_cli.engine.device.plan import DevicePlan
    from rimuru_cli.engine.device.runner import DeviceRunner
    from rimuru_cli.engine.experts.executor import PooledExperts
    from rimuru_cli.engine.experts.host_store import HostStore
    from rimuru_cli.engine.experts.streaming import LoadingBuffers
    from rimuru_cli.engine.model_runner import ModelRunner
    from rimuru_models.weights import CheckpointReader


@dataclass
class Parts:
    """Everything an engine is made of; where there are two kinds, the first computes on the CPU and the second on a device."""

    info: EngineInfo
    plan: MemoryPlan | DevicePlan
    reader: CheckpointReader | ExpertSource
    model: CausalLM
    pool: PagePool
    blocks: KVBlocks
    host: HostStore | PinnedHost
    residency: Residency
    buffers: LoadingBuffers | NoBuffers
    loader: Loader
    experts: PooledExperts | DeviceExperts
    runner: ModelRunner | DeviceRunner
    eos_ids: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where the pool lies and the model computes."""
        return self.pool.data.device
