"""From a checkpoint to a model: dense weights one by one into their final place, routed experts left on disk."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rimuru_models import ARCHITECTURES
from rimuru_models.layout import LM_HEAD, dense_bytes
from rimuru_models.weights import CheckpointReader

if TYPE_CHECKING:
    from rimuru_models.decoder import MoeDecoder

Progress = Callable[[int, int], None]


class DenseLoader:
    """Hands out dense weights by canonical name, each converted straight from the mapped file into newly allocated memory.

    Args:
        reader: an open checkpoint.
        dtype: dtype of the weights in memory.
        progress: called with (done bytes, total bytes) after each tensor.
        device: where the weights go.
    """

    def __init__(
        self, reader: CheckpointReader, dtype: torch.dtype, progress: Progress | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.config = reader.config
        self.dtype = dtype
        self.device = torch.device(device)
        self.loaded_bytes = 0
        self.total_bytes = dense_bytes(reader.config, dtype.itemsize)
        self._reader = reader
        self._progress = progress

    def tensor(self, *names: str) -> Tensor:
        """The named tensors stacked along their first dimension, in one allocation (never parts and whole at once)."""
        views = [self._reader.dense_view(name) for name in names]
        out = torch.empty((sum(view.shape[0] for view in views), *views[0].shape[1:]), dtype=self.dtype, device=self.device)
        row = 0
        for view in views:
            out[row : row + view.shape[0]].copy_(view)
            row += view.shape[0]
        self._count(out)
        return out

    def inv_freq(self) -> Tensor:
        """Rotary frequencies theta^(-2j / D), j < D / 2, float32 [D / 2]."""
        head_dim = self.config.head_dim
        out = 1.0 / (self.config.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        out = out.to(self.device)
        self._count(out)
        return out

    def output_matrix(self, embedding: Tensor) -> Tensor:
        """The output matrix [vocab, d]: the embedding itself where both are tied."""
        if self.config.tie_word_embeddings:
            self._reader.check_tied()
            return embedding
        return self.tensor(LM_HEAD)

    def _count(self, tensor: Tensor) -> None:
        self.loaded_bytes += tensor.nbytes
        if self._progress is not None:
            self._progress(self.loaded_bytes, self.total_bytes)


def load_model(
    reader: CheckpointReader, dtype: torch.dtype = torch.float32, progress: Progress | None = None, device: torch.device | str = "cpu"
) -> MoeDecoder:
    """Materialise the dense weights of a model (everything but routed experts): `dense_bytes(config, dtype.itemsize)` bytes.

    Args:
        reader: an open checkpoint; it may be closed afterwards.
        dtype: floating dtype of weights and activations.
        progress: called with (done bytes, total bytes) after each tensor; the last call has done == total.
        device: where weights go and the model computes.

    Raises:
        CheckpointError: embeddings that the config ties but that differ; all else was checked when the reader was made.
        ValueError: dtype is not floating point.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"load_model: dtype must be a floating one, got {dtype}")
    architecture = reader.config.architecture
    model_class: type[MoeDecoder] = getattr(import_module(ARCHITECTURES[architecture]), architecture)
    loader = DenseLoader(reader, dtype, progress, device)
    model = model_class(loader)
    assert loader.loaded_bytes == loader.total_bytes, "dense_bytes() and the model disagree"
    return model
