"""Quantised matrices in pages: the one arrangement that kernels read, and plain torch to write and read it. See `format.py`.

What needs torch loads on first use, so that sizes can be worked out without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rimuru_kernels.packed_weights.format import PackedFormat, PageParts, page_bytes, page_parts, tile_rows

if TYPE_CHECKING:
    from rimuru_kernels.packed_weights.reference import Codes, dequantize, pack, unpack

__all__ = ["Codes", "PackedFormat", "PageParts", "dequantize", "pack", "page_bytes", "page_parts", "tile_rows", "unpack"]


def __getattr__(name: str) -> Any:
    if name not in ("Codes", "dequantize", "pack", "unpack"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.reference"), name)
