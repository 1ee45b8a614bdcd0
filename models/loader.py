"""From a checkpoint to a model: dense weights one by one into their final place, routed experts left on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rimuru_models import ARCHITECTURES
from rimuru_models.layout import LM_HEAD, dense_bytes, kept_wide
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

    def rows(self, pieces: Sequence[tuple[str, int, int]]) -> Tensor:
        """Rows start .. stop - 1 of the named tensors, piece after piece, in one allocation.

        For weights that a checkpoint stores in another order: together the pieces must take every row of their tensors exactly once.
        """
        views = {name: self._reader.dense_view(name) for name, _, _ in pieces}
        first = views[pieces[0][0]]
        count = sum(view.shape[0] for view in views.values())
        assert count == sum(stop - start for _, start, stop in pieces), "every row belongs to one piece"
        out = torch.empty((count, *first.shape[1:]), dtype=self.dtype, device=self.device)
        row = 0
        for name, start, stop in pieces:
            out[row : row + stop - start].copy_(views[name][start:stop])
            row += stop - start
        self._count(out)
        return out

    def vector(self, name: str) -> Tensor:
        """A 1-D tensor, in float32 where its formula is computed so (`layout.kept_wide`)."""
        return self._owned(self._reader.dense_view(name), self._dtype_of(name))

    def norm(self, name: str) -> Tensor:
        """The factors of an RMSNorm: its weight, or 1 + weight where the family centres norms on zero."""
        weight = self.vector(name)
        return weight.add_(1.0) if self.config.zero_centred_norms else weight

    def taps(self, name: str) -> Tensor:
        """A depthwise convolution's weight [C, 1, K] as [K, C]."""
        return self._owned(self._reader.dense_view(name).squeeze(1).t(), self.dtype)

    def _owned(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(view.shape, dtype=dtype, device=self.device).copy_(view)
        self._count(out)
        return out

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32) if kept_wide(self.config, name) else self.dtype

    def inv_freq(self) -> Tensor:
        """Rotary frequencies theta^(-2j / R), j < R / 2, float32 [R / 2], R the dimensions that turn."""
        turned = self.config.rotary_dim
        out = 1.0 / (self.config.rope_theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / max(1, turned)))
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
