"""From a checkpoint to a model: dense weights one by one into their final place, routed experts left on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, PackedFormat, pack, page_bytes
from rimuru_models import ARCHITECTURES
from rimuru_models.dense import Matrix, PackedMatrix, StackedMatrix, can_stack, cut, stack
from rimuru_models.layout import LM_HEAD, dense_bytes, dense_shapes, kept_wide, stays_packed
from rimuru_models.weights import WeightReader

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
        packed: keep quantised matrices as they are where a layer can multiply with them (`matrix`); otherwise all become numbers.
    """

    def __init__(
        self,
        reader: WeightReader,
        dtype: torch.dtype,
        progress: Progress | None = None,
        device: torch.device | str = "cpu",
        *,
        packed: bool = False,
    ) -> None:
        self.config = reader.config
        self.dtype = dtype
        self.device = torch.device(device)
        self.loaded_bytes = 0
        self._packed = reader.formats.dense if packed else {}
        self.total_bytes = dense_bytes(reader.config, dtype.itemsize, self._packed)
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
        made = pieces[0][0] in self._reader.formats.dense and first.dtype is self.dtype and self.device.type == "cpu"
        if len(pieces) == 1 and made:  # numbers that were made for us: a copy would hold the largest matrix twice
            self._count(first)
            return first
        out = torch.empty((count, *first.shape[1:]), dtype=self.dtype, device=self.device)
        row = 0
        for name, start, stop in pieces:
            out[row : row + stop - start].copy_(views[name][start:stop])
            row += stop - start
        self._count(out)
        return out

    def matrix(self, *names: str) -> Matrix:
        """As `tensor`, for what a layer multiplies with: quantised matrices stay packed if the loader was told so."""
        shapes = dense_shapes(self.config)
        return self.matrix_rows([(name, 0, shapes[name][0]) for name in names])

    def matrix_rows(self, pieces: Sequence[tuple[str, int, int]]) -> Matrix:
        """As `rows`, for what a layer multiplies with; see `matrix`."""
        names = list(dict.fromkeys(name for name, _, _ in pieces))
        kept = [name for name in names if name in self._packed and stays_packed(self.config, name, self._packed[name])]
        if not kept:
            return self.rows(pieces)
        if len(pieces) == 1 and pieces[0][1:] == (0, dense_shapes(self.config)[kept[0]][0]):
            return self._whole(kept[0])
        held = {name: self._reader.dense_codes(name) for name in kept}
        plain = {name: self._reader.dense_view(name) for name in names if name not in held}
        parts: list[Tensor | tuple[PackedFormat, list[Codes]]] = []
        for name, start, stop in pieces:
            quantised = held.get(name)
            if quantised is None:
                parts.append(plain[name][start:stop])
                continue
            codes, fmt = cut(quantised[0], quantised[1], start, stop), quantised[1]
            last = parts[-1] if parts else None
            if isinstance(last, tuple) and last[0] == fmt and can_stack(fmt, last[1][-1], codes):
                last[1].append(codes)
            else:
                parts.append((fmt, [codes]))
        made = [
            self._packed_part(stack(part[1]), part[0]) if isinstance(part, tuple) else part.to(self.device, self.dtype, copy=True)
            for part in parts
        ]
        for name in names:
            shape = dense_shapes(self.config)[name]
            size = page_bytes(self._packed[name], *shape) if name in held else shape[0] * shape[1] * self.dtype.itemsize
            self._count_bytes(size)
        return made[0] if len(made) == 1 else StackedMatrix(tuple(made))

    def _whole(self, name: str) -> PackedMatrix:
        """A packed matrix straight from the files: the largest ones, embeddings and lm_head, are never taken apart."""
        page = self._reader.dense_page(name).to(self.device)
        self._count(page)
        return PackedMatrix(page, self._packed[name], *dense_shapes(self.config)[name])

    def _packed_part(self, codes: Codes, fmt: PackedFormat) -> PackedMatrix:
        rows, columns = codes.values.shape
        return PackedMatrix(pack(codes, fmt).to(self.device), fmt, rows, columns)

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

    def output_matrix(self, embedding: Matrix) -> Matrix:
        """The output matrix [vocab, d]: the embedding itself where both are tied."""
        if self.config.tie_word_embeddings:
            self._reader.check_tied()
            return embedding
        return self.matrix(LM_HEAD)

    def _count(self, tensor: Tensor) -> None:
        self._count_bytes(tensor.nbytes)

    def _count_bytes(self, num_bytes: int) -> None:
        self.loaded_bytes += num_bytes
        if self._progress is not None:
            self._progress(self.loaded_bytes, self.total_bytes)


def load_model(
    reader: WeightReader,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    *,
    packed: bool = False,
) -> MoeDecoder:
    """Materialise the dense weights of a model (everything but routed experts): as many bytes as `dense_bytes` says.

    Args:
        reader: an open checkpoint; it may be closed afterwards.
        dtype: floating dtype of weights and activations.
        progress: called with (done bytes, total bytes) after each tensor; the last call has done == total.
        device: where weights go and the model computes.
        packed: keep quantised dense matrices packed; otherwise they become numbers of `dtype`.

    Raises:
        CheckpointError: embeddings that the config ties but that differ; all else was checked when the reader was made.
        ValueError: dtype is not floating point.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"load_model: dtype must be a floating one, got {dtype}")
    architecture = reader.config.architecture
    model_class: type[MoeDecoder] = getattr(import_module(ARCHITECTURES[architecture]), architecture)
    loader = DenseLoader(reader, dtype, progress, device, packed=packed)
    model = model_class(loader)
    assert loader.loaded_bytes == loader.total_bytes, "dense_bytes() and the model disagree"
    return model
