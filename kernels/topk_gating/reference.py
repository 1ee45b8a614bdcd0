"""Top-k gating on the CPU, in numpy: on as few numbers as a decoded token has, its calls cost a fraction of torch's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def topk_gating_reference(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See `rimuru_kernels.topk_gating.topk_gating`; arguments are taken as checked."""
    rows = logits.float().numpy()
    probabilities = np.exp(rows - rows.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    # A stable sort of the negated values: among equals the lower index comes first, and NaN last.
    ids = np.ascontiguousarray(np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k])
    ids.sort(axis=1)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    return torch.from_numpy(weights), torch.from_numpy(ids)
