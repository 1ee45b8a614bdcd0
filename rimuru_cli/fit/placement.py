"""Which part of a model lies where, worked out by the functions with which the engine divides memory when it loads the model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from rimuru_cli.engine.config import EngineConfig, KVPrecision, MemoryPlan, plan_memory
from rimuru_cli.engine.device.plan import DevicePlan, pinned_budget, plan_device_memory
from rimuru_cli.engine.experts.adjuster import AdjusterConstants
from rimuru_cli.fit.machine import Gpu, Machine
from rimuru_cli.fit.shape import IN_MEMORY_ON_CPU, ModelShape, NumberFormat
from rimuru_models.errors import DoesNotFitError

MIB = 1 << 20
CUDA_PROGRAM_BYTES = 480 * MIB
"""Device memory that the driver's context takes before a model is loaded, as on an H200 (docs/results)."""
CPU_PROGRAM_BYTES = 256 * MIB
"""Private memory of rimuru before a model is loaded."""
_MEMORY_PAGE = 4096  # every expert in page-locked memory starts at a memory page


@dataclass(frozen=True)
class Placement:
    """A model on a machine, before a word of a conversation.

    Attributes:
        device: what computes.
        plan: the engine's own division of memory.
        computing: format of plain weights and cache while they are computed with.
        ram_free_bytes: main memory that was free.
    """

    device: Literal["gpu", "cpu"]
    shape: ModelShape
    plan: MemoryPlan | DevicePlan
    computing: NumberFormat
    ram_free_bytes: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the pool."""
        return self.plan.experts.expert_bytes

    @property
    def read_per_token(self) -> int:
        """Bytes of dense weights that a token reads; see `ModelShape.read_per_token`."""
        return self.shape.read_per_token(self.computing.itemsize, self.shape.packed_dense if self.device == "gpu" else None)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV cache per token, over all layers that have one."""
        return self.plan.geometry.kv_page_bytes * len(self.shape.config.attention_layers) // self.plan.block_tokens

    @property
    def pinned_experts(self) -> int:
        """Experts that lie page-locked in main memory, from where the card reads them; the others stay on disk. None on a CPU."""
        if self.device == "cpu":
            return 0
        # Places in page-locked memory have one size.
        largest = self.plan.experts.pages_per_expert * self.plan.experts.page_bytes
        stride = -(-largest // _MEMORY_PAGE) * _MEMORY_PAGE
        return min(self.shape.num_experts, pinned_budget(self.ram_free_bytes) // stride)

    @property
    def uncached_share(self) -> float:
        """Share of what has to be read from the files for which the system's file cache has no room beside the engine, from 0 to 1."""
        if self.device == "cpu":
            room, needed = self.ram_free_bytes - self.plan.ceiling, self.shape.stored_bytes
        else:
            pinned = self.pinned_experts
            room, needed = self.ram_free_bytes - pinned * self.expert_bytes, (self.shape.num_experts - pinned) * self.expert_bytes
        return 1 - min(1.0, max(0, room) / needed) if needed else 0.0

    def conversation_bytes(self, context: int) -> int:
        """Bytes of pool that one conversation of `context` tokens takes, in whole huge pages: KV cache, recurrent states."""
        return self._huge_pages(0, context) * self.plan.geometry.huge_page_bytes

    def residents(self, context: int) -> int | None:
        """Experts that stay resident beside one conversation of `context` tokens; None when so many tokens do not fit."""
        if context > self.plan.context:
            return None
        plan, per_expert = self.plan, self.plan.geometry.pages_per_expert
        # What the adjuster leaves free: it admits nobody while fewer blocks would be left.
        kept = AdjusterConstants().high_free + per_expert
        if isinstance(plan, MemoryPlan):
            kept += 2 * plan.buffer_experts * per_expert
        huge = plan.pool // plan.geometry.huge_page_bytes
        counts = range(self.shape.num_experts + 1)
        room = bisect_right(counts, huge, key=lambda experts: self._huge_pages(plan.experts.pages_of(experts) + kept, context)) - 1
        return max(plan.floor * len(self.shape.config.moe_layers), room)

    def _huge_pages(self, expert_pages: int, context: int) -> int:
        """Huge pages that so many expert pages and one conversation take; with no tokens there is no conversation."""
        kv_pages = -(-context // self.plan.block_tokens) * len(self.shape.config.attention_layers)
        return self.plan.division.huge_pages(expert_pages, kv_pages, 1 if context else 0)


def place_on_gpu(shape: ModelShape, gpu: Gpu, ram_free_bytes: int, kv: KVPrecision = "auto") -> Placement:
    """As `engine.device.loading` would.

    Raises:
        DoesNotFitError: the card's memory is too small. Where main memory is, some experts stay on disk.
    """
    program = gpu.used_bytes + CUDA_PROGRAM_BYTES
    config = EngineConfig(memory_bytes=gpu.cap_bytes, kv=kv)
    plan = plan_device_memory(
        shape.config,
        shape.computing,
        config,
        program=program,
        free=max(0, gpu.total_bytes - program),
        max_batch_tokens=config.device_batch_tokens,
        formats=shape.formats,
    )
    return Placement("gpu", shape, plan, shape.computing, ram_free_bytes)


def place_on_cpu(shape: ModelShape, ram_free_bytes: int, kv: KVPrecision = "auto") -> Placement:
    """As `engine.loading` would.

    Raises:
        DoesNotFitError: main memory is too small.
    """
    plan = plan_memory(shape.config, EngineConfig(kv=kv), CPU_PROGRAM_BYTES, available=ram_free_bytes, formats=shape.formats)
    return Placement("cpu", shape, plan, IN_MEMORY_ON_CPU, ram_free_bytes)


@dataclass(frozen=True)
class Refusal:
    """Why a model does not run: what the engine would say, and what to do about it."""

    problem: str
    hint: str | None


def place(shape: ModelShape, machine: Machine, kv: KVPrecision = "auto") -> tuple[Placement | Refusal, str | None]:
    """Where a model would run, or why nowhere; and why the card is not used, None where it is or where there is none to use.

    A ceiling that was asked for is kept, as `rimuru chat --vram` keeps it: the CPU does not step in where the card is then too small.
    """
    passed_over = machine.why_no_gpu
    gpu = machine.gpu
    if gpu is not None:
        try:
            return place_on_gpu(shape, gpu, machine.ram_free_bytes, kv), None
        except DoesNotFitError as error:
            if gpu.cap_bytes is not None:
                hint = error.hint.replace("--memory", "--vram") if error.hint else None
                return Refusal(error.what, hint), None
            passed_over = error.what.rstrip(".")
    try:
        return place_on_cpu(shape, machine.ram_free_bytes, kv), passed_over
    except DoesNotFitError as error:
        return Refusal(error.what, error.hint), passed_over
