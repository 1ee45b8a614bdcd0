"""Reading weights: memory-mapped files, zero-copy views, one validated map of names.

The mapping is private (copy on write), because torch wants writable memory; nothing ever writes to it, so its pages stay page cache
that the system can drop and read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rimuru_kernels.packed_weights import Codes, PackedFormat, tile_rows
from rimuru_kernels.packed_weights.format import by_projection
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError
from rimuru_models.index import CheckpointIndex, open_index
from rimuru_models.mapping import MappedFiles
from rimuru_models.quantization.formats import WeightFormats
from rimuru_models.quantization.reading import map_parts, read_codes, read_floats, read_page, write_page
from rimuru_models.quantization.scheme import Parts
from rimuru_models.quantization.stored import Stored
from rimuru_models.tensor_map import LayerExperts, Piece, TensorMap, resolve, unused_parts

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class ExpertTensors(NamedTuple):
    """One expert: gate and up [f, d], down [d, f], in the checkpoint's dtype; views of the mapped file, read-only by convention."""

    gate: Tensor
    up: Tensor
    down: Tensor


class ExpertCodes(NamedTuple):
    """One quantised expert: gate and up [f, d], down [d, f]; what they are, `WeightFormats.experts` says."""

    gate: Codes
    up: Codes
    down: Codes


