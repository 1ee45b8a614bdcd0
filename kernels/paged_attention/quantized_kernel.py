"""Triton: rounding keys and values to 8 bits on their way into the pages; `quantized.py` has the format."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_rows(x):
    """Codes int8 [R, D] and scales float16 [R] of x [R, D] float32; columns beyond a head's size must be zero."""
    top = tl.max(tl.abs(x), 1)
    # The smallest and the largest float16.
    scale = tl.minimum(tl.maximum(top / 127.0, 5.960464477539063e-08), 65504.0).to(tl.float16)
    codes = tl.floor(x / scale.to(tl.float32)[:, None] + 0.5)
    return tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8), scale


@triton.jit
def store_quantized(
    k, v, pool, block_table, positions, token_seqs, k_token_stride, v_token_stride, table_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LOG2_B: tl.constexpr, ENTRY_BYTES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Round one token's keys and values [KV_HEADS, HEAD_DIM] each into its page."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    if position < 0:
        return
    seq = token
    if token_seqs is not None:
        seq = tl.load(token_seqs + token).to(tl.int64)
    entry = tl.load(block_table + seq * table_stride + (position >> LOG2_B)).to(tl.int64)
    place = position & ((1 << LOG2_B) - 1)
    head, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside = (head[:, None] < KV_HEADS) & (d[None, :] < HEAD_DIM)
    source = head[:, None] * HEAD_DIM + d[None, :]
    half: tl.constexpr = KV_HEADS * HEAD_DIM << LOG2_B
    k_codes, k_scale = quantize_rows(tl.load(k + token * k_token_stride + source, mask=inside, other=0.0).to(tl.float32))
    v_codes, v_scale = quantize_rows(tl.load(v + token * v_token_stride + source, mask=inside, other=0.0).to(tl.float32))
    codes = pool.to(tl.pointer_type(tl.int8)) + entry * ENTRY_BYTES + place * (KV_HEADS * HEAD_DIM)
    tl.store(codes + source, k_codes, mask=inside)
    tl.store(codes + half + source, v_codes, mask=inside)
    scales = pool.to(tl.pointer_type(tl.float16)) + entry * (ENTRY_BYTES // 2) + half + place * KV_HEADS
    tl.store(scales + head, k_scale, mask=head < KV_HEADS)
    tl.store(scales + (KV_HEADS << LOG2_B) + head, v_scale, mask=head < KV_HEADS)
