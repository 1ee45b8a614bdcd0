"""Seconds of a step: arithmetic or memory, whichever is longer, and the link beside or behind it. Constants are those of `rimuru fit`.

Of the host's time only what launching an uncaptured step takes is there; what overlaps across steps is left out: a step begins when the one
before is over. docs/results/elasticity.md compares with a run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.engine.device.hybrid_plan import state_bytes
from rimuru_cli.fit.machine import Gpu
from rimuru_cli.fit.shape import ModelShape
from rimuru_cli.fit.speed import (
    FETCH_OF_LINK,
    GIGA,
    GPU_LAYER_SECONDS,
    GPU_PIECE_LAYER_SECONDS,
    GPU_PIECE_SECONDS,
    GPU_PROMPT_LAYER_SECONDS,
    GPU_RECURRENT_LAYER_SECONDS,
    GPU_RECURRENT_PIECE_SECONDS,
    PRODUCTS_OF_PEAK,
)

H200 = Gpu("NVIDIA H200", 143_771 << 20, 0, 4000.0, 800.0, 54.4)
"""The card of docs/results, as measured there."""


@dataclass(frozen=True)
class StepLoad:
    """What a step computes.

    Attributes:
        rows: tokens; sequences: that they belong to; visible: tokens that all of them see together.
        held: tokens of the sequences' caches, each read once.
        touched: int64 [MoE layers], experts that are used. Of several steps: [steps, MoE layers], `visible` and `held` [steps, 1].
        captured: one captured graph, as decode steps on demand are; else launched operation by operation.
    """

    rows: int
    sequences: int
    visible: float | NDArray[np.int64]
    held: int | NDArray[np.int64]
    touched: NDArray[np.int64]
    captured: bool


class CostModel:
    """Costs of one shape on one card.

    Attributes:
        copy, fetch: bytes a second of the copy engine, and of kernels that read main memory.
    """

    def __init__(self, shape: ModelShape, gpu: Gpu) -> None:
        config, size = shape.config, shape.computing.itemsize
        self.copy = gpu.link_gb_per_s * GIGA
        self.fetch = self.copy * FETCH_OF_LINK
        self.expert_bytes = shape.stored_expert_bytes
        recurrent = len(config.recurrent_layers)
        others = config.num_layers - recurrent
        self._captured = others * GPU_LAYER_SECONDS + recurrent * GPU_RECURRENT_LAYER_SECONDS
        self._launches = config.num_layers * GPU_PROMPT_LAYER_SECONDS
        self._piece = GPU_PIECE_SECONDS + others * GPU_PIECE_LAYER_SECONDS + recurrent * GPU_RECURRENT_PIECE_SECONDS
        self._dense = shape.read_per_token(size, shape.packed_dense)
        self._kv_token = 2 * config.num_kv_heads * config.head_dim * size * len(config.attention_layers)
        self._states = state_bytes(config, size)
        self._memory = gpu.memory_gb_per_s * GIGA
        self._products = gpu.tflops * 1e12 * PRODUCTS_OF_PEAK
        self._flops_per_row = 2 * shape.active_parameters
        self._flops_per_pair = 4 * config.num_heads * config.head_dim * len(config.attention_layers)

    def compute(self, load: StepLoad) -> NDArray[np.float64]:
        """Seconds of each MoE layer, float64 [..., MoE layers] as of `load.touched`; everything else is spread over them evenly."""
        count = load.touched.shape[-1]
        # Recurrent states are read and written, each once a sequence.
        everywhere = self._dense + load.held * self._kv_token + 2 * load.sequences * self._states
        moved = everywhere / count + load.touched * float(self.expert_bytes)
        products = (self._flops_per_row * load.rows + self._flops_per_pair * load.visible) / self._products / count
        launches = self._captured if load.captured else self._launches
        # The host launches an uncaptured step layer by layer, and the card is never far ahead of it.
        floor = 0.0 if load.captured else self._piece / count
        seconds: NDArray[np.float64] = np.maximum(np.maximum(moved / self._memory, products) + launches / count, floor)
        return seconds

    def on_demand(self, compute: NDArray[np.float64], missed: int) -> float:
        """Seconds of a step that fetches `missed` experts, each while nothing else runs."""
        return float(compute.sum()) + self.fetching(missed)

    def fetching(self, missed: int) -> float:
        """Seconds that so many experts take."""
        return missed * self.expert_bytes / self.fetch

    def streamed(self, compute: NDArray[np.float64], absent: NDArray[np.int64], slots: int) -> float:
        """Seconds of a step that streams all absent experts, int64 [MoE layers], through `slots` places used in turn; see `Stream`."""
        return self.stream(absent, slots).seconds(compute)

    def stream(self, absent: NDArray[np.int64], slots: int) -> Stream:
        """How absent experts, int64 [MoE layers], come through `slots` places."""
        ends = np.cumsum(absent)
        # The layer whose place a layer's last expert takes; -1: nobody used it before.
        before = np.searchsorted(ends, ends - slots, side="left")
        return Stream(np.where(ends > slots, before, -1).tolist(), (absent * (self.expert_bytes / self.copy)).tolist())


@dataclass(frozen=True)
class Stream:
    """Copies of a streamed step.

    As `ExpertStream` does: a layer waits for all of its experts, and a place is filled again once the layer that used it is over.

    Attributes:
        before: of each layer, the one whose place its last expert takes; -1: nobody used it before.
        copies: seconds of each layer's.
    """

    before: list[int]
    copies: list[float]

    def seconds(self, compute: NDArray[np.float64]) -> float:
        """Seconds of a step whose layers take so long to compute, float64 [MoE layers]."""
        done: list[float] = []
        arrived = end = 0.0
        for layer, (own, copies, before) in enumerate(zip(compute.tolist(), self.copies, self.before, strict=True)):
            if copies:
                free = done[min(before, layer - 1)] if before >= 0 and layer else 0.0
                arrived = max(arrived, free) + copies
                end = max(end, arrived)
            end += own
            done.append(end)
        return end
