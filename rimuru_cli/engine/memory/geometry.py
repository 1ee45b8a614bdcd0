"""Sizes of the pool's pages: which kinds there are, what splits into what, and what is lost in tails.

    L1   huge page     P_h
    L2   expert page   P_e, one projection matrix (or one row tile of it)      a huge page splits into all-expert
         SSM page      P_s, one layer's recurrent state of one sequence        or into all-SSM pages
    L3   KV page       block_tokens tokens of one layer, K and V               an L2 page splits into all-KV
         conv page     one row of a convolution state                          or into all-conv pages

A parent of size p holds floor(p / s) children of size s; the rest of the parent is its tail and is lost while it is split. L3 pages lie
in whichever L2 size loses less.
Every page starts at a multiple of 256 bytes, so a page is named by an *entry*, its offset from the pool base divided by 256.

Sizes are bytes throughout. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property

from rimuru_models.errors import DoesNotFitError

ENTRY_BYTES = 256
"""Bytes per unit of an entry. Page tables hold int32 entries, so a pool may reach 512 GiB."""

MAX_PAGE_BYTES = 16 * 1024 * 1024
"""Largest page, and largest exact common multiple used as a huge page."""

CHUNK_BYTES = 32 << 20
"""Memory behind a device's pool is taken and given back in pieces of this size: a call for each costs tens of microseconds."""

GUARD_BYTES = 4096
"""A device's pool starts so far behind the beginning of its memory."""

SMALL_POOL = 1 << 30
"""Below this size the pieces are the smallest that the driver makes."""

MAX_EXPERTS_PER_HUGE_PAGE = 4
HUGE_OF_SMALL_PAGES = 8 << 20
"""Small pages, those of packed experts, may come in larger numbers: up to so many bytes in a huge page."""
MAX_SSM_WASTE = Fraction(5, 100)
MAX_KV_TAIL = Fraction(1, 100)


class PageKind(Enum):
    """What a page holds."""

    EXPERT = "expert"
    SSM = "ssm"
    KV = "kv"
    CONV = "conv"

    # Enum's own is a Python function, which costs more than what is looked up with it.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class PageLayout:
    """How pages of one kind lie in their parents.

    Attributes:
        kind: what the page holds.
        level: 2 for expert and SSM pages, 3 for KV and conv pages.
        parent: kind whose page size the parent has, or None where the parent is a huge page.
        page_bytes: bytes of content.
        stride_bytes: bytes from one page to the next in the same parent: page_bytes rounded up to ENTRY_BYTES.
        per_parent: pages in one parent.
        tail_bytes: bytes of each split parent that no page covers.
    """

    kind: PageKind
    level: int
    parent: PageKind | None
    page_bytes: int
    stride_bytes: int
    per_parent: int
    tail_bytes: int

    @property
    def waste(self) -> float:
        """Part of a split parent that holds no content (tail and rounding to ENTRY_BYTES), 0 to 1."""
        return 1.0 - self.per_parent * self.page_bytes / (self.per_parent * self.stride_bytes + self.tail_bytes)


