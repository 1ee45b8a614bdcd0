"""Running MoE layers whose experts are packed, on the CPU: see `executor.py`, whose rules hold here as well.

A resident expert is multiplied out of its pages, whatever these hold (`cpu_tiles.py`), an absent one out of a place of the workspace where
the host tier has written the same bytes, so results do not depend on where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from rimuru_cli.engine.experts.cpu_tiles import CpuTiles
from rimuru_cli.engine.experts.executor import SWAP_MARGIN, PooledExperts
from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.experts.residency import ExpertTiles


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
        self._kinds = CpuTiles(pages)
        if all(pages.layers):
            self._single = (torch.empty(0), torch.empty(0), torch.empty(0))  # only plain layers use it

    def _make_slots(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def _one_token(self, index: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        ids: list[int] = topk_ids[0].tolist()
        self._ranking.add_token(index, ids, topk_weights[0].tolist())
        found = [self._residency.tiles(index, expert) for expert in ids]
        missed = [expert for expert, tiles in zip(ids, found, strict=True) if tiles is None]
        read = iter(self._read(index, missed))
        chosen = [next(read) if tiles is None else tiles for tiles in found]
        wide = self._products(index, 0, [tiles[0] for tiles in chosen] + [tiles[1] for tiles in chosen], x)
        hidden = silu(wide[: len(ids)], inplace=True).mul_(wide[len(ids) :])
        hidden.mul_(topk_weights[0].unsqueeze(1))
        out = self._products(index, 2, [tiles[2] for tiles in chosen], hidden).sum(0, keepdim=True)
        hits = len(ids) - len(missed)
        self.row_hits[0] += hits
        self._count(index, ids, hits)
        if missed:
            self._residency.offer(index, missed, SWAP_MARGIN)
        return out

    def _read(self, index: int, experts: Sequence[int]) -> list[ExpertTiles]:
        """Absent experts, at most k, read into places of the workspace; valid until the next call."""
        self._host.let_go()
        if not experts:
            return []
        places = [place.unbind(0)[: self._pages.layer_pages[index]] for place in self._places[: len(experts)]]
        self._host.write_some(index, experts, places)
        for expert, place in zip(experts, places, strict=True):
            self._host.hold(index, expert, place)
        return [self._pages.split(index, place) for place in places]

    def _products(self, index: int, projection: int, tiles: Sequence[list[Tensor]], x: Tensor) -> Tensor:
        """Projections of one shape of several experts: x [1, K], for all, or [n, K] -> [n, N]."""
        heights, kind = self._pages.tile_heights(index, projection), self._kinds.of(index, projection)
        if kind is None:
            rows, columns = self._pages.tile_shape(index, projection)
            size = rows * columns * 4
            parts = [[tile[:size].view(torch.float32).view(rows, columns) for tile in own] for own in tiles]
            return torch.stack([torch.cat([torch.mv(part, x[n % len(x)]) for part in own]) for n, own in enumerate(parts)])
        out = [kind.product([own[part] for own in tiles], x)[:, :rows] for part, rows in enumerate(heights)]
        return out[0] if len(heights) == 1 else torch.cat(out, 1)

    def _absent(self, index: int, expert: int) -> ExpertTiles:
        return self._read(index, [expert])[0]

    def _expert(self, index: int, x: Tensor, tiles: ExpertTiles, weights: Tensor) -> Tensor:
        if self._pages.layers[index] is None:
            return super()._expert(index, x, tiles, weights)
        hidden = silu(self._rows_product(index, 0, tiles[0], x), inplace=True).mul_(self._rows_product(index, 1, tiles[1], x))
        return self._rows_product(index, 2, tiles[2], hidden).mul_(weights.unsqueeze(1))

    def _rows_product(self, index: int, projection: int, tiles: list[Tensor], x: Tensor) -> Tensor:
        """One projection of one packed expert over x [R, K] -> float32 [R, N]."""
        kind = self._kinds.of(index, projection)
        assert kind is not None, "of a packed layer"
        heights = self._pages.tile_heights(index, projection)
        parts = [kind.rows_product(tile, x)[:, :rows] for tile, rows in zip(tiles, heights, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _float_weights(self, index: int, tiles: ExpertTiles) -> tuple[Tensor, Tensor, Tensor]:
        for projection, (own, target) in enumerate(zip(tiles, self._single, strict=True)):
            rows, columns = self._pages.tile_shape(index, projection)
            for tile, part in zip(own, torch.split(target, rows), strict=True):
                part.copy_(tile[: rows * columns * 4].view(torch.float32).view(rows, columns))
        return self._single
