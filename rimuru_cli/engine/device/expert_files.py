"""Reading experts into memory: straight from the checkpoint's files where there are some, else from the source's tensors.

Reading into place is several times faster than copying out of a memory map, which the system fills four kilobytes at a time. All of it may
be called from several threads at once.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.quantization.formats import WeightFormats
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

    def expert_extents(self, layer: int, expert: int) -> list[tuple[Path, int, int]] | None:
        """(file, offset, bytes) of each run of one expert's bytes, gate, up and down in order; None where files do not hold them so."""
        ...


@runtime_checkable
class PackedSource(Protocol):
    """A source whose experts, of some layers at least, are packed codes."""

    @property
    def formats(self) -> WeightFormats:
        """What the weights are stored as."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of plain dense matrices."""
        ...

    def expert_packed(self, layer: int, expert: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        """See `WeightReader.expert_packed`."""
        ...


def formats_of(source: ExpertSource) -> WeightFormats | None:
    """What a source's weights are stored as; None where all are plain numbers."""
    return source.formats if isinstance(source, PackedSource) else None


def compute_dtype(source: ExpertSource) -> torch.dtype:
    """What a device computes with: the dtype of plain experts, as far as there are any, which pages hold as they are."""
    if not isinstance(source, PackedSource) or source.formats.computing == source.formats.expert_dtype:
        return source.expert_dtype
    return source.compute_dtype


class ExpertFiles:
    """Experts of a source by (MoE layer, expert) as the bytes of their pages: gate | up | down.

    Args:
        source: where they come from.
        pages: how they lie in pages.
    """

    def __init__(self, source: ExpertSource, pages: ExpertPages) -> None:
        self._source, self._pages = source, pages
        self._moe_layers = source.config.moe_layers
        self._extents = source.expert_extents if isinstance(source, FileSource) else None
        self._files: dict[object, io.FileIO] = {}
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, out: Tensor) -> None:
        """Fill `out`, uint8 with the bytes of its pages, with one expert; what its pages leave empty keeps what it was.

        Raises:
            CheckpointError: a file ended early or could not be read.
        """
        places, model_layer = self._pages, self._moe_layers[layer]
        if not places.packed:
            self._read_plain(model_layer, expert, out)
            return
        pages = out.view(places.layer_pages[layer], places.page_bytes)
        if places.layers[layer] is not None:
            assert isinstance(self._source, PackedSource), "packed experts come from a source of such"
            self._source.expert_packed(model_layer, expert, list(pages), **places.tiling(layer))
            return
        size = places.tile_bytes(layer, 0)
        content = torch.empty(len(pages), size, dtype=torch.uint8)
        self._read_plain(model_layer, expert, content.view(-1))
        np.copyto(pages.numpy()[:, :size], content.numpy())

    def _read_plain(self, layer: int, expert: int, out: Tensor) -> None:
        """One expert of a model layer as plain numbers that follow each other."""
        target, start = out.numpy(), 0
        extents = None if self._extents is None else self._extents(layer, expert)
        if extents is None:
            # numpy and not torch: a copy of torch starts threads of its own in each of ours.
            for part in self._source.expert(layer, expert):
                values = part.reshape(-1).view(torch.uint8).numpy()
                np.copyto(target[start : start + len(values)], values)
                start += len(values)
            return
        for path, offset, size in extents:
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