def round_to_entry(num_bytes: int) -> int:
    """Smallest multiple of ENTRY_BYTES that is at least num_bytes."""
    return -(-num_bytes // ENTRY_BYTES) * ENTRY_BYTES


def expert_tiling(f: int, d: int, itemsize: int, max_page_bytes: int = MAX_PAGE_BYTES) -> int:
    """Number of row tiles t that one projection is stored in; t = 1 where a whole projection fits a page.

    Gate and up [f, d] are cut along f, down [d, f] along d, so that all 3·t tiles have f·d·itemsize/t bytes. The result is the
    smallest t that divides f and d with tiles of at most max_page_bytes and tile rows (f/t and d/t) that are multiples of 128; where
    there is none, multiples of 64; where there is none either, any common divisor of f and d.

    Raises:
        DoesNotFitError: not even the finest tiling brings a tile down to max_page_bytes.
    """
    _check_positive(f=f, d=d, itemsize=itemsize, max_page_bytes=max_page_bytes)
    projection_bytes = f * d * itemsize
    if projection_bytes <= max_page_bytes:
        return 1
    fewest = -(-projection_bytes // max_page_bytes)
    for t in row_tilings(f, d):
        if t >= fewest:
            return t
    raise DoesNotFitError(
        f"An expert projection of {f} x {d} ({projection_bytes} bytes) cannot be cut into equal row tiles of at most "
        f"{max_page_bytes} bytes: {f} and {d} have no common divisor of {fewest} or more.",
        hint="Allow larger pages, or use a checkpoint in a smaller number format.",
    )


def row_tilings(f: int, d: int) -> Iterator[int]:
    """Numbers of equal row tiles that matrices of f and of d rows can both be cut into, the preferred ones first: 1; those that leave
    tiles of a multiple of 128 rows, fewest first; of 64 rows; any."""
    yield 1
    common = math.gcd(f, d)
    for row_multiple in (128, 64, 1):
        # t divides f / row_multiple and d / row_multiple exactly when both tile heights are multiples of row_multiple.
        limit = common // row_multiple if common % row_multiple == 0 else 0
        yield from (t for t in range(2, limit + 1) if limit % t == 0)


def huge_page_bytes(expert_page_bytes: int, ssm_page_bytes: int | None) -> int:
    """Size P_h of a huge page for expert pages of P_e and SSM pages of P_s bytes (both multiples of ENTRY_BYTES).

    Without SSM pages P_h = P_e. With them P_h = lcm(P_e, P_s) where that is at most 16 MiB. Otherwise P_h = a·P_e with the smallest
    a <= 4 (small pages: as many as 8 MiB hold) whose SSM tail (P_h mod P_s) / P_h is at most 5 %, or, if there is none, the one with the
    least tail. Experts are never padded. Where even 4·P_e is smaller than one state, as many a from the smallest on that holds a state
    are tried instead.
    """
    if ssm_page_bytes is None:
        return expert_page_bytes
    common = math.lcm(expert_page_bytes, ssm_page_bytes)
    if common <= MAX_PAGE_BYTES:
        return common
    first = 1
    if MAX_EXPERTS_PER_HUGE_PAGE * expert_page_bytes < ssm_page_bytes:
        first = -(-ssm_page_bytes // expert_page_bytes)
    most = max(MAX_EXPERTS_PER_HUGE_PAGE, HUGE_OF_SMALL_PAGES // expert_page_bytes)
    sizes = [a * expert_page_bytes for a in range(first, first + most)]
    wastes = [Fraction(size % ssm_page_bytes, size) for size in sizes]
    for size, waste in zip(sizes, wastes, strict=True):
        if waste <= MAX_SSM_WASTE:
            return size
    return sizes[wastes.index(min(wastes))]


def choose_block_tokens(
    kv_token_bytes: int, expert_page_bytes: int, ssm_page_bytes: int | None = None, *, requested: int = 16, max_tail: Fraction = MAX_KV_TAIL
) -> int:
    """Tokens per KV page: the largest power of two <= requested that wastes at most max_tail of a huge page split into KV pages.

    If no power of two wastes so little, the one with the least waste is taken (the larger one where two waste the same).

    Args:
        kv_token_bytes: bytes of one token in one layer, K and V together.
        expert_page_bytes: P_e, a tile's bytes where experts are tiled.
        ssm_page_bytes: P_s, or None.
        requested: upper bound, in tokens.
        max_tail: accepted part of the huge page, 0 to 1.

    Raises:
        DoesNotFitError: one token is larger than any L2 page.
    """
    _check_positive(kv_token_bytes=kv_token_bytes, expert_page_bytes=expert_page_bytes, requested=requested)
    parents = [round_to_entry(size) for size in (expert_page_bytes, ssm_page_bytes) if size is not None]
    huge = huge_page_bytes(parents[0], parents[1] if len(parents) > 1 else None)

    def waste(tokens: int) -> Fraction:
        page_bytes = tokens * kv_token_bytes
        pages = max(_pages_per_huge(huge, parent, round_to_entry(page_bytes)) for parent in parents)
        return 1 - Fraction(pages * page_bytes, huge)

    sizes = [1 << power for power in reversed(range(requested.bit_length()))]
    wastes = [waste(tokens) for tokens in sizes]
    for tokens, wasted in zip(sizes, wastes, strict=True):
        if wasted <= max_tail:
            return tokens
    if min(wastes) == 1:
        raise DoesNotFitError(
            f"The keys and values of one token of one layer take {kv_token_bytes} bytes; "
            f"the largest page they could lie in has {max(parents)}.",
            hint="This checkpoint's experts are too small next to its attention; it cannot run from this pool.",
        )
    return sizes[wastes.index(min(wastes))]


@dataclass(frozen=True)
class PoolGeometry:
    """All page sizes of one pool. Make one with `build` or `from_bytes`.

    Attributes:
        expert_page_bytes: P_e: one projection, or one row tile of it.
        tiles: row tiles per projection, the most where they differ; see `pages_per_expert`.
        ssm_page_bytes: P_s, or None for a model without recurrent states.
        kv_page_bytes: one token block of one layer, K and V.
        conv_row_bytes: one row of a convolution state, or None.
        huge_page_bytes: P_h.
        layouts: one PageLayout per kind the pool can hold, in the order of PageKind.
        most_pages: pages of an expert, of the layer whose experts have the most; None: 3·tiles, in every layer.
    """

    expert_page_bytes: int
    tiles: int
    ssm_page_bytes: int | None
    kv_page_bytes: int
    conv_row_bytes: int | None
    huge_page_bytes: int
    layouts: tuple[PageLayout, ...]
    most_pages: int | None = None

    @classmethod
    def build(
        cls,
        *,
        f: int,
        d: int,
        weight_itemsize: int,
        kv_heads: int,
        head_dim: int,
        kv_itemsize: int,
        block_tokens: int,
        ssm_page_bytes: int | None = None,
        conv_row_bytes: int | None = None,
        max_page_bytes: int = MAX_PAGE_BYTES,
    ) -> PoolGeometry:
        """Geometry of a model with SwiGLU experts (gate, up [f, d]; down [d, f]) and grouped-query attention.

        Args:
            f: intermediate size of an expert.
            d: hidden size.
            weight_itemsize: bytes per expert weight as stored in the pool.
            kv_heads: key/value heads of one layer.
            head_dim: elements per head.
            kv_itemsize: bytes per cached key or value element.
            block_tokens: tokens per KV page.
            ssm_page_bytes: bytes of one layer's recurrent state of one sequence, or None.
            conv_row_bytes: bytes of one row of a convolution state, or None.
            max_page_bytes: projections above this are tiled.

        Raises:
            DoesNotFitError: a KV page is larger than the page it should lie in, or a projection cannot be tiled.
        """
        _check_positive(kv_heads=kv_heads, head_dim=head_dim, kv_itemsize=kv_itemsize, block_tokens=block_tokens)
        tiles = expert_tiling(f, d, weight_itemsize, max_page_bytes)
        return cls.from_bytes(
            expert_page_bytes=f * d * weight_itemsize // tiles,
            kv_page_bytes=block_tokens * 2 * kv_heads * head_dim * kv_itemsize,
            ssm_page_bytes=ssm_page_bytes,
            conv_row_bytes=conv_row_bytes,
            tiles=tiles,
        )

    @classmethod
    def from_bytes(
        cls,
        expert_page_bytes: int,
        kv_page_bytes: int,
        ssm_page_bytes: int | None = None,
        conv_row_bytes: int | None = None,
        tiles: int = 1,
        most_pages: int | None = None,
    ) -> PoolGeometry:
        """Geometry from page sizes. expert_page_bytes is a tile's size where tiles > 1; most_pages: see the class.

        Raises:
            DoesNotFitError: a KV or conv page is larger than every L2 page.
        """
        _check_positive(expert_page_bytes=expert_page_bytes, kv_page_bytes=kv_page_bytes, tiles=tiles)
        l2_bytes = {PageKind.EXPERT: expert_page_bytes}
        if ssm_page_bytes is not None:
            _check_positive(ssm_page_bytes=ssm_page_bytes)
            l2_bytes[PageKind.SSM] = ssm_page_bytes
        l3_bytes = {PageKind.KV: kv_page_bytes}
        if conv_row_bytes is not None:
            _check_positive(conv_row_bytes=conv_row_bytes)
            l3_bytes[PageKind.CONV] = conv_row_bytes

        l2_strides = {kind: round_to_entry(size) for kind, size in l2_bytes.items()}
        huge = huge_page_bytes(l2_strides[PageKind.EXPERT], l2_strides.get(PageKind.SSM))
        layouts = [_layout(kind, 2, None, size, huge) for kind, size in l2_bytes.items()]
        for kind, size in l3_bytes.items():
            parent = _l3_parent(kind, size, huge, l2_strides)
            layouts.append(_layout(kind, 3, parent, size, l2_strides[parent]))
        return cls(
            expert_page_bytes=expert_page_bytes,
            tiles=tiles,
            ssm_page_bytes=ssm_page_bytes,
            kv_page_bytes=kv_page_bytes,
            conv_row_bytes=conv_row_bytes,
            huge_page_bytes=huge,
            layouts=tuple(layouts),
            most_pages=most_pages,
        )

    @cached_property
    def _by_kind(self) -> dict[PageKind, PageLayout]:
        return {layout.kind: layout for layout in self.layouts}

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        """Kinds the pool can hold."""
        return tuple(layout.kind for layout in self.layouts)

    @property
    def pages_per_expert(self) -> int:
        """Expert pages of one expert: gate, up and down, each of `tiles` pages; of the layer that takes the most."""
        return 3 * self.tiles if self.most_pages is None else self.most_pages

    def layout(self, kind: PageKind) -> PageLayout:
        """Layout of a kind; KeyError if the pool has no such kind."""
        return self._by_kind[kind]

    def pages_per_huge(self, kind: PageKind) -> int:
        """Pages of a kind that one free huge page gives; 0 if the pool has no such kind."""
        layout = self._by_kind.get(kind)
        if layout is None:
            return 0
        return layout.per_parent if layout.parent is None else layout.per_parent * self._by_kind[layout.parent].per_parent


def _layout(kind: PageKind, level: int, parent: PageKind | None, page_bytes: int, parent_bytes: int) -> PageLayout:
    stride = round_to_entry(page_bytes)
    per_parent, tail = divmod(parent_bytes, stride)
    return PageLayout(kind, level, parent, page_bytes, stride, per_parent, tail)


def _pages_per_huge(huge: int, parent: int, stride: int) -> int:
    """L3 pages in a huge page that is split into L2 pages of `parent` bytes."""
    return (huge // parent) * (parent // stride)


def _l3_parent(kind: PageKind, page_bytes: int, huge: int, l2_strides: dict[PageKind, int]) -> PageKind:
    """The L2 page size through which a huge page gives the most L3 pages, so loses the least in tails of both levels.

    The expert size, which comes first, on a tie: huge pages full of experts are the common case.
    """
    stride = round_to_entry(page_bytes)
    best = max(l2_strides, key=lambda parent: _pages_per_huge(huge, l2_strides[parent], stride))
    if l2_strides[best] < stride:
        what = "A KV page" if kind is PageKind.KV else "A row of the convolution state"
        raise DoesNotFitError(
            f"{what} of {page_bytes} bytes is larger than the largest page it could lie in ({max(l2_strides.values())} bytes).",
            hint="Use a smaller block_tokens." if kind is PageKind.KV else "This checkpoint's experts are too small next to its states.",
        )
    return best


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}.")