class WeightReader(Protocol):
    """An open model, whatever the files it lies in. Layers are model layers; names are canonical ones (see layout)."""

    config: ModelConfig
    formats: WeightFormats
    expert_dtype: torch.dtype  # of experts that are plain numbers
    compute_dtype: torch.dtype  # of what a device computes with
    unused_parts: tuple[str, ...]  # whole parts of the files that the model does not use, in words for a person

    def dense_view(self, name: str) -> Tensor:
        """A dense tensor: as stored, or float32 where it is quantised."""
        ...

    def dense_codes(self, name: str) -> tuple[Codes, PackedFormat] | None:
        """A quantised dense matrix; None where it is plain numbers."""
        ...

    def dense_page(self, name: str) -> Tensor:
        """A quantised dense matrix as one page (see `packed_weights`), uint8 [page_bytes]; for large ones, since nothing else is made."""
        ...

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """One routed expert as numbers: of `expert_dtype` where its layer is plain (views where possible), else float32."""
        ...

    def expert_codes(self, layer: int, expert: int) -> ExpertCodes:
        """One routed expert of a layer whose experts are quantised."""
        ...

    def expert_packed(self, layer: int, expert: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        """Write one routed expert of a layer whose experts are quantised into pages, from any thread.

        Args:
            pages: contiguous uint8 tensors, each of at least `page_bytes` of its tile: those of gate, then of up, then of down, whose
                rows are cut into tiles of `packed_weights.tile_rows` rows.
            tiles: of gate and of up, and of down; None: a third of the pages each.
        """
        ...

    def check_tied(self) -> None:
        """Check that a second output matrix, where embeddings are tied, repeats them; raises CheckpointError if not."""
        ...

    def close(self) -> None:
        """Give up the files."""
        ...


class CheckpointReader:
    """An open checkpoint whose headers, config and tensor list have been found consistent.

    Args:
        model_dir: folder with config.json and *.safetensors files.

    Raises:
        NotFoundError, CheckpointError: see `open_index`, `ModelConfig.from_dir`, `tensor_map.resolve`; nothing stays open then.

    Attributes:
        index: where each tensor lies.
        config: the model's architecture.
        formats: what every weight is stored as.
        expert_dtype: torch dtype of experts that are plain numbers (`WeightFormats.expert_dtype`).
        compute_dtype: torch dtype that a device computes with.
        ignored: names of tensors that the model does not use.
        unused_parts: whole parts among them, in words for a person (the vision part of a multimodal checkpoint, say).
    """

    def __init__(self, model_dir: Path) -> None:
        self.index: CheckpointIndex = open_index(Path(model_dir))
        self.config: ModelConfig = ModelConfig.from_dir(self.index.model_dir)
        self._map: TensorMap = resolve(self.index, self.config)
        self.formats: WeightFormats = self._map.formats
        self.expert_dtype: torch.dtype = TORCH_DTYPES[self.formats.expert_dtype]
        self.compute_dtype: torch.dtype = TORCH_DTYPES[self.formats.compute_dtype]
        self.ignored: tuple[str, ...] = self._map.ignored
        self.unused_parts: tuple[str, ...] = unused_parts(self.ignored)
        self._mapping = MappedFiles(self._promised)
        self._check_data()

    def validate(self) -> None:
        """Check again that the checkpoint holds every tensor the config asks for (the constructor already did).

        Raises:
            CheckpointError: names file and tensor.
        """
        resolve(self.index, self.config)

    def _promised(self, path: Path) -> int:
        header = self.index.headers[path]
        return header.data_offset + max((info.stop for info in header.tensors.values()), default=0)

    def check_files(self) -> None:
        """Look whether a file has become shorter, in which case reading on would kill the process; see `MappedFiles.check`."""
        self._mapping.check()

    def let_go(self) -> None:
        """See `MappedFiles.let_go`."""
        self._mapping.let_go()

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
        """A dense tensor by its canonical name (see layout), as `view` gives it; float32 where it is quantised."""
        piece = self._map.dense[name]
        return self.view(piece) if isinstance(piece, str) else read_floats(piece, self._parts(piece))

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """A dense tensor by its canonical name, as an owned, contiguous copy in `dtype`."""
        return self.dense_view(name).to(dtype, copy=True)

    def dense_codes(self, name: str) -> tuple[Codes, PackedFormat] | None:
        """A dense matrix by its canonical name as it is quantised; None where it is plain numbers."""
        piece = self._map.dense[name]
        return None if isinstance(piece, str) else (read_codes(piece, self._parts(piece)), piece.fmt)

    def dense_page(self, name: str) -> Tensor:
        """A quantised dense matrix by its canonical name as one page; see `WeightReader`."""
        piece = self._map.dense[name]
        assert isinstance(piece, Stored), "only quantised matrices are pages"
        return read_page(piece, self._parts(piece))

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """One routed expert of a sparse layer: zero-copy views in `expert_dtype`; float32 where the layer is quantised."""
        layer_map = self._map.experts[layer]
        if layer_map.fused is None:
            gate, up, down = map(self._floats, layer_map.per_expert[expert])
            if self.formats.experts[layer] is not None:
                return ExpertTensors(gate, up, down)
            return ExpertTensors(gate.to(self.expert_dtype), up.to(self.expert_dtype), down.to(self.expert_dtype))
        width = self.config.expert_intermediate
        gate_up, down = (self._floats(name, expert) for name in layer_map.fused)
        return ExpertTensors(gate_up[:width], gate_up[width:], down)

    def _floats(self, piece: Piece, index: int | None = None) -> Tensor:
        if isinstance(piece, Stored):
            return read_floats(piece, self._parts(piece))
        view = self.view(piece)
        return view if index is None else view[index]

    def experts(self, layer: int) -> Iterator[ExpertTensors]:
        """All experts of a sparse layer in order."""
        for expert in range(self.config.num_experts):
            yield self.expert(layer, expert)

    def expert_codes(self, layer: int, expert: int) -> ExpertCodes:
        """One routed expert of a layer whose experts are quantised (`formats.experts`), losslessly."""
        gate, up, down = (read_codes(piece, self._parts(piece)) for piece in self._quantised_pieces(layer, expert))
        return ExpertCodes(gate, up, down)

    def expert_packed(self, layer: int, expert: int, pages: Sequence[Tensor], tiles: tuple[int, int] | None = None) -> None:
        """Write one routed expert of a layer whose experts are quantised into pages; see `WeightReader`. From any thread.

        Raises:
            CheckpointError: its data contradict what the headers promise.
            ValueError: these are not the pages of its row tiles.
        """
        for piece, own in zip(self._quantised_pieces(layer, expert), by_projection(pages, tiles), strict=True):
            parts, rows = self._parts(piece), tile_rows(piece.rows, len(own), piece.fmt.group_rows)
            for start, page in zip(range(0, piece.rows, rows), own, strict=True):
                write_page(piece, parts, page, start, min(start + rows, piece.rows), rows)

    def _quantised_pieces(self, layer: int, expert: int) -> list[Stored]:
        assert self.formats.experts[layer] is not None, "the experts of this layer are plain numbers"
        return [piece for piece in self._map.experts[layer].per_expert[expert] if isinstance(piece, Stored)]

    def _parts(self, piece: Stored) -> Parts:
        return map_parts(piece, self.index, self._mapping)

    def _check_data(self) -> None:
        """Look at the first matrix of each kind, so that what only the data show is refused here and not in the middle of loading."""
        first: dict[object, Stored] = {}
        for piece in (*self._map.dense.values(), *(piece for layer in self._map.experts.values() for piece in layer.pieces())):
            if isinstance(piece, Stored):
                first.setdefault(piece.scheme, piece)
        try:
            for piece in first.values():
                self._parts(piece)
        except CheckpointError:
            self.close()
            raise

    def expert_tensors(self, layer: int) -> LayerExperts:
        """Where the experts of a sparse layer lie on disk."""
        return self._map.experts[layer]

    def expert_extents(self, layer: int, expert: int) -> list[tuple[Path, int, int]] | None:
        """Where the files have one routed expert's gate, up and down, in this order: (file, offset in bytes, bytes) of each run.

        None where files do not hold what `expert` hands out, because the layer is quantised, at least in part.
        """
        layer_map = self._map.experts[layer]
        if layer_map.fused is not None:
            return [self._extent(name, expert, self.config.num_experts) for name in layer_map.fused]
        names = [name for name in layer_map.per_expert[expert] if isinstance(name, str)]
        return [self._extent(name, 0, 1) for name in names] if len(names) == 3 else None

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
        self._mapping.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
