"""Causal attention in plain memory: the formula that every faster path is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_SCORES = 1 << 24  # scores held at a time; bounds the workspace of long prompts to about 64 MiB in float32


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, *, scale: float, sliding_window: int | None = None) -> Tensor:
    """softmax(scale q·k + mask) v for the last T positions of one sequence; query head i reads key/value head i // (H / Hkv).

    Args:
        q: [T, H, D], the queries of positions S - T to S - 1.
        keys, values: [S, Hkv, D], all positions so far.
        sliding_window: key j is visible to query i iff 0 <= i - j < sliding_window; None: every j <= i.

    Returns:
        [T, H, D] in q's dtype; scores and softmax in float32 at least.

    Raises:
        ValueError: shapes that do not go together.
    """
    tokens, heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    if keys.shape != values.shape or keys.shape[2] != head_dim or heads % kv_heads or tokens > length:
        raise ValueError(f"causal_attention: q {list(q.shape)}, keys {list(keys.shape)}, values {list(values.shape)} do not go together")
    rows = max(1, _MAX_SCORES // (heads * length))
    parts = []
    for start in range(0, tokens, rows):
        part = q[start : start + rows]
        first = length - tokens + start  # position of the first query of this part
        parts.append(_attend(part, keys[: first + part.shape[0]], values[: first + part.shape[0]], scale, sliding_window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    tokens, heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    grouped = q.view(tokens, kv_heads, heads // kv_heads, head_dim) if q.is_contiguous() else q.reshape(tokens, kv_heads, -1, head_dim)
    scores = torch.einsum("tkgd,skd->kgts", grouped, keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    if tokens > 1 or window is not None:
        query = torch.arange(length - tokens, length, device=q.device).view(-1, 1)
        key = torch.arange(length, device=q.device)
        hidden = key > query if window is None else (key > query) | (key <= query - window)
        scores.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, -1).to(values.dtype)
    return torch.einsum("kgts,skd->tkgd", weights, values).reshape(tokens, heads, head_dim)
