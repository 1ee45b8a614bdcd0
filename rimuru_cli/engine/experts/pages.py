"""How experts lie in pages: plain numbers or packed codes, layer by layer. The one place that knows an expert's bytes. No torch.

An expert is gate, up and down, each in one or more row tiles, a page each. All pages of a pool have one size, that of the largest tile over
layers and projections, so that any expert can take the pages of any other of its layer. Where formats are mixed, larger ones get more
tiles (`tiling.py`), layer by layer; smaller tiles leave the rest of their page empty, in the host tier, too, so that an expert is one
run of bytes and pages of the pool are copies of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from rimuru_cli.engine.experts.planes import has_product, in_planes, plane_parts
from rimuru_cli.engine.experts.tiling import LayerTiles, Matrix, choose_tiles, rows_of_tile
from rimuru_cli.engine.memory.geometry import expert_tiling, round_to_entry, row_tilings
from rimuru_kernels.packed_weights.format import BLOCK, LOW_BITS, PackedFormat, by_projection, page_bytes
from rimuru_kernels.sizes import kv_token_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.quantization.formats import LayerFormats

BLOCK_WEIGHTS = 1 << 18
"""Weights that `packed_products` turns into float32 at once: 1 MiB."""

KV_TOKENS = 16
"""Pages of mixed formats had better hold whole pages of the KV cache, of so many tokens."""

LEAST_PLANE = 3 << 13
"""Matrices with more weights are quicker as a plane. That is a call each, where `packed_products` takes several at once, and exactly."""
LEAST_PLANE_WITH_OFFSETS = 1 << 17
"""The same for formats with minima, which planes keep in bfloat16, so that they lose more by them."""
LEAST_NUMBERS = 1 << 16
"""The same for formats that can be no planes: matrices with more weights are quicker as numbers."""

PACKED_AT_ONCE = 1 << 20
"""Bytes of experts that are read at once before they are written as a CPU multiplies them."""

Lying = Literal["plain", "packed", "planes", "numbers"]
"""How a matrix lies in a page: as plain numbers, as kernels read packed ones, as torch's product of 4-bit matrices reads them
(`planes.py`), as bfloat16 numbers made of codes (`number_products.py`)."""

T = TypeVar("T")
Experts = Mapping[int, LayerFormats | None]
"""Formats of each sparse layer's experts, by model layer; None: plain numbers."""


