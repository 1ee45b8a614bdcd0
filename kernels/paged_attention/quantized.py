"""Keys and values at 8 bits: an int8 code for each element, and one float16 scale for each head of each token.

A page holds K codes [B, G, D], V codes [B, G, D], K scales [B, G], V scales [B, G]: x = code * scale. Every head of every token is rounded
by itself, so what is stored does not depend on what is stored beside it, nor on how a prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.paged_attention.layout import ENTRY_BYTES, KVLayout
from rimuru_kernels.sizes import KV_SCALE_BYTES

LARGEST_CODE = 127
_LARGEST_SCALE, _SMALLEST_SCALE = 65504.0, 2.0**-24


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., D], a floating dtype: int8 [..., D] and float16 [...], x ~ codes * scales.

    The scale is the largest magnitude over 127, rounded to float16; codes are rounded with that rounded scale.
    """
    wide = x.float()
    scales = (wide.abs().amax(-1) / LARGEST_CODE).clamp(_SMALLEST_SCALE, _LARGEST_SCALE).half()
    codes = (wide / scales.float().unsqueeze(-1) + 0.5).floor_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), scales


def dequantize_heads(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes int8 [..., D] times scales float16 [...], computed in float32, as `dtype`."""
    return codes.to(torch.float32).mul_(scales.float().unsqueeze(-1)).to(dtype)


def page_parts(data: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of pages [P, at least page_bytes] uint8: K codes and V codes [P, B, G, D] int8, K scales and V scales [P, B, G] float16.

    Pages must start at even bytes and rows of `data` be an even number of bytes apart.
    """
    half, scales = layout.half_elements, layout.block_tokens * layout.kv_heads * KV_SCALE_BYTES
    heads = (-1, layout.block_tokens, layout.kv_heads)
    codes = [data[:, start : start + half].view(torch.int8).view(*heads, layout.head_dim) for start in (0, half)]
    starts = (2 * half, 2 * half + scales)
    parts = [data[:, start : start + scales].view(torch.float16).view(*heads) for start in starts]
    return codes[0], codes[1], parts[0], parts[1]


def read_pages(pool: Tensor, entries: Sequence[int], layout: KVLayout, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [B, G, D] of the pages at the given entries of a pool uint8 [bytes], as copies in `dtype`."""
    size = layout.page_bytes(dtype.itemsize)
    if not entries:
        return [], []
    data = torch.stack([pool[entry * ENTRY_BYTES : entry * ENTRY_BYTES + size] for entry in entries])
    k_codes, v_codes, k_scales, v_scales = page_parts(data, layout)
    return list(dequantize_heads(k_codes, k_scales, dtype)), list(dequantize_heads(v_codes, v_scales, dtype))


def write_tokens(k: Tensor, v: Tensor, page: Tensor, offset: int, layout: KVLayout) -> None:
    """Store keys and values [R, G, D] of consecutive tokens in a page uint8 [page_bytes] from its token `offset` on."""
    k_codes, v_codes, k_scales, v_scales = page_parts(page.unsqueeze(0), layout)
    for x, codes, scales in ((k, k_codes, k_scales), (v, v_codes, v_scales)):
        codes[0, offset : offset + x.shape[0]], scales[0, offset : offset + x.shape[0]] = quantize_heads(x)
