"""Paged attention and storing against a float64 formula, over odd sizes, with everything unwritten poisoned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rimuru_kernels.paged_attention import paged_attention, reference, store_kv


def _pages(tokens: int, page_tokens: int, heads: int, head_dim: int, spare: int = 0) -> list[Tensor]:
    return [torch.full((page_tokens, heads, head_dim), float("nan")) for _ in range(-(-tokens // page_tokens) + spare)]


def _expected(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    tokens, heads, groups = len(k), q.shape[1], k.shape[1]
    positions = torch.arange(tokens - len(q), tokens)[:, None]
    keys = torch.arange(tokens)[None]
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    wide_k, wide_v = (t.double().repeat_interleave(heads // groups, dim=1) for t in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double(), wide_k) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hrn,nhd->rhd", weights, wide_v)


@pytest.mark.parametrize("window", [None, 1, 7, 64], ids=lambda w: f"W{w}")
@pytest.mark.parametrize(
    ("rows", "tokens", "page_tokens", "heads", "groups", "head_dim"),
    [(1, 1, 4, 4, 2, 8), (1, 37, 4, 6, 2, 8), (5, 37, 16, 6, 3, 24), (37, 37, 1, 4, 4, 8), (33, 64, 7, 8, 1, 16), (64, 130, 64, 4, 2, 8)],
    ids=lambda v: str(v),
)
def test_equals_the_formula(
    rows: int, tokens: int, page_tokens: int, heads: int, groups: int, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(tokens, h, head_dim) for h in (heads, groups, groups))
    key_pages, value_pages = (_pages(tokens, page_tokens, groups, head_dim, spare=1) for _ in range(2))
    past = tokens - rows
    if past:
        store_kv(k[:past], v[:past], key_pages, value_pages, 0)
    store_kv(k[past:], v[past:], key_pages, value_pages, past)
    expected = _expected(q[past:], k, v, 0.3, window)
    for most_scores in (reference.MAX_SCORES, 3 * heads * tokens, 1):  # in one go, in groups of rows, row by row
        monkeypatch.setattr(reference, "MAX_SCORES", most_scores)
        out = paged_attention(q[past:], key_pages, value_pages, tokens, scale=0.3, sliding_window=window)
        assert out.shape == (rows, heads, head_dim)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_storing_touches_nothing_else() -> None:
    key_pages, value_pages = (_pages(12, 4, 1, 2) for _ in range(2))
    store_kv(torch.ones(5, 1, 2), torch.zeros(5, 1, 2), key_pages, value_pages, 3)
    stored = torch.cat(key_pages)[:, 0, 0]
    assert stored[3:8].tolist() == [1.0] * 5
    assert stored[:3].isnan().all() and stored[8:].isnan().all()


@pytest.mark.parametrize(
    ("q", "pages", "tokens"),
    [
        ((2, 4, 8), (2, 4, 3, 8), 8),
        ((2, 4, 8), (2, 4, 2, 8), 9),
        ((9, 4, 8), (2, 4, 2, 8), 8),
        ((2, 4, 6), (2, 4, 2, 8), 8),
        ((1, 4, 8), (0, 4, 2, 8), 1),
    ],
    ids=["heads", "pages-end", "rows", "head-size", "no-pages"],
)
def test_shapes_that_do_not_belong_together(q: tuple[int, ...], pages: tuple[int, ...], tokens: int) -> None:
    own = list(torch.zeros(pages))
    with pytest.raises(ValueError, match="paged_attention"):
        paged_attention(torch.zeros(q), own, own, tokens, scale=1.0)


def test_storing_past_the_last_page_is_refused() -> None:
    pages = _pages(4, 4, 1, 2)
    with pytest.raises(ValueError, match="do not fit"):
        store_kv(torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), pages, pages, 3)
    with pytest.raises(ValueError, match="differ"):
        store_kv(torch.zeros(2, 1, 2), torch.zeros(1, 1, 2), pages, pages, 0)
