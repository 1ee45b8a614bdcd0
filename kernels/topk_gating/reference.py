"""Plain torch top-k gating."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_gating_reference(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See `rimuru_kernels.topk_gating.topk_gating`; arguments are taken as checked."""
    probabilities = torch.softmax(logits, -1, torch.float32)
    ids = _top_ids(probabilities, top_k)
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights /= weights.sum(-1, True)
    return weights, ids


def _top_ids(probabilities: Tensor, top_k: int) -> Tensor:
    """Ascending ids [T, top_k] of the largest entries of each row; ties go to the lower id."""
    tokens = probabilities.shape[0]
    least = torch.topk(probabilities, top_k).values[:, -1:]
    # "not below" rather than "at least": a NaN row then counts with all its entries, so no row has fewer than top_k, and the
    # total alone tells whether every row has exactly that many.
    ids = (probabilities < least).logical_not_().nonzero().select(1, 1)  # row by row, ascending within a row
    if ids.shape[0] == tokens * top_k:
        return ids.view(tokens, top_k)
    # a tie at the border (or NaN): torch.topk would pick any of the equals, a stable sort picks the first
    order = torch.sort(probabilities, dim=-1, descending=True, stable=True).indices
    return order[:, :top_k].sort(-1).values
