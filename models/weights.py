"""Reading weights: memory-mapped files, zero-copy views, one validated map of names.

The mapping is private (copy on write), because torch wants writable memory; nothing ever writes to it, so its pages stay page cache
that the system can drop and read again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.index import CheckpointIndex, open_index
from rimuru_models.tensor_map import TensorMap, resolve, unused_parts

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class ExpertTensors(NamedTuple):
    """One expert: gate and up [f, d], down [d, f], in the checkpoint's dtype; views of the mapped file, read-only by convention."""

    gate: Tensor
    up: Tensor
    down: Tensor


class CheckpointReader:
    """An open checkpoint whose headers, config and tensor list have been found consistent.

    Args:
        model_dir: folder with config.json and *.safetensors files.

    Raises:
        NotFoundError, CheckpointError: see `open_index`, `ModelConfig.from_dir`, `tensor_map.resolve`; nothing stays open then.

    Attributes:
        index: where each tensor lies.
        config: the model's architecture.
        expert_dtype: torch dtype of every routed expert on disk.
        ignored: names of tensors that the model does not use.
        unused_parts: whole parts among them, in words for a person (the vision part of a multimodal checkpoint, say).
    """

    def __init__(self, model_dir: Path) -> None:
        self.index: CheckpointIndex = open_index(Path(model_dir))
        self.config: ModelConfig = ModelConfig.from_dir(self.index.model_dir)
        self._map: TensorMap = resolve(self.index, self.config)
        self.expert_dtype: torch.dtype = TORCH_DTYPES[self._map.expert_dtype]
        self.ignored: tuple[str, ...] = self._map.ignored
        self.unused_parts: tuple[str, ...] = unused_parts(self.ignored)
        self._mappings: dict[Path, mmap.mmap] = {}
        self._closed = False

    def validate(self) -> None:
        """Check again that the checkpoint holds every tensor the config asks for (the constructor already did).

        Raises:
            CheckpointError: names file and tensor.
        """
        resolve(self.index, self.config)

    def _mapping(self, path: Path) -> mmap.mmap:
        assert not self._closed, "the reader is closed"
        mapping = self._mappings.get(path)
        if mapping is None:
            header = self.index.headers[path]
            try:
                with path.open("rb") as file:
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be mapped: {error}.") from None
            promised = header.data_offset + max((info.stop for info in header.tensors.values()), default=0)
            if len(mapping) < promised:  # would fault when touched
                raise CheckpointError(f"{path} shrank from {promised} to {len(mapping)} bytes while it was in use.")
            self._mappings[path] = mapping
        return mapping

    def view(self, disk_name: str) -> Tensor:
        """The tensor of that name on disk in its own dtype: a view of the mapped file (a copy only if the file is misaligned)."""
        path, info = self.index.tensors[disk_name]
        dtype = TORCH_DTYPES[info.dtype]
        mapping = self._mapping(path)
        start = self.index.headers[path].data_offset + info.start
        count = (info.stop - info.start) // dtype.itemsize
        if start % dtype.itemsize:
            copy = bytearray(memoryview(mapping)[start : start + count * dtype.itemsize])
            return torch.frombuffer(copy, dtype=dtype).view(info.shape)
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=start).view(info.shape)

    def dense_view(self, name: str) -> Tensor:
        """A dense tensor by its canonical name (see layout), as `view` gives it."""
        return self.view(self._map.dense[name])

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """A dense tensor by its canonical name, as an owned, contiguous copy in `dtype`."""
        return self.dense_view(name).to(dtype, copy=True)

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """One routed expert of a sparse layer as zero-copy views."""
        names = self._map.experts[layer]
        if names.fused is None:
            gate, up, down = names.per_expert[expert]
            return ExpertTensors(self.view(gate), self.view(up), self.view(down))
        width = self.config.expert_intermediate
        gate_up = self.view(names.fused[0])[expert]
        return ExpertTensors(gate_up[:width], gate_up[width:], self.view(names.fused[1])[expert])

    def experts(self, layer: int) -> Iterator[ExpertTensors]:
        """All experts of a sparse layer in order."""
        for expert in range(self.config.num_experts):
            yield self.expert(layer, expert)

    def expert_extents(self, layer: int, expert: int) -> list[tuple[Path, int, int]]:
        """Where the files have one routed expert's gate, up and down, in this order: (file, offset in bytes, bytes) of each run."""
        names = self._map.experts[layer]
        if names.fused is None:
            return [self._extent(name, 0, 1) for name in names.per_expert[expert]]
        return [self._extent(name, expert, self.config.num_experts) for name in names.fused]

    def _extent(self, disk_name: str, index: int, parts: int) -> tuple[Path, int, int]:
        """Part `index` of a tensor that is cut into `parts` along its first dimension."""
        path, info = self.index.tensors[disk_name]
        size = (info.stop - info.start) // parts
        return path, self.index.headers[path].data_offset + info.start + index * size, size

    def check_tied(self) -> None:
        """With tied embeddings a checkpoint may still carry lm_head; it must then repeat the embeddings.

        Raises:
            CheckpointError: it differs (the reference would not tie them, whatever the config says).
        """
        copy = self._map.lm_head_copy
        if copy is None:
            return
        embedding, other = self.dense_view("model.embed_tokens.weight"), self.view(copy)
        if embedding.dtype != other.dtype or not torch.equal(embedding, other):
            raise CheckpointError(
                f"{self.index.tensors[copy][0]}: config.json ties the embeddings, but tensor {copy!r} differs from them.",
                hint="Set tie_word_embeddings to false in config.json if both matrices belong to the model.",
            )

    def close(self) -> None:
        """Give up the files. Views already handed out stay valid: each keeps its mapping alive until it is dropped."""
        self._closed = True
        self._mappings.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
