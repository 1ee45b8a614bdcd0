"""Scratch memory of the MoE kernels: made once for the largest batch, used by every layer in turn. See also `sizes`."""

from __future__ import annotations

import torch

from rimuru_kernels.sizes import COUNT_TOKENS, SMALLEST_TILE, TABLE_FIELDS, max_tiles, sorts


class MoeWorkspace:
    """Scratch for calls of up to `max_tokens` tokens. Calls that use one workspace must follow each other on one stream.

    Args:
        max_tokens: most tokens of a call.
        top_k: experts per token.
        num_experts: experts of a layer.
        f: expert intermediate size.
        d: hidden size.
        dtype: of activations and weights.
        device: where x is.
    """

    def __init__(self, max_tokens: int, top_k: int, num_experts: int, f: int, d: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.top_k = top_k
        pairs = max_tokens * top_k
        sorted_too = sorts(max_tokens, top_k, num_experts)
        tiles = max_tiles(pairs, num_experts, SMALLEST_TILE) if sorted_too else 0
        self.hidden = torch.empty(pairs, f, dtype=dtype, device=device)
        self.contributions = torch.empty(pairs if sorted_too else 0, d, dtype=dtype, device=device)
        self.order = torch.empty(pairs if sorted_too else 0, dtype=torch.int32, device=device)
        self.offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        self.counts = torch.empty(-(-max_tokens // COUNT_TOKENS) if sorted_too else 0, num_experts, dtype=torch.int32, device=device)
        self.table = torch.empty(tiles, TABLE_FIELDS, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes it holds on the device."""
        return sum(
            t.numel() * t.element_size() for t in (self.hidden, self.contributions, self.order, self.offsets, self.counts, self.table)
        )

    def holds(self, num_tokens: int, top_k: int, num_experts: int, f: int, d: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a call of these sizes may use it."""
        return (
            num_tokens <= self.max_tokens
            and top_k == self.top_k
            and self.offsets.numel() == num_experts + 1
            and self.hidden.shape[1] == f
            and self.contributions.shape[1] == d
            and (self.hidden.dtype, self.hidden.device) == (dtype, device)
        )
