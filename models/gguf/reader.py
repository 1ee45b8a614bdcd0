"""Reading the weights of a GGUF file: memory-mapped, experts as stored, dense tensors as the reference arranges them.

The mapping is private (copy on write), because torch wants writable memory; nothing ever writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, PackedFormat, tile_rows
from rimuru_kernels.packed_weights.format import by_projection
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.gguf.blocks import codes_of, floats_of, pack_blocks
from rimuru_models.gguf.config import config_values
from rimuru_models.gguf.files import GGUFFiles, open_gguf
from rimuru_models.gguf.header import GGUFTensor
from rimuru_models.gguf.kinds import BY_NAME, FLOATS
from rimuru_models.gguf.names import Source
from rimuru_models.gguf.resolve import GGUFMap, block_columns, resolve_gguf
from rimuru_models.gguf.sound import wild_scales
from rimuru_models.layout import dense_shapes
from rimuru_models.mapping import MappedFiles
from rimuru_models.quantization.scheme import DAMAGED
from rimuru_models.tensor_map import unused_parts
from rimuru_models.weights import TORCH_DTYPES, ExpertCodes, ExpertTensors


class GGUFReader:
    """An open GGUF model whose header, metadata and tensors have been found consistent. A `WeightReader`.

    Args:
        path: the file, any of its parts, or a folder with one model.

    Raises:
        NotFoundError, UsageError, CheckpointError: see `open_gguf`, `config_values`, `ModelConfig.from_dict`, `resolve_gguf`.

    Attributes:
        files: the files and their headers.
        config: the model's architecture.
        formats: what is stored how.
        expert_dtype: of what `expert` hands out.
        compute_dtype: of what a device computes with.
        ignored: names of tensors that the model does not use.
        unused_parts: whole parts among them, in words for a person.
    """

    def __init__(self, path: Path) -> None:
        self.files: GGUFFiles = open_gguf(path)
        self.config: ModelConfig = ModelConfig.from_dict(config_values(self.files), where=str(self.files.path))
        self._map: GGUFMap = resolve_gguf(self.files, self.config)
        self._shapes = dense_shapes(self.config)
        self.formats = self._map.formats
        self.expert_dtype: torch.dtype = TORCH_DTYPES[self.formats.expert_dtype]
        self.compute_dtype: torch.dtype = TORCH_DTYPES[self.formats.compute_dtype]
        self.ignored: tuple[str, ...] = self._map.ignored
        self.unused_parts: tuple[str, ...] = unused_parts(self.ignored)
        self._mapping = MappedFiles(self._promised)

    def _promised(self, path: Path) -> int:
        return max((tensor.stop for tensor in self.files.headers[path].tensors.values()), default=0)

    def check_files(self) -> None:
        """Look whether a file has become shorter, in which case reading on would kill the process; see `MappedFiles.check`."""
        self._mapping.check()

    def _rows(self, name: str, first: int = 0, count: int | None = None) -> tuple[str, Tensor]:
        """Type of a tensor, and rows of it as they lie in the file: uint8 [count, bytes of a row], a view.

        Raises:
            CheckpointError: a scale in them is not a finite number.
        """
        path, tensor = self.files.tensors[name]
        num_bytes = row_bytes(tensor)
        total = (tensor.stop - tensor.start) // num_bytes
        count = total if count is None else count
        start = tensor.start + first * num_bytes
        rows = torch.frombuffer(self._mapping(path), dtype=torch.uint8, count=count * num_bytes, offset=start).view(count, -1)
        if wild_scales(tensor.kind, rows.numpy()):
            raise CheckpointError(f"{path}: tensor {name!r} has a scale that is not a finite number.", hint=DAMAGED)
        return tensor.kind, rows

    # ---- dense tensors -------------------------------------------------------------------------------------------------------------

    def dense_view(self, name: str) -> Tensor:
        """A dense tensor by its canonical name and in its canonical arrangement: as stored (a view) where it is plain numbers that nothing
        has to be done to, else an owned float32 tensor.
        """
        source, shape = self._map.dense[name], self._shapes[name]
        if len(source.names) == 1 and source.rows is None and source.columns is None and source.change == "none":
            view = self._plain_view(source.names[0])
            if view is not None:
                return view.view(shape)
        parts = [floats_of(*self._rows(one)) for one in source.names]
        if len(shape) == 1 or shape[0] == 1:
            parts = [part.reshape(-1, 1) for part in parts]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        if source.rows is not None:
            values = values[torch.from_numpy(source.rows())]
        if source.columns is not None:
            values = values[:, torch.from_numpy(source.columns())]
        if source.change == "one less":
            values -= 1.0
        elif source.change == "log of the negative":
            if not bool((values < 0).all()):
                raise CheckpointError(f"{self.files.path}: tensor {source.names[0]!r} holds a decay that is not below 0.")
            values = values.neg_().log_()
        return values.reshape(shape)

    def _plain_view(self, name: str) -> Tensor | None:
        """A view of plain numbers in their own dtype; None for blocks, and where the file has them at an odd address."""
        path, tensor = self.files.tensors[name]
        if tensor.kind not in FLOATS:
            return None
        dtype = TORCH_DTYPES[tensor.kind]
        if tensor.start % dtype.itemsize:
            return None
        count = (tensor.stop - tensor.start) // dtype.itemsize
        return torch.frombuffer(self._mapping(path), dtype=dtype, count=count, offset=tensor.start).view(tensor.shape)

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """A dense tensor by its canonical name, as an owned, contiguous copy in `dtype`."""
        return self.dense_view(name).to(dtype, copy=True)

    def dense_codes(self, name: str) -> tuple[Codes, PackedFormat] | None:
        """A quantised dense matrix as stored, its rows (and whole blocks of columns) in their canonical order; None for plain numbers."""
        packed = self.formats.dense.get(name)
        if packed is None:
            return None
        return codes_of(*self._dense_rows(name)), packed

    def dense_page(self, name: str) -> Tensor:
        """A quantised dense matrix by its canonical name as one page; see `WeightReader`."""
        return pack_blocks(*self._dense_rows(name))

    def _dense_rows(self, name: str) -> tuple[str, Tensor]:
        """Type and rows of a quantised dense matrix, put in their canonical order."""
        source = self._map.dense[name]
        found = [self._rows(one) for one in source.names]
        kind = found[0][0]
        rows = found[0][1] if len(found) == 1 else torch.cat([part for _, part in found])
        if source.rows is not None:
            rows = rows[torch.from_numpy(source.rows())]
        if source.columns is not None:
            rows = _moved_blocks(rows, kind, source)
        return kind, rows.contiguous()

    def check_tied(self) -> None:
        """A GGUF file ties embeddings by leaving the output matrix out, so that there is nothing to compare."""

    # ---- experts -------------------------------------------------------------------------------------------------------------------

    def _expert_rows(self, layer: int, expert: int) -> tuple[tuple[str, Tensor], tuple[str, Tensor], tuple[str, Tensor]]:
        """Types and rows of gate, up and down."""
        source = self._map.experts[layer]
        width, hidden = self.config.expert_intermediate, self.config.hidden_size
        if source.single:
            gate, up, down = (self._rows(name) for name in source.single[expert])
            return gate, up, down
        first, last = source.stacked[0], source.stacked[-1]
        down = self._rows(last, expert * hidden, hidden)
        if len(source.stacked) == 2:
            start = 2 * expert * width
            return self._rows(first, start, width), self._rows(first, start + width, width), down
        return self._rows(first, expert * width, width), self._rows(source.stacked[1], expert * width, width), down

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """One routed expert: in `expert_dtype`, as views where it is stored so; float32 where the layer's experts are quantised."""
        wanted = self.expert_dtype if self.formats.experts[layer] is None else torch.float32
        gate, up, down = (_numbers(kind, rows, wanted) for kind, rows in self._expert_rows(layer, expert))
        return ExpertTensors(gate, up, down)

    def experts(self, layer: int) -> Iterator[ExpertTensors]:
        """All experts of a sparse layer in order."""
        for expert in range(self.config.num_experts):
            yield self.expert(layer, expert)

    def expert_extents(self, layer: int, expert: int) -> list[tuple[Path, int, int]] | None:
        """Where the files have one routed expert's gate, up and down, in this order: (file, offset in bytes, bytes) of each run.

        None where files do not hold what `expert` hands out.
        """
        source = self._map.experts[layer]
        names = source.stacked or source.single[expert]
        found = []
        for name in names:
            path, tensor = self.files.tensors[name]
            if TORCH_DTYPES.get(tensor.kind) is not self.expert_dtype:
                return None
            size = (tensor.stop - tensor.start) // (self.config.num_experts if source.stacked else 1)
            found.append((path, tensor.start + (expert * size if source.stacked else 0), size))
        return found

    def expert_codes(self, layer: int, expert: int) -> ExpertCodes:
        """One routed expert of a layer whose experts are quantised."""
        gate, up, down = (codes_of(kind, rows) for kind, rows in self._expert_rows(layer, expert))
        return ExpertCodes(gate, up, down)

    def expert_packed(self, layer: int, expert: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        """Write one routed expert of a layer whose experts are quantised into pages; see `WeightReader`. From any thread.

        Raises:
            CheckpointError: a scale that is not a number.
            ValueError: these are not the pages of its row tiles.
        """
        for (kind, rows), own in zip(self._expert_rows(layer, expert), by_projection(pages, tiles), strict=True):
            height = tile_rows(len(rows), len(own))
            for start, page in zip(range(0, len(rows), height), own, strict=True):
                pack_blocks(kind, rows[start : start + height], page, height)

    def close(self) -> None:
        """Give up the files. Views already handed out stay valid: each keeps its mapping alive until it is dropped."""
        self._mapping.close()

    def __enter__(self) -> GGUFReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def row_bytes(tensor: GGUFTensor) -> int:
    """Bytes of one row of a tensor: its fastest dimension."""
    kind = BY_NAME[tensor.kind]
    return tensor.shape[-1] // kind.weights * kind.num_bytes


def _numbers(kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as numbers of a dtype: a view where they are that."""
    stored = TORCH_DTYPES.get(kind)
    if stored is dtype and rows.data_ptr() % stored.itemsize == 0:
        return rows.view(stored)
    return floats_of(kind, rows).to(dtype)


def _moved_blocks(rows: Tensor, kind: str, source: Source) -> Tensor:
    assert source.columns is not None
    order = block_columns(source.columns(), BY_NAME[kind].weights)
    assert order is not None, "formats.dense has only what can be moved in whole blocks"
    blocks = rows.view(len(rows), -1, BY_NAME[kind].num_bytes)
    return blocks[:, torch.from_numpy(np.ascontiguousarray(order))].reshape(len(rows), -1)
