"""Choosing each token's experts from router logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rimuru_kernels.topk_gating.reference import topk_gating_reference


def topk_gating(logits: Tensor, top_k: int, renormalize: bool, *, num_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in float32, the top_k largest, optionally rescaled to sum to 1.

    The choice is a function of each row alone: among equal probabilities the lower expert index wins.

    Args:
        logits: [T, E] floating point.
        top_k: 1 to E.
        renormalize: divide each row's chosen weights by their sum.
        num_tokens: int32 [1] or None; rows from num_tokens on (padding of a captured graph) get ids of -1 and weights of 0.

    Returns:
        weights [T, top_k] float32 and ids [T, top_k] int64, in ascending order of expert index (so that a sum over slots has the
        same order whoever computes it).

    Raises:
        ValueError: not a matrix of floats, or top_k out of range.
    """
    if logits.ndim != 2 or not logits.dtype.is_floating_point:
        raise ValueError(f"topk_gating: need floating-point logits [T, E], got {logits.dtype} {list(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"topk_gating: top_k {top_k} is not between 1 and the {logits.shape[1]} experts")
    if logits.is_cuda and logits.shape[0]:
        from rimuru_kernels.topk_gating import kernel

        weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
        ids = torch.empty((logits.shape[0], top_k), dtype=torch.int64, device=logits.device)
        kernel.topk_gating(logits if logits.stride(1) == 1 else logits.contiguous(), top_k, renormalize, weights, ids, num_tokens)
        return weights, ids
    weights, ids = topk_gating_reference(logits, top_k, renormalize)
    if num_tokens is not None:
        weights[int(num_tokens) :] = 0.0
        ids[int(num_tokens) :] = -1
    return weights, ids
