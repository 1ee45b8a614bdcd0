"""Triton: from the fused projection to attention's inputs in one launch.

q and k are normalised per head (optional), clamped (optional) and rotated; k and v go straight into the KV pages.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.paged_attention.layout import ENTRY_BYTES, KVLayout
from rimuru_kernels.paged_attention.quantized_kernel import quantize_rows


@triton.jit
def _rotary_store(
    qkv, weight_q, weight_k, cos, sin, q_out, pool, block_table, positions, token_seqs, eps, clip, qkv_stride, cos_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TURNED: tl.constexpr, LOG2_B: tl.constexpr,
    ENTRY_ELEMENTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token; heads are numbered q, then k, then v. The first TURNED dimensions of q and k turn."""
    HALF: tl.constexpr = TURNED // 2
    dtype: tl.constexpr = q_out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_q, is_k, is_v = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS), head >= HEADS + KV_HEADS
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < TURNED, d - HALF, d))
    mask = (head[:, None] < HEADS + 2 * KV_HEADS) & (d[None, :] < HEAD_DIM)
    source = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    plain = tl.load(source + d[None, :], mask=mask, other=0.0)
    x = plain.to(tl.float32)
    y = tl.load(source + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight_q is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        # A weight in float32 multiplies before the norm is rounded, see `rms_norm`.
        x = (x * inverse).to(weight_q.dtype.element_ty).to(tl.float32)
        y = (y * inverse).to(weight_q.dtype.element_ty).to(tl.float32)
        in_head = d < HEAD_DIM
        wq, wk = tl.load(weight_q + d, mask=in_head, other=0.0), tl.load(weight_k + d, mask=in_head, other=0.0)
        x = (x * tl.where(is_q[:, None], wq[None, :], wk[None, :]).to(tl.float32)).to(dtype).to(tl.float32)
        wq, wk = tl.load(weight_q + partner, mask=in_head, other=0.0), tl.load(weight_k + partner, mask=in_head, other=0.0)
        y = (y * tl.where(is_q[:, None], wq[None, :], wk[None, :]).to(tl.float32)).to(dtype).to(tl.float32)
    if clip is not None:
        x, y = tl.minimum(tl.maximum(x, -clip), clip), tl.minimum(tl.maximum(y, -clip), clip)
        bounded = plain.to(tl.float32)
        plain = tl.minimum(tl.maximum(bounded, -clip), clip).to(dtype)
    c = tl.load(cos + token * cos_stride + d, mask=d < TURNED, other=1.0).to(tl.float32)
    s = tl.load(sin + token * cos_stride + d, mask=d < TURNED, other=0.0).to(tl.float32)
    rotated = (x * c[None, :] + y * s[None, :]).to(dtype)
    tl.store(q_out + (token * HEADS + head[:, None]) * HEAD_DIM + d[None, :], rotated, mask=mask & is_q[:, None])

    position = tl.load(positions + token).to(tl.int32)
    seq = token
    if token_seqs is not None:
        seq = tl.load(token_seqs + token).to(tl.int64)
    entry = tl.load(block_table + seq * table_stride + (position >> LOG2_B), mask=position >= 0, other=0)
    row = entry.to(tl.int64) * ENTRY_ELEMENTS + (position & ((1 << LOG2_B) - 1)) * (KV_HEADS * HEAD_DIM)
    HALF_PAGE: tl.constexpr = KV_HEADS * HEAD_DIM << LOG2_B
    k_offset = (head - HEADS)[:, None] * HEAD_DIM + d[None, :]
    # A padded token (position below 0) is not stored; a limit on the heads says so, as the interpreter gets `mask & scalar` wrong.
    stored = mask & (head < tl.where(position >= 0, HEADS + 2 * KV_HEADS, 0))[:, None]
    if QUANTIZED:
        codes, scale = quantize_rows(tl.where(mask, tl.where(is_k[:, None], rotated, plain).to(tl.float32), 0.0))
        target = pool.to(tl.pointer_type(tl.int8)) + row + k_offset
        tl.store(target, codes, mask=stored & is_k[:, None])
        tl.store(target + HALF_PAGE - KV_HEADS * HEAD_DIM, codes, mask=stored & is_v[:, None])
        # Behind both halves of codes: scales of the keys' heads, then of the values'.
        place = (position & ((1 << LOG2_B) - 1)) * KV_HEADS + head - HEADS
        marks = pool.to(tl.pointer_type(tl.float16)) + entry.to(tl.int64) * (ENTRY_ELEMENTS // 2) + HALF_PAGE + place
        last = tl.where(position >= 0, HEADS + 2 * KV_HEADS, 0)
        tl.store(marks, scale, mask=is_k & (head < last))
        tl.store(marks + (KV_HEADS << LOG2_B) - KV_HEADS, scale, mask=is_v & (head < last))
    else:
        keys = pool.to(tl.pointer_type(dtype)) + row
        tl.store(keys + k_offset, rotated, mask=stored & is_k[:, None])
        tl.store(keys + HALF_PAGE + k_offset - KV_HEADS * HEAD_DIM, plain, mask=stored & is_v[:, None])


def rotary_store(
    qkv: Tensor, weight_q: Tensor | None, weight_k: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor, pool: Tensor,
    block_table: Tensor, positions: Tensor, token_seqs: Tensor | None, layout: KVLayout, eps: float, clip: float | None,
) -> None:  # fmt: skip
    """See `rimuru_kernels.rotary.rotary_store`; arguments are taken as checked. q_out [T, H, D] contiguous."""
    tokens, heads, head_dim = q_out.shape
    block_d = triton.next_power_of_2(head_dim)
    # Few tokens: one head a program, so that all multiprocessors take part; many: more work a program.
    block_h = 1 if tokens <= 16 else max(1, 1024 // block_d)
    programs = triton.cdiv(heads + 2 * layout.kv_heads, block_h)
    _rotary_store[(tokens, programs)](
        qkv, weight_q, weight_k, cos, sin, q_out, pool, block_table, positions, token_seqs, eps, clip,
        qkv.stride(0), cos.stride(0), block_table.stride(0),
        HEADS=heads, KV_HEADS=layout.kv_heads, HEAD_DIM=head_dim, TURNED=cos.shape[2], LOG2_B=layout.log2_block_tokens,
        ENTRY_ELEMENTS=ENTRY_BYTES if layout.quantized else ENTRY_BYTES // q_out.element_size(), BLOCK_H=block_h, BLOCK_D=block_d,
        QUANTIZED=layout.quantized, num_warps=1 if block_h == 1 else 4,
    )  # fmt: skip
