"""Memory views: what the bytes of a page mean. Each view turns entries into tensors over the pool's own bytes; nothing is copied.

    ExpertView   one projection, or one row tile of it: gate and up [f/t, d], down [d/t, f]
    KVView       one token block of one layer: K [B, Hkv, D], then V [B, Hkv, D]; at 8 bits: `quantized_kv.py`
    SSMView      one layer's recurrent state of one sequence: [Hv, dk, dv]
    ConvView     one row of a convolution state: [C]; m rows that follow each other are the state [m, C]

A view does not know who owns a page: reading through the wrong one gives nonsense, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from rimuru_cli.engine.memory.geometry import ENTRY_BYTES, PageKind
from rimuru_cli.engine.memory.page_pool import PagePool
from rimuru_kernels.paged_attention import store_kv

GATE, UP, DOWN = 0, 1, 2
"""Order of the projections in an expert's entries."""

_GRAIN = 32_000  # elements; torch gives a copy to several threads from 32768 on


class PageView:
    """Pages of one kind and dtype. Offsets are in elements of that dtype."""

    def __init__(self, pool: PagePool, kind: PageKind, elements: int, dtype: torch.dtype) -> None:
        layout = pool.geometry.layout(kind)
        if elements * dtype.itemsize != layout.page_bytes:
            raise ValueError(
                f"A {kind.value} page of this pool has {layout.page_bytes} bytes, "
                f"but the view's shape takes {elements} x {dtype.itemsize} bytes."
            )
        self.pool = pool
        self.dtype = dtype
        self._data = pool.typed(dtype)
        self._base = self._data.storage_offset()
        self._per_entry = ENTRY_BYTES // dtype.itemsize
        self._stride = layout.stride_bytes // dtype.itemsize

    def _at(self, entry: int, shape: tuple[int, ...], strides: tuple[int, ...], skip: int = 0) -> Tensor:
        # as_strided checks bounds against the storage, which a negative entry need not leave.
        assert entry >= 0, f"entry {entry} is not in the pool"
        return self._data.as_strided(shape, strides, self._base + entry * self._per_entry + skip)


