"""Keys and values at 8 bits: the same pages, a quarter to a half of the bytes (`rimuru_kernels.paged_attention.quantized`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_cli.engine.memory.views import KVView, PageView
from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_kernels.paged_attention.quantized import dequantize_heads, page_parts, write_tokens


class QuantizedKVView(PageView):
    """Keys and values of one token block of one layer as int8 codes with a float16 scale for each head of each token, in one page.

    Args:
        pool: where the pages lie.
        layout: of a page; quantised.

    Raises:
        ValueError: the layout does not make up the pool's KV page.
    """

    def __init__(self, pool: PagePool, layout: KVLayout) -> None:
        super().__init__(pool, PageKind.KV, layout.page_bytes(1), torch.uint8)
        self.layout = layout
        self.block_tokens = layout.block_tokens

    def page(self, entry: int) -> Tensor:
        """uint8 [bytes of a page], a view."""
        return self._at(entry, (self.layout.page_bytes(1),), (1,))

    def store(self, k: Tensor, v: Tensor, entries: Sequence[int], offset: int) -> None:
        """As `KVView.store`, rounding on the way."""
        size, done = self.block_tokens, 0
        while done < k.shape[0]:
            page, place = divmod(offset + done, size)
            count = min(size - place, k.shape[0] - done)
            write_tokens(k[done : done + count], v[done : done + count], self.page(entries[page]), place, self.layout)
            done += count

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """As `KVView.copy_tokens`: codes and scales as they are."""
        old, new = (page_parts(self.page(entry).unsqueeze(0), self.layout) for entry in (source, target))
        for have, want in zip(old, new, strict=True):
            want[:, :count] = have[:, :count]

    @cached_property
    def rows(self) -> Tensor:
        """The pool as uint8 [num_rows, n], a view, n as large as lets every page begin with a row and take whole rows."""
        geometry = self.pool.geometry
        layout = geometry.layout(PageKind.KV)
        assert layout.parent is not None, "KV pages lie in expert or SSM pages"
        row = math.gcd(geometry.huge_page_bytes, geometry.layout(layout.parent).stride_bytes, layout.stride_bytes)
        return self._at(0, (self._data.numel() // row, row), (row, 1))

    @property
    def rows_per_half(self) -> int:
        """Rows of `rows` that a page takes; keys, values and scales are gathered together."""
        return self._stride // self.rows.shape[1]

    def rows_of(self, entries: Sequence[int]) -> Tensor:
        """int64 [1, len(entries) * rows_per_half]: the rows of `rows` that hold these pages, in order."""
        first = torch.tensor(entries, dtype=torch.int64) * self._per_entry // self.rows.shape[1]
        return (first.view(-1, 1) + torch.arange(self.rows_per_half)).view(1, -1)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values float32 [tokens of these pages, G, D], for rows from `rows_of`."""
        data = self.rows.index_select(0, rows.reshape(-1)).view(-1, self._stride)
        k_codes, v_codes, k_scales, v_scales = page_parts(data, self.layout)
        keys, values = dequantize_heads(k_codes, k_scales, torch.float32), dequantize_heads(v_codes, v_scales, torch.float32)
        return keys.flatten(0, 1), values.flatten(0, 1)


KVPages = KVView | QuantizedKVView
"""Whatever keys and values are stored as."""


def kv_view(pool: PagePool, layout: KVLayout, dtype: torch.dtype) -> KVPages:
    """The view of a pool's KV pages; `dtype` is of elements that are not codes.

    Raises:
        ValueError: the layout does not make up the pool's KV page.
    """
    if layout.quantized:
        return QuantizedKVView(pool, layout)
    return KVView(pool, layout.kv_heads, layout.head_dim, layout.block_tokens, dtype)
