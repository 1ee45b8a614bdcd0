"""Running MoE layers whose experts are packed, on the CPU: see `executor.py`, whose rules hold here as well.

Pages hold what the device's do. A resident expert is multiplied out of its pages, an absent one out of a place of the workspace where the
host tier has written the same bytes, so results do not depend on where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from rimuru_cli.engine.experts.executor import SWAP_MARGIN, PooledExperts
from rimuru_cli.engine.experts.packed_products import PackedTile, Workspace
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.experts.plane_products import PlaneTile, products
from rimuru_cli.engine.experts.residency import ExpertTiles
from rimuru_kernels.packed_weights import PackedFormat


class PackedExperts(PooledExperts):
    """`PooledExperts` for a model of which some layers' experts are packed.

    Args:
        pages: how experts lie in pages.
        others: as of `PooledExperts`.
    """

    def __init__(self, *, pages: ExpertPages, **others: Any) -> None:
        self._pages = pages
        super().__init__(**others)
        self._places = torch.empty(self._top_k, pages.pages_per_expert, pages.page_bytes, dtype=torch.uint8)
        self._space = Workspace(max(pages.f, pages.d))
        self._kind = cache(self._make_kind)
        self._plane_kind = cache(PlaneTile)

    def _make_slots(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def _make_kind(self, fmt: PackedFormat, rows: int, columns: int) -> PackedTile:
        return PackedTile(fmt, rows, columns, self._space)

    def _one_token(self, index: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        ids: list[int] = topk_ids[0].tolist()
        self._ranking.add_token(index, ids, topk_weights[0].tolist())
        self._host.let_go()
        chosen, missed = [], []
        for slot, expert in enumerate(ids):
            tiles = self._residency.tiles(index, expert)
            if tiles is None:
                missed.append(expert)
                tiles = self._read(index, expert, self._places[slot])
                self._host.hold(index, expert, self._places[slot].unbind(0))
            chosen.append(tiles)
        gate = self._products(index, 0, [tiles[0] for tiles in chosen], x)
        hidden = silu(gate, inplace=True).mul_(self._products(index, 1, [tiles[1] for tiles in chosen], x))
        hidden.mul_(topk_weights[0].unsqueeze(1))
        out = self._products(index, 2, [tiles[2] for tiles in chosen], hidden).sum(0, keepdim=True)
        hits = len(ids) - len(missed)
        self.row_hits[0] += hits
        self._count(index, ids, hits)
        if missed:
            self._residency.offer(index, missed, SWAP_MARGIN)
        return out

    def _read(self, index: int, expert: int, place: Tensor) -> ExpertTiles:
        """An absent expert, read into a place of the workspace."""
        self._host.write(index, expert, list(place))
        tiles, t = list(place), self._pages.tiles
        return tiles[:t], tiles[t : 2 * t], tiles[2 * t :]

    def _products(self, index: int, projection: int, tiles: Sequence[list[Tensor]], x: Tensor) -> Tensor:
        """One projection of several experts: x [1, K], for all, or [n, K] -> [n, N]."""
        count, fmt = self._pages.tiles, self._pages.format(index, projection)
        rows, columns = self._pages.tile_shape(projection)
        if fmt is None:
            size = rows * columns * 4
            parts = [[tile[:size].view(torch.float32).view(rows, columns) for tile in own] for own in tiles]
            return torch.stack([torch.cat([torch.mv(part, x[n % len(x)]) for part in own]) for n, own in enumerate(parts)])
        if self._pages.in_planes(index, projection):
            out = [products(self._plane_kind(fmt, rows, columns), [own[part] for own in tiles], x) for part in range(count)]
        else:
            out = [self._kind(fmt, rows, columns).product([own[part] for own in tiles], x) for part in range(count)]
        return out[0] if count == 1 else torch.cat(out, 1)

    def _absent(self, index: int, expert: int) -> ExpertTiles:
        self._host.let_go()
        return self._read(index, expert, self._places[0])

    def _expert(self, index: int, x: Tensor, tiles: ExpertTiles, weights: Tensor) -> Tensor:
        if not any(self._pages.in_planes(index, projection) for projection in range(3)):
            return super()._expert(index, x, tiles, weights)
        hidden = silu(self._rows_product(index, 0, tiles[0], x), inplace=True).mul_(self._rows_product(index, 1, tiles[1], x))
        return self._rows_product(index, 2, tiles[2], hidden).mul_(weights.unsqueeze(1))

    def _rows_product(self, index: int, projection: int, tiles: list[Tensor], x: Tensor) -> Tensor:
        """One projection of one expert over x [R, K] -> float32 [R, N]."""
        fmt = self._pages.format(index, projection)
        rows, columns = self._pages.tile_shape(projection)
        if fmt is None or not self._pages.in_planes(index, projection):
            return x @ self._matrix(index, projection, tiles).t()
        kind = self._plane_kind(fmt, rows, columns)
        ordered = kind.ordered(x)
        return torch.cat([kind.product(tile, ordered) for tile in tiles], 1)

    def _float_weights(self, index: int, tiles: ExpertTiles) -> tuple[Tensor, Tensor, Tensor]:
        for projection, own in enumerate(tiles):
            self._matrix(index, projection, own)
        return self._single

    def _matrix(self, index: int, projection: int, tiles: list[Tensor]) -> Tensor:
        """One projection as float32; valid until the next call for such a one."""
        fmt, target = self._pages.format(index, projection), self._single[projection]
        rows, columns = self._pages.tile_shape(projection)
        for tile, part in zip(tiles, target.chunk(len(tiles)), strict=True):
            if fmt is None:
                part.copy_(tile[: rows * columns * 4].view(torch.float32).view(rows, columns))
            else:
                self._kind(fmt, rows, columns).weights(tile, part)
        return target