class ExpertView(PageView):
    """Experts as gate, up and down projections of 1 or more row tiles each.

    An expert's entries are gate tiles, then up tiles, then down tiles: 3·tiles of them, anywhere in the pool.

    Args:
        pool: where the pages lie.
        f: intermediate size of an expert.
        d: hidden size.
        dtype: of the stored weights.

    Raises:
        ValueError: f, d and dtype do not make up the pool's expert page.
    """

    def __init__(self, pool: PagePool, f: int, d: int, dtype: torch.dtype) -> None:
        self.f = f
        self.d = d
        self.tiles = pool.geometry.tiles
        if f % self.tiles or d % self.tiles:
            raise ValueError(f"{self.tiles} row tiles divide not both f = {f} and d = {d}.")
        super().__init__(pool, PageKind.EXPERT, f * d // self.tiles, dtype)
        self._wide = ((f // self.tiles, d), (d, 1))
        self._tall = ((d // self.tiles, f), (f, 1))

    def tiles_of(self, projection: int, entry: int) -> Tensor:
        """Rows of one tile: [f/t, d] for projection 0 (gate) and 1 (up), [d/t, f] for 2 (down)."""
        shape, strides = self._tall if projection == DOWN else self._wide
        return self._at(entry, shape, strides)

    def expert(self, entries: Sequence[int], layer: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """All tiles of one expert: (gate tiles, up tiles, down tiles), each a list of `tiles` tensors; of any layer, all are alike."""
        t = self.tiles
        assert len(entries) == 3 * t, f"an expert has {3 * t} pages, not {len(entries)}"
        gate, up, down = ([self.tiles_of(p, entry) for entry in entries[p * t : (p + 1) * t]] for p in (GATE, UP, DOWN))
        return gate, up, down

    def write(self, entries: Sequence[int], gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Copies an expert into its pages, converting to the view's dtype.

        Args:
            entries: 3·tiles pages.
            gate: [f, d].
            up: [f, d].
            down: [d, f].

        Raises:
            ValueError: a shape does not fit.
        """
        wide, tall = (self.f, self.d), (self.d, self.f)
        if tuple(gate.shape) != wide or tuple(up.shape) != wide or tuple(down.shape) != tall:
            raise ValueError(
                f"gate, up and down must be {wide}, {wide} and {tall}, not {(*gate.shape,)}, {(*up.shape,)} and {(*down.shape,)}."
            )
        for tiles, source in zip(self.expert(entries), (gate, up, down), strict=True):
            for tile, rows in zip(tiles, source.chunk(self.tiles), strict=True):
                copy_in_pieces(tile, rows)

    def matrices(self, entries: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """One expert as gate over up [2f, d] and down [d, f], or None where its gate and up pages do not follow each other exactly."""
        size = self.f * self.d
        if self.tiles > 1 or (entries[1] - entries[0]) * self._per_entry != size:
            return None
        return self._at(entries[GATE], (2 * self.f, self.d), (self.d, 1)), self.tiles_of(DOWN, entries[DOWN])


def copy_in_pieces(target: Tensor, source: Tensor) -> None:
    """target.copy_(source) without torch's thread pool, for threads beside the one that computes.

    A second thread that enters an OpenMP region gets a pool of its own, and with more pool threads than cores libgomp stops spinning in all
    of them: every small operation of the main thread would then cost a sleep and a wake, several times what it computes. Copies
    below torch's grain size stay in their thread.
    """
    into, values = target.reshape(-1), source.reshape(-1)
    for start in range(0, len(into), _GRAIN):
        into[start : start + _GRAIN].copy_(values[start : start + _GRAIN])


class KVView(PageView):
    """Keys and values of one token block of one layer: K [B, Hkv, D], then V, in one page.

    Args:
        pool: where the pages lie.
        kv_heads: key/value heads Hkv.
        head_dim: elements D per head.
        block_tokens: tokens B per page.
        dtype: of the cache.

    Raises:
        ValueError: these do not make up the pool's KV page.
    """

    def __init__(self, pool: PagePool, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype) -> None:
        self.block_tokens = block_tokens
        self._half = block_tokens * kv_heads * head_dim
        super().__init__(pool, PageKind.KV, 2 * self._half, dtype)
        self._shape = (block_tokens, kv_heads, head_dim)
        self._strides = (kv_heads * head_dim, head_dim, 1)

    def keys(self, entry: int) -> Tensor:
        """[B, Hkv, D]."""
        return self._at(entry, self._shape, self._strides)

    def values(self, entry: int) -> Tensor:
        """[B, Hkv, D]."""
        return self._at(entry, self._shape, self._strides, self._half)

    def store(self, k: Tensor, v: Tensor, entries: Sequence[int], offset: int) -> None:
        """Write k, v [R, Hkv, D] of consecutive tokens into these pages, from token `offset` of the first page on."""
        store_kv(k, v, [self.keys(entry) for entry in entries], [self.values(entry) for entry in entries], offset)

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of a page to another."""
        self.keys(target)[:count] = self.keys(source)[:count]
        self.values(target)[:count] = self.values(source)[:count]

    @cached_property
    def rows(self) -> Tensor:
        """The pool as [num_rows, n], a view, n as large as lets every half page (keys, or values) be whole rows. See `rows_of`."""
        geometry = self.pool.geometry
        layout = geometry.layout(PageKind.KV)
        assert layout.parent is not None, "KV pages lie in expert or SSM pages"
        parent = geometry.layout(layout.parent)
        # A page starts at a sum of multiples of these, and its values half a page further on.
        starts = (geometry.huge_page_bytes, parent.stride_bytes, layout.stride_bytes, self._half * self.dtype.itemsize)
        row = math.gcd(*starts) // self.dtype.itemsize
        return self._at(0, (self._data.numel() // row, row), (row, 1))

    def rows_of(self, entries: Sequence[int]) -> Tensor:
        """int64 [2, len(entries) * rows_per_half]: the rows of `rows` that hold these pages' keys [0] and values [1], in order."""
        first = torch.tensor(entries, dtype=torch.int64) * self._per_entry // self.rows.shape[1]
        halves = torch.arange(2 * self.rows_per_half).view(2, 1, -1)
        return (first.view(1, -1, 1) + halves).view(2, -1)

    @cached_property
    def rows_per_half(self) -> int:
        """Rows of `rows` that the keys (or the values) of one page take."""
        return self._half // self.rows.shape[1]

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values of pages together: [tokens of these pages, Hkv, D] each, for the two halves of rows from `rows_of`."""
        keys, values = self.rows.index_select(0, rows.reshape(-1)).view(2, -1, *self._shape[1:]).unbind(0)
        return keys, values


class SSMView(PageView):
    """Recurrent states [Hv, dk, dv], one page each.

    Args:
        pool: where the pages lie.
        shape: (Hv, dk, dv): value heads, key and value elements per head.
        dtype: of the state.

    Raises:
        ValueError: the shape does not make up the pool's SSM page.
        KeyError: the pool has no SSM pages.
    """

    def __init__(self, pool: PagePool, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> None:
        heads, key_dim, value_dim = shape
        super().__init__(pool, PageKind.SSM, heads * key_dim * value_dim, dtype)
        self._shape = shape
        self._strides = (key_dim * value_dim, value_dim, 1)

    def state(self, entry: int) -> Tensor:
        """[Hv, dk, dv]."""
        return self._at(entry, self._shape, self._strides)


class ConvView(PageView):
    """Convolution states [m, C], one page per row, m pages that follow each other (`allocate_runs`) per state.

    Args:
        pool: where the pages lie.
        channels: C.
        rows: m, the kernel width less one.
        dtype: of the state.

    Raises:
        ValueError: a row does not make up the pool's conv page.
        KeyError: the pool has no conv pages.
    """

    def __init__(self, pool: PagePool, channels: int, rows: int, dtype: torch.dtype) -> None:
        super().__init__(pool, PageKind.CONV, channels, dtype)
        self._shape = (rows, channels)
        self._entry_stride = self._stride // self._per_entry

    def rows(self, entries: Sequence[int]) -> Tensor:
        """[m, C]: the state whose rows lie in these m pages, a view (rows may be further apart than C elements)."""
        first = entries[0]
        expected = range(first, first + self._shape[0] * self._entry_stride, self._entry_stride)
        assert list(entries) == list(expected), f"the {self._shape[0]} rows of a state must follow each other, not lie at {list(entries)}"
        return self._at(first, self._shape, (self._stride, 1))
