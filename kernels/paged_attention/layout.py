"""Where keys and values of a token lie in the pool."""

from __future__ import annotations

from dataclasses import dataclass

from rimuru_kernels.sizes import kv_token_bytes

ENTRY_BYTES = 256
"""Bytes per unit of a page entry."""


@dataclass(frozen=True)
class KVLayout:
    """A KV page of one layer: K [block_tokens, kv_heads, head_dim], then V of the same shape, in the cache's dtype or as 8-bit codes.

    Behind 8-bit codes lie their scales, K [block_tokens, kv_heads], then V, float16 each (see `quantized.py`).

    Attributes:
        block_tokens: tokens a page, a power of two from 1 to 64.
        kv_heads: key/value heads.
        head_dim: elements a head.
        quantized: whether elements are 8-bit codes.

    Raises:
        ValueError: sizes out of range.
    """

    block_tokens: int
    kv_heads: int
    head_dim: int
    quantized: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= 64 or self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens must be a power of two from 1 to 64, not {self.block_tokens}")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise ValueError(f"a page needs at least one key head and one element a head, not {self.kv_heads} and {self.head_dim}")

    @property
    def log2_block_tokens(self) -> int:
        """log2(block_tokens)."""
        return self.block_tokens.bit_length() - 1

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page whose elements take `itemsize` bytes where they are not codes."""
        return self.block_tokens * kv_token_bytes(self.kv_heads, self.head_dim, itemsize, quantized=self.quantized)

    @property
    def half_elements(self) -> int:
        """Elements of the keys (or of the values) of one page."""
        return self.block_tokens * self.kv_heads * self.head_dim
