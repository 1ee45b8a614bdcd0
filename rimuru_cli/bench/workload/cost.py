"""Seconds of a step: arithmetic or memory, whichever is longer, and the link beside or behind it. Constants are those of `rimuru fit`.

Time of the host is left out, and so is what overlaps across steps: a step begins when the one before is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rimuru_cli.fit.machine import Gpu
from rimuru_cli.fit.shape import ModelShape
from rimuru_cli.fit.speed import (
    FETCH_OF_LINK,
    GIGA,
    GPU_LAYER_SECONDS,
    GPU_PIECE_LAYER_SECONDS,
    GPU_PROMPT_LAYER_SECONDS,
    PRODUCTS_OF_PEAK,
)
from rimuru_models.layout import expert_bytes

H200 = Gpu("NVIDIA H200", 143_771 << 20, 0, 4000.0, 800.0, 54.4)
"""The card of docs/results, as measured there."""


@dataclass(frozen=True)
class StepLoad:
    """What a step computes.

    Attributes:
        rows: tokens; visible: tokens that all of them see together; held: tokens of the sequences' caches, each read once.
        touched: int64 [MoE layers], experts that are used.
        captured: one captured graph, as decode steps on demand are; else launched operation by operation.
    """

    rows: int
    visible: float
    held: int
    touched: NDArray[np.int64]
    captured: bool


class CostModel:
    """Costs of one shape on one card.

    Attributes:
        copy, fetch: bytes a second of the copy engine, and of kernels that read main memory.
    """

    def __init__(self, shape: ModelShape, gpu: Gpu) -> None:
        config, size = shape.config, shape.stored.itemsize
        self.copy = gpu.link_gb_per_s * GIGA
        self.fetch = self.copy * FETCH_OF_LINK
        self.expert_bytes = expert_bytes(config, size)
        self._layers = config.num_layers
        self._dense = shape.read_per_token(size)
        self._kv_token = 2 * config.num_kv_heads * config.head_dim * size * len(config.attention_layers)
        self._memory = gpu.memory_gb_per_s * GIGA
        self._products = gpu.tflops * 1e12 * PRODUCTS_OF_PEAK
        self._flops_per_row = 2 * shape.active_parameters
        self._flops_per_pair = 4 * config.num_heads * config.head_dim * len(config.attention_layers)

    def compute(self, load: StepLoad) -> NDArray[np.float64]:
        """Seconds of each MoE layer, float64 [MoE layers]; everything else is spread over them evenly."""
        count = len(load.touched)
        moved = (self._dense + load.held * self._kv_token) / count + load.touched * float(self.expert_bytes)
        products = (self._flops_per_row * load.rows + self._flops_per_pair * load.visible) / self._products / count
        share = self._layers / count
        launches = GPU_LAYER_SECONDS if load.captured else GPU_PROMPT_LAYER_SECONDS
        # The host launches an uncaptured step layer by layer, and the card cannot be ahead of it.
        floor = 0.0 if load.captured else GPU_PIECE_LAYER_SECONDS * share
        seconds: NDArray[np.float64] = np.maximum(np.maximum(moved / self._memory, products) + launches * share, floor)
        return seconds

    def on_demand(self, compute: NDArray[np.float64], missed: int) -> float:
        """Seconds of a step that fetches `missed` experts, each while nothing else runs."""
        return float(compute.sum()) + missed * self.expert_bytes / self.fetch

    def streamed(self, compute: NDArray[np.float64], absent: NDArray[np.int64], slots: int) -> float:
        """Seconds of a step that streams all absent experts, int64 [MoE layers], through `slots` places used in turn.

        As `ExpertStream` does: a layer waits for all of its experts, and a place is filled again once the layer that used it is over.
        """
        ends = np.cumsum(absent)
        # The layer whose place a layer's last expert takes; -1: nobody used it before.
        before = np.searchsorted(ends, ends - slots, side="left")
        before = np.where(ends > slots, before, -1).tolist()
        seconds = (absent * (self.expert_bytes / self.copy)).tolist()
        done: list[float] = []
        arrived = end = 0.0
        for layer, (own, copies) in enumerate(zip(compute.tolist(), seconds, strict=True)):
            if copies:
                free = done[min(before[layer], layer - 1)] if before[layer] >= 0 and layer else 0.0
                arrived = max(arrived, free) + copies
                end = max(end, arrived)
            end += own
            done.append(end)
        return end
