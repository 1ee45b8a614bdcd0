"""Quantised matrices in pages: the one arrangement that kernels read, and plain torch to write and read it. See `format.py`."""

from __future__ import annotations

from rimuru_kernels.packed_weights.format import PackedFormat, PageParts, page_bytes, page_parts
from rimuru_kernels.packed_weights.reference import Codes, dequantize, pack, unpack

__all__ = ["Codes", "PackedFormat", "PageParts", "dequantize", "pack", "page_bytes", "page_parts", "unpack"]
