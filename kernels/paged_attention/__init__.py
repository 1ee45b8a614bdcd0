"""Causal attention over paged keys and values, and storing into the pages. See `reference.py` for letters and layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rimuru_kernels.paged_attention import reference

__all__ = ["paged_attention", "store_kv"]


def _check_pages(name: str, width: tuple[int, int], key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], num_tokens: int) -> None:
    if not key_pages or len(key_pages) != len(value_pages):
        raise ValueError(
            f"{name}: {len(key_pages)} key pages and {len(value_pages)} value pages; as many of both, at least one, are needed"
        )
    page_tokens = key_pages[0].shape[0]
    if key_pages[0].shape[1:] != width:
        raise ValueError(f"{name}: pages of shape {tuple(key_pages[0].shape)} cannot hold heads of shape {width}")
    if num_tokens > len(key_pages) * page_tokens:
        raise ValueError(f"{name}: {num_tokens} tokens do not fit into {len(key_pages)} pages of {page_tokens}")


def store_kv(k: Tensor, v: Tensor, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], start: int) -> None:
    """Write k, v [R, G, D] of positions start .. start + R - 1 into the pages [B, G, D] of their sequence.

    Raises:
        ValueError: if shapes differ or the pages end before the last position.
    """
    if k.shape != v.shape:
        raise ValueError(f"store_kv: keys {tuple(k.shape)} and values {tuple(v.shape)} differ")
    _check_pages("store_kv", (k.shape[1], k.shape[2]), key_pages, value_pages, start + k.shape[0])
    reference.store_kv(k, v, key_pages, value_pages, start)


def paged_attention(
    q: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    num_tokens: int,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of q [R, H, D], the last R of `num_tokens` positions, over pages [B, G, D] -> [R, H, D].

    Raises:
        ValueError: if heads are not a multiple of key/value heads, or the pages end before the last position.
    """
    groups = key_pages[0].shape[1] if key_pages else 1
    if q.shape[1] % groups or q.shape[0] > num_tokens:
        raise ValueError(f"paged_attention: queries {tuple(q.shape)} do not fit {groups} key heads and {num_tokens} tokens")
    _check_pages("paged_attention", (groups, q.shape[2]), key_pages, value_pages, num_tokens)
    return reference.paged_attention(q, key_pages, value_pages, num_tokens, scale, sliding_window)
