"""Bytes of scratch memory that ops need, as arithmetic alone: whoever divides memory asks here, before anything is allocated. No torch."""

from __future__ import annotations

MAX_SCORES = 1 << 22
"""Most attention scores that the plain torch reference holds at once (floats); longer prefills are done in groups of rows."""

SMALLEST_TILE = 8
COUNT_TOKENS = 64
"""Tokens that a program of the MoE kernels `count_pairs` and `place_pairs` deals with."""
ROWS_SHARE = 0.8
"""Up to this many pairs per expert, reading rows pair by pair is faster than sorting."""
TABLE_FIELDS = 8


def sorts(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether a call of the MoE op of these sizes sorts its pairs by expert."""
    return num_tokens > 1 and num_tokens * top_k > ROWS_SHARE * num_experts


def max_tiles(num_pairs: int, num_experts: int, tile_tokens: int) -> int:
    """Most tiles that any routing of num_pairs over num_experts can need: full ones, and one that is not full per expert in use."""
    return num_pairs // tile_tokens + min(num_experts, num_pairs)


def moe_workspace_bytes(max_tokens: int, top_k: int, num_experts: int, f: int, d: int, itemsize: int) -> int:
    """Bytes that a `fused_moe.MoeWorkspace` of these sizes holds.

    Args:
        max_tokens: most tokens of a call.
        top_k: experts per token.
        num_experts: experts of a layer.
        f: expert intermediate size.
        d: hidden size.
        itemsize: bytes of an activation or weight.
    """
    pairs = max_tokens * top_k
    hidden = pairs * f * itemsize + (num_experts + 1) * 4
    if not sorts(max_tokens, top_k, num_experts):
        return hidden
    tables = -(-max_tokens // COUNT_TOKENS) * num_experts + max_tiles(pairs, num_experts, SMALLEST_TILE) * TABLE_FIELDS
    return hidden + pairs * (d * itemsize + 4) + tables * 4


KV_SCALE_BYTES = 2
"""Bytes of the scale of one head of one token in a page of 8-bit codes (float16)."""


def kv_token_bytes(kv_heads: int, head_dim: int, itemsize: int, *, quantized: bool) -> int:
    """Bytes that keys and values of one token take in one layer, `itemsize` bytes an element or as 8-bit codes with their scales."""
    return 2 * kv_heads * (head_dim + KV_SCALE_BYTES if quantized else head_dim * itemsize)


PACKED_NUMBERS = 1 << 22
"""Weights of a packed dense matrix that become numbers at once."""


def packed_linear_bytes(columns: int, itemsize: int) -> int:
    """Scratch bytes of `packed_linear` for many rows of x: codes, float32 numbers with their scales, and numbers of `itemsize` bytes.

    Args:
        columns: of the widest matrix.
    """
    return (PACKED_NUMBERS + 128 * columns) * (2 + 3 * 4 + itemsize)
