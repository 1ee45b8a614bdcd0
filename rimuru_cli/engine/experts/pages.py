"""How experts lie in pages: plain numbers or packed codes, layer by layer. The one place that knows an expert's bytes. No torch.

An expert is gate, up and down, each in the same number of row tiles, a page each. All pages of a pool have one size, that of the largest
tile over layers and projections, so that any expert can take the pages of any other. Where formats are mixed, smaller tiles leave the rest
of their page empty; in the host tier, too, so that an expert is one run of bytes and pages of the pool are copies of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rimuru_cli.engine.experts.planes import in_planes, plane_parts
from rimuru_cli.engine.memory.geometry import expert_tiling, round_to_entry, row_tilings
from rimuru_kernels.packed_weights.format import BLOCK, PackedFormat, page_bytes
from rimuru_models.config import ModelConfig
from rimuru_models.errors import DoesNotFitError
from rimuru_models.quantization.formats import LayerFormats

BLOCK_WEIGHTS = 1 << 18
"""Weights that `packed_products` turns into float32 at once: 1 MiB."""

LEAST_PLANE = 3 << 13
"""Matrices with more weights are quicker as a plane. That is a call each, where `packed_products` takes several at once, and exactly."""
LEAST_TWO_PLANES = 1 << 16
"""The same where the codes have more than four bits: two calls each, and twice the work for an absent expert."""
LEAST_PLANE_WITH_OFFSETS = 1 << 17
"""The same for formats with minima, which planes keep in bfloat16, so that they lose more by them."""

Experts = Mapping[int, LayerFormats | None]
"""Formats of each sparse layer's experts, by model layer; None: plain numbers."""


@dataclass(frozen=True)
class ExpertPages:
    """The pages of experts of one model.

    Attributes:
        f, d: intermediate size of an expert, hidden size.
        itemsize: bytes of a plain weight.
        layers: formats of each MoE layer, counted among the sparse layers only; None: plain.
        tiles: row tiles of a projection, a page each.
        page_bytes: bytes of a page: exactly a tile where all layers are plain, else the largest tile rounded up to whole entries.
        planes: packed matrices are planes of four bits wherever that pays (a CPU, see `planes.py`), else as kernels read them.
    """

    f: int
    d: int
    itemsize: int
    layers: tuple[LayerFormats | None, ...]
    tiles: int
    page_bytes: int
    planes: bool = False

    @classmethod
    def build(cls, model: ModelConfig, itemsize: int, experts: Experts | None, max_page_bytes: int, *, planes: bool = False) -> ExpertPages:
        """Choose the tiles of a model's experts.

        Args:
            itemsize: bytes of a plain weight in a page.
            experts: formats of the sparse layers; None: all are plain.
            planes: see there.

        Raises:
            DoesNotFitError: no equal row tiles are small enough.
        """
        f, d = model.expert_intermediate, model.hidden_size
        layers = tuple(None if experts is None else experts[layer] for layer in model.moe_layers)
        if not any(layers):
            tiles = expert_tiling(f, d, itemsize, max_page_bytes)
            return cls(f, d, itemsize, layers, tiles, f * d * itemsize // tiles)
        for tiles in row_tilings(f, d):
            if tiles > 1 and not all(_whole_groups(formats, f // tiles, d // tiles) for formats in set(layers)):
                continue
            made = cls(f, d, itemsize, layers, tiles, 0, planes)
            size = round_to_entry(max(made.tile_bytes(layer, part) for layer in range(len(layers)) for part in (0, 2)))
            if size <= max_page_bytes:
                return replace(made, page_bytes=size)
        raise DoesNotFitError(
            f"An expert projection of {f} x {d} cannot be cut into equal row tiles of at most {max_page_bytes} bytes.",
            hint="Allow larger pages, or use a checkpoint in a smaller number format.",
        )

    @property
    def packed(self) -> bool:
        """Whether the experts of any layer are packed codes."""
        return any(self.layers)

    @property
    def pages_per_expert(self) -> int:
        """Pages of one expert."""
        return 3 * self.tiles

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the host tier and in the pool: all its pages."""
        return self.pages_per_expert * self.page_bytes

    @property
    def content_bytes(self) -> int:
        """Bytes of the experts of all layers, one of each layer, that mean something: without what is left empty in pages."""
        sizes = [self.tile_bytes(layer, projection) for layer in range(len(self.layers)) for projection in range(3)]
        return self.tiles * sum(sizes)

    def format(self, layer: int, projection: int) -> PackedFormat | None:
        """Format of a MoE layer's gate (0), up (1) or down (2); None: plain."""
        formats = self.layers[layer]
        return None if formats is None else formats.down if projection == 2 else formats.gate_up

    def tile_shape(self, projection: int) -> tuple[int, int]:
        """Rows and columns of a tile of gate (0), up (1) or down (2)."""
        return (self.d // self.tiles, self.f) if projection == 2 else (self.f // self.tiles, self.d)

    def in_planes(self, layer: int, projection: int) -> bool:
        """Whether a MoE layer's gate (0), up (1) or down (2) are planes of four bits."""
        fmt = self.format(layer, projection)
        rows, columns = self.tile_shape(projection)
        if not self.planes or fmt is None or not in_planes(fmt):
            return False
        least = LEAST_PLANE if fmt.values == "int4" else LEAST_TWO_PLANES
        return rows * columns > (least if fmt.offset in ("none", "zero") else max(least, LEAST_PLANE_WITH_OFFSETS))

    def tile_bytes(self, layer: int, projection: int) -> int:
        """Bytes of one tile's content."""
        rows, columns = self.tile_shape(projection)
        fmt = self.format(layer, projection)
        if fmt is None:
            return rows * columns * self.itemsize
        return plane_parts(fmt, rows, columns).num_bytes if self.in_planes(layer, projection) else page_bytes(fmt, rows, columns)


def _whole_groups(formats: LayerFormats | None, wide_rows: int, tall_rows: int) -> bool:
    """Whether row tiles of so many rows hold whole groups of rows that share a scale."""
    return formats is None or (wide_rows % formats.gate_up.group_rows == 0 and tall_rows % formats.down.group_rows == 0)


def block_weights(columns: int) -> int:
    """Weights of a block of `packed_products`, where no matrix has more columns: at least a row, padded."""
    return max(BLOCK_WEIGHTS, columns + BLOCK)


def block_bytes(columns: int) -> int:
    """Bytes of a `packed_products.Workspace`: a block's codes, its codes as 16-bit numbers, and its weights; and its products' sums."""
    return block_weights(columns) * (1 + 2 * 2 + 4)