@dataclass(frozen=True)
class ExpertPages:
    """The pages of experts of one model.

    Attributes:
        f, d: intermediate size of an expert, hidden size.
        itemsize: bytes of a plain weight.
        layers: formats of each MoE layer, counted among the sparse layers only; None: plain.
        layer_tiles: row tiles of each MoE layer's projections, a page each.
        page_bytes: bytes of a page: exactly a tile where all layers are plain, else the largest tile rounded up to whole entries.
        cpu: packed matrices lie as a CPU multiplies them fastest, else as kernels read them.
    """

    f: int
    d: int
    itemsize: int
    layers: tuple[LayerFormats | None, ...]
    layer_tiles: tuple[LayerTiles, ...]
    page_bytes: int
    cpu: bool = False

    @classmethod
    def build(cls, model: ModelConfig, itemsize: int, experts: Experts | None, max_page_bytes: int, *, cpu: bool = False) -> ExpertPages:
        """Choose the tiles of a model's experts.

        Args:
            itemsize: bytes of a plain weight in a page.
            experts: formats of the sparse layers; None: all are plain.
            cpu: see there.

        Raises:
            DoesNotFitError: no row tiles are small enough.
        """
        f, d = model.expert_intermediate, model.hidden_size
        layers = tuple(None if experts is None else experts[layer] for layer in model.moe_layers)
        if not any(layers):
            tiles = expert_tiling(f, d, itemsize, max_page_bytes)
            return cls(f, d, itemsize, layers, (LayerTiles(tiles, tiles),) * len(layers), f * d * itemsize // tiles)
        made = cls(f, d, itemsize, layers, (LayerTiles(1, 1),) * len(layers), 0, cpu)
        formats = {fmt for layer in layers for fmt in layer or (None,)}
        if len(formats) == 1:
            chosen = made._in_equal_tiles(max_page_bytes)
        else:
            matrices = [made._matrices(layer) for layer in range(len(layers))]
            grain = KV_TOKENS * kv_token_bytes(model.num_kv_heads, model.head_dim, itemsize, quantized=False)
            chosen = choose_tiles(matrices, made._content, max_page_bytes, grain)
        if chosen is None:
            raise DoesNotFitError(
                f"An expert projection of {f} x {d} cannot be cut into row tiles of at most {max_page_bytes} bytes.",
                hint="Allow larger pages, or use a checkpoint in a smaller number format.",
            )
        return replace(made, page_bytes=chosen[0], layer_tiles=chosen[1])

    def _in_equal_tiles(self, max_page_bytes: int) -> tuple[int, tuple[LayerTiles, ...]] | None:
        """Where all matrices have one format: as many equal tiles of each as are needed, if there are such."""
        fmt = self.format(0, 0)
        assert fmt is not None, "of packed experts"
        for tiles in row_tilings(self.f, self.d):
            if tiles == 1 or not (self.f // tiles % fmt.group_rows or self.d // tiles % fmt.group_rows):
                sizes = self._content(fmt, self.f // tiles, self.d), self._content(fmt, self.d // tiles, self.f)
                size = round_to_entry(max(sizes))
                if size <= max_page_bytes:
                    return size, (LayerTiles(tiles, tiles),) * len(self.layers)
        return None

    @property
    def packed(self) -> bool:
        """Whether the experts of any layer are packed codes."""
        return any(self.layers)

    @property
    def tiles(self) -> int:
        """Most row tiles of any projection."""
        return max(max(tiles) for tiles in self.layer_tiles)

    @property
    def pages_per_expert(self) -> int:
        """Pages of one expert of the layer that takes the most."""
        return max(self.layer_pages)

    @property
    def alike(self) -> bool:
        """Whether the projections of all layers have as many tiles."""
        return all(tiles == (self.tiles, self.tiles) for tiles in self.layer_tiles)

    @cached_property
    def layer_pages(self) -> tuple[int, ...]:
        """Pages of one expert of each MoE layer."""
        return tuple(tiles.pages for tiles in self.layer_tiles)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the host tier and in the pool, all its pages; the mean over layers, rounded up."""
        return -(-sum(self.layer_pages) * self.page_bytes // len(self.layers))

    def pages_of(self, experts: int) -> int:
        """Pages of so many experts, as many of each layer."""
        return -(-experts * sum(self.layer_pages) // len(self.layers))

    @property
    def content_bytes(self) -> int:
        """Bytes of the experts of all layers, one of each layer, that mean something: without what is left empty in pages."""
        total = 0
        for layer in range(len(self.layers)):
            for projection in range(3):
                fmt, lying = self.format(layer, projection), self.lying(layer, projection)
                columns = self.tile_shape(layer, projection)[1]
                total += sum(self._bytes(fmt, rows, columns, lying) for rows in self.tile_heights(layer, projection))
        return total

    def format(self, layer: int, projection: int) -> PackedFormat | None:
        """Format of a MoE layer's gate (0), up (1) or down (2); None: plain."""
        formats = self.layers[layer]
        return None if formats is None else formats.down if projection == 2 else formats.gate_up

    def tiling(self, layer: int) -> dict[str, tuple[int, int]]:
        """What `expert_packed` has to be told about the pages of a MoE layer's experts; nothing where projections have as many."""
        wide, down = self.layer_tiles[layer]
        return {} if wide == down else {"tiles": (wide, down)}

    def split(self, layer: int, pages: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """What belongs to the pages of one expert of a MoE layer (and perhaps to more behind them), as gate's, up's and down's."""
        gate, up, down = by_projection(pages[: self.layer_pages[layer]], self.layer_tiles[layer])
        return list(gate), list(up), list(down)

    def tile_shape(self, layer: int, projection: int) -> tuple[int, int]:
        """Rows and columns of a tile of gate (0), up (1) or down (2); the last one may have fewer rows, at the places of its first ones."""
        return self._shapes[layer][projection // 2]

    def tile_heights(self, layer: int, projection: int) -> tuple[int, ...]:
        """Rows of each tile."""
        rows, whole = self.tile_shape(layer, projection)[0], self.d if projection == 2 else self.f
        return tuple(min(rows, whole - start) for start in range(0, whole, rows))

    def lying(self, layer: int, projection: int) -> Lying:
        """How a MoE layer's gate (0), up (1) or down (2) lie in pages."""
        return self._lying[layer][projection // 2]

    @cached_property
    def _shapes(self) -> list[tuple[tuple[int, int], ...]]:
        """`tile_shape` of gate and up, and of down, by layer: asked for at every product."""
        return [
            tuple((rows_of_tile(matrix, count), matrix.columns) for matrix, count in zip(self._matrices(layer), tiles, strict=True))
            for layer, tiles in enumerate(self.layer_tiles)
        ]

    @cached_property
    def _lying(self) -> list[tuple[Lying, ...]]:
        return [
            tuple(self._lies(self.format(layer, projection), *self._shapes[layer][projection // 2]) for projection in (0, 2))
            for layer in range(len(self.layers))
        ]

    def tile_bytes(self, layer: int, projection: int) -> int:
        """Bytes of one tile's content; of the last tile at most."""
        return self._content(self.format(layer, projection), *self.tile_shape(layer, projection))

    @property
    def rewritten(self) -> bool:
        """Whether any packed experts lie otherwise than readers write them."""
        return any(lying in ("planes", "numbers") for layer in self._lying for lying in layer)

    @property
    def packed_page_bytes(self) -> int:
        """Bytes of a page that holds any packed tile as kernels read it, rounded up to whole lines of a cache."""
        kinds = {
            (fmt, *self.tile_shape(layer, place))
            for layer in range(len(self.layers))
            for place in (0, 2)
            if (fmt := self.format(layer, place))
        }
        return -(-max(page_bytes(*kind) for kind in kinds) // 64) * 64

    @property
    def packed_at_once(self) -> int:
        """Experts that are read before they are written as a CPU multiplies them: several small ones."""
        return max(1, PACKED_AT_ONCE // (self.pages_per_expert * self.packed_page_bytes))

    def _matrices(self, layer: int) -> tuple[Matrix, Matrix]:
        formats = self.layers[layer]
        wide, tall = (None, None) if formats is None else formats
        return Matrix(wide, self.f, self.d), Matrix(tall, self.d, self.f)

    def _lies(self, fmt: PackedFormat | None, rows: int, columns: int) -> Lying:
        if fmt is None:
            return "plain"
        if not self.cpu:
            return "packed"
        size = rows * columns
        if in_planes(fmt) and has_product():
            least = LEAST_PLANE if fmt.offset in ("none", "zero") else LEAST_PLANE_WITH_OFFSETS
            # Large matrices with groups of 16 would be twice the work and more than twice the bytes as planes.
            if size > least and not (fmt.group == 16 and size > LEAST_NUMBERS):
                return "planes"
        return "numbers" if size > LEAST_NUMBERS else "packed"

    def _content(self, fmt: PackedFormat | None, rows: int, columns: int) -> int:
        """Bytes of a tile of a format."""
        return self._bytes(fmt, rows, columns, self._lies(fmt, rows, columns))

    def _bytes(self, fmt: PackedFormat | None, rows: int, columns: int, lying: Lying) -> int:
        if fmt is None:
            return rows * columns * self.itemsize
        if lying == "numbers":
            return rows * decoded_columns(fmt, columns) * 2
        return plane_parts(fmt, rows, columns).num_bytes if lying == "planes" else page_bytes(fmt, rows, columns)


def decoded_columns(fmt: PackedFormat, columns: int) -> int:
    """Columns that come out of the bytes of a packed row, with those that fill up its last block or group."""
    if LOW_BITS[fmt.values] == 8:
        return fmt.groups(columns) * fmt.group if fmt.group else columns
    return -(-columns // BLOCK) * BLOCK


def block_weights(columns: int) -> int:
    """Weights of a block of `packed_products`, where no matrix has more columns: at least a row, padded."""
    return max(BLOCK_WEIGHTS, columns + BLOCK)


def block_bytes(columns: int) -> int:
    """Bytes of a `code_scratch.Workspace`, and of what a block's scales take: weights, codes of 16 bits, their bytes, scales, pages."""
    return block_weights(columns) * (4 + 2 + 1 + 1 + 2)
