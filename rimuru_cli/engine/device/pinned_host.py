"""The host tier of a device: every expert contiguous in page-locked memory, so that copy engine and kernels read it at link speed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.layout import expert_bytes
from rimuru_models.weights import ExpertTensors

_COPY_THREADS = 8
_REGISTER_FLAGS = 3  # portable | mapped: every context of the process may use it, kernels may read it


class ExpertSource(Protocol):
    """Where experts come from: an open checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        ...

    @property
    def expert_dtype(self) -> torch.dtype:
        """The one dtype of all experts."""
        ...

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Gate and up [f, d], down [d, f] of one expert of a model layer."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


class PinnedHost:
    """All experts of a model in memory, gate | up | down of each one after the other.

    Args:
        source: where the experts come from; not needed afterwards.
        device: whose driver locks the pages; on the CPU nothing is locked.
        progress: called with (bytes done, bytes in all).

    Attributes:
        num_layers, num_experts, expert_bytes: as of `HostStore`.
        pointers: int64 [num_layers, num_experts], the address of each expert.
        bytes_read: bytes of experts that the host side copied to the device so far.
        shared: several engines use it, so that none of them closes it.

    Raises:
        DoesNotFitError: the driver refuses to lock so much memory.
    """

    def __init__(self, source: ExpertSource, device: torch.device, progress: Callable[[int, int], None] | None = None) -> None:
        config = source.config
        self.num_layers = len(config.moe_layers)
        self.num_experts = config.num_experts
        self.dtype = source.expert_dtype
        self._f, self._d = config.expert_intermediate, config.hidden_size
        self.expert_bytes = expert_bytes(config, self.dtype.itemsize)
        self.bytes_read = 0
        self.shared = False
        self._device = device
        self._layers: list[Tensor] = []
        total = self.num_layers * self.num_experts * self.expert_bytes
        with ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="rimuru-host") as threads:
            for index, layer in enumerate(config.moe_layers):
                block = torch.empty(self.num_experts * self.expert_bytes, dtype=torch.uint8)
                self._layers.append(block)
                list(threads.map(lambda e, layer=layer, index=index: self._load(source, layer, index, e), range(self.num_experts)))
                self._lock(block)
                if progress is not None:
                    progress((index + 1) * self.num_experts * self.expert_bytes, total)
        offsets = torch.arange(self.num_experts, dtype=torch.int64) * self.expert_bytes
        self.pointers = torch.stack([block.data_ptr() + offsets for block in self._layers])

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Views of one expert of a MoE layer. Counts as a read of the host tier."""
        self.bytes_read += self.expert_bytes
        return self._views(layer, expert)

    def run(self, layer: int, first: int, count: int) -> Tensor:
        """The bytes of `count` experts of a layer from `first` on, uint8 [count * expert_bytes], a view."""
        return self._layers[layer][first * self.expert_bytes : (first + count) * self.expert_bytes]

    def close(self) -> None:
        """Unlock the memory, unless it is shared."""
        if self.shared:
            return
        if self._device.type == "cuda":
            for block in self._layers:
                torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]
        self._layers = []

    def _views(self, layer: int, expert: int) -> ExpertTensors:
        whole = self.run(layer, expert, 1).view(self.dtype)
        size = self._f * self._d
        gate, up, down = whole[:size], whole[size : 2 * size], whole[2 * size :]
        return ExpertTensors(gate.view(self._f, self._d), up.view(self._f, self._d), down.view(self._d, self._f))

    def _load(self, source: ExpertSource, layer: int, index: int, expert: int) -> None:
        for target, part in zip(self._views(index, expert), source.expert(layer, expert), strict=True):
            target.copy_(part)

    def _lock(self, block: Tensor) -> None:
        if self._device.type != "cuda":
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), _REGISTER_FLAGS))
        if error != 0:
            locked = len(self._layers) * block.numel() / 2**30
            raise DoesNotFitError(
                f"The driver refused to page-lock {locked:.1f} GiB of memory for experts (CUDA error {error}).",
                hint="Close other programs, or run on the CPU.",
            )
