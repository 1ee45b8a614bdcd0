"""Pages of packed experts, as bytes: what they mean depends on the layer, see `ExpertPages`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_cli.engine.experts.pages import ExpertPages
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import ExpertView


class PackedView:
    """What `ExpertView` is, for a model of which some layers' experts are packed: a page is uint8 [page_bytes], of any layer.

    Args:
        pool: where the pages lie.
        pages: how experts lie in them.

    Raises:
        ValueError: the pool's expert pages have another size.
    """

    def __init__(self, pool: PagePool, pages: ExpertPages) -> None:
        if pool.geometry.layout(PageKind.EXPERT).page_bytes != pages.page_bytes:
            raise ValueError(f"An expert page of this pool has {pool.geometry.expert_page_bytes} bytes, not {pages.page_bytes}.")
        self.pool = pool
        self.pages = pages

    def expert(self, entries: Sequence[int], layer: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """All tiles of one expert of a MoE layer as bytes: gate tiles, up tiles, down tiles, each uint8 [page_bytes].

        Args:
            entries: its pages; what is behind them is no part of it.
        """
        count = self.pages.layer_pages[layer]
        return self.pages.split(layer, [self.pool.bytes_of(entry, self.pages.page_bytes) for entry in entries[:count]])

    def matrices(self, entries: Sequence[int]) -> None:
        """None: packed codes are no matrix that can be multiplied with as it lies."""


PageView = ExpertView | PackedView


def view_of(pool: PagePool, pages: ExpertPages, dtype: torch.dtype) -> PageView:
    """The view of a pool's experts; plain ones have this torch.dtype."""
    return PackedView(pool, pages) if pages.packed else ExpertView(pool, pages.f, pages.d, dtype)
