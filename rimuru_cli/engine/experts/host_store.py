"""The host tier: every expert of the model, where the checkpoint's memory map has it.

On the CPU nothing is loaded up front: the operating system reads what is touched, and the page cache is the host tier. That is why a model
larger than the memory ceiling runs, and why a missing expert need not be copied into the pool before it is used.
"""

from __future__ import annotations

from typing import Protocol

from rimuru_models.layout import expert_bytes
from rimuru_models.weights import CheckpointReader, ExpertTensors


class HostTier(Protocol):
    """Where absent experts are read from."""

    num_layers: int
    num_experts: int
    expert_bytes: int
    bytes_read: int
    brought: int

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Gate and up [f, d], down [d, f] of one expert of a MoE layer, as stored."""
        ...


class HostStore:
    """Experts by (MoE layer, expert); a MoE layer is counted among the sparse layers only.

    Attributes:
        num_layers: MoE layers.
        num_experts: experts of each.
        expert_bytes: bytes of one expert's three projections as stored.
        brought: always 0; a device's host tier counts here what its device cannot read by itself.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        config = reader.config
        self.num_layers = len(config.moe_layers)
        self.num_experts = config.num_experts
        self.expert_bytes = expert_bytes(config, reader.expert_dtype.itemsize)
        self.bytes_read = 0
        self.brought = 0
        # All views at once: a file that is gone shows now and not in the middle of an answer, and no small object made then lies between
        # the large temporary tensors of a step, where it would keep the process from giving their memory back.
        self._experts = [list(reader.experts(layer)) for layer in config.moe_layers]

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Views of one expert: gate and up [f, d], down [d, f], in the checkpoint's dtype. Counts as a read of the host tier."""
        self.bytes_read += self.expert_bytes
        return self._experts[layer][expert]

    def close(self) -> None:
        """Nothing to give up: the views belong to the reader."""
