"""Reading experts into memory: straight from the checkpoint's files where there are some, else from the source's tensors.

Reading into place is several times faster than copying out of a memory map, which the system fills four kilobytes at a time. All of it may
be called from several threads at once.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.weights import ExpertTensors


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


@runtime_checkable
class FileSource(Protocol):
    """A source whose experts lie in files."""

    def expert_extents(self, layer: int, expert: int) -> list[tuple[Path, int, int]]:
        """(file, offset, bytes) of each run of one expert's bytes, gate, up and down in order."""
        ...


class ExpertFiles:
    """Experts of a source by (model layer, expert), gate | up | down as plain bytes."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self._extents = source.expert_extents if isinstance(source, FileSource) else None
        self._files: dict[object, io.FileIO] = {}
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, out: Tensor) -> None:
        """Fill `out`, uint8 [expert_bytes], with one expert.

        Raises:
            CheckpointError: a file ended early or could not be read.
        """
        target, start = out.numpy(), 0
        if self._extents is None:
            # numpy and not torch: a copy of torch starts threads of its own in each of ours.
            for part in self._source.expert(layer, expert):
                values = part.reshape(-1).view(torch.uint8).numpy()
                np.copyto(target[start : start + len(values)], values)
                start += len(values)
            return
        for path, offset, size in self._extents(layer, expert):
            try:
                self._fill(path, offset, memoryview(target[start : start + size].data))
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}.") from error
            start += size

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _fill(self, path: Path, offset: int, view: memoryview) -> None:
        done, size = 0, len(view)
        while done < size:
            if hasattr(os, "preadv"):
                got = os.preadv(self._file(path, path).fileno(), [view[done:]], offset + done)
            else:
                # Without it a file has one position, so every thread opens its own.
                file = self._file((threading.get_ident(), path), path)
                file.seek(offset + done)
                got = file.readinto(view[done:])
            if not got:
                raise CheckpointError(f"{path} ends at byte {offset + done}: it shrank while it was in use.")
            done += got

    def _file(self, key: object, path: Path) -> io.FileIO:
        with self._lock:
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = io.FileIO(path)
            return file
