"""Triton kernels of the gated delta rule for sequences of several rows, in chunks of 64 (letters as in reference.py).

    prepare   every chunk by itself: X = (I + tril((β k̂) k̂ᵀ ⊙ D, -1))⁻¹,  w = X (β e^b k̂),  y = X (β v)
    scan      chunk after chunk: notes S for the third kernel;  u = y - w S;  S <- e^{b_last} S + (e^{b_last - b} k̂)ᵀ u
    output    every chunk by itself: o = e^b (q̂ S) + (q̂ k̂ᵀ ⊙ D) u

Products of half-precision inputs take q, k and v as they are and are summed in float32; norms, gates and β scale rows or columns of
the sums. What passes from kernel to kernel (w, y, u, S) is rounded to the inputs' dtype; the state itself stays in float32.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rimuru_kernels.gated_delta_rule.kernel import EPS
from rimuru_kernels.state_pages import Places
from rimuru_kernels.varlen_kernel import find_tile, num_tiles

CHUNK = 64
MAX_KEY_DIM = 128
"""Longest key whose tiles fit the shared memory of every GPU."""
LEAST_BLOCK = 32
"""Products of float32 that are 16 wide reach outside their shared memory where 8 warps compute them (Triton 3.6, H200)."""
SCAN_COLUMNS = 32
"""Columns of a state that a program of the scan holds: 128 programs for 32 heads of 128, about one a multiprocessor."""
OUTPUT_COLUMNS = 64
"""... of the output; for inputs of 2 bytes twice as many."""
ROOMY = 160 << 10
"""Shared memory in bytes with which one more chunk of the scan is on its way (the A100, H100 and their like)."""
_C: tl.constexpr = tl.constexpr(CHUNK)
_CHANGING = ["tokens", "num_seqs"]
"""They change from call to call: no kernel is compiled anew for special ones."""


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """Rounds; float16 takes its largest number for what is larger."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit
def _join(inverse, system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks twice as large: of [[a, 0], [c, b]] it is [[a⁻¹, 0], [-b⁻¹ c a⁻¹, b⁻¹]]."""
    r = tl.arange(0, _C)
    between = (r[:, None] // SIZE != r[None, :] // SIZE) & (r[:, None] // (2 * SIZE) == r[None, :] // (2 * SIZE))
    product = tl.dot(inverse, tl.where(between, system, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(product, inverse, input_precision=PRECISION)


@triton.jit
def _inverse(system, PRECISION: tl.constexpr):
    """(I + system)⁻¹ of a strictly lower triangular [64, 64]: blocks of 16 row by row, then blocks of 32 and 64 from two halves each.

    A product of powers would be shorter, but similar keys make the powers grow past float32; entries of the inverse stay below 1.
    """
    block, i = tl.arange(0, 4), tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    lower = -tl.sum(tl.where(same, tl.reshape(system, [4, 16, 4, 16]), 0.0), 2)
    inverse = lower
    for n in range(1, 16):
        line = tl.sum(tl.where(i[None, :, None] == n, lower, 0.0), 1)
        line += tl.sum(line[:, :, None] * inverse, 1)
        inverse = tl.where(i[None, :, None] == n, line[:, None, :], inverse)
    inverse += tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0)
    full = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [_C, _C])
    return _join(_join(full, system, 16, PRECISION), system, 32, PRECISION)


@triton.jit(do_not_specialize=_CHANGING)
def _prepare(
    k, v, log_decay, beta, places, cu_seqlens, w, u, totals, k_scales, num_seqs, tokens, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """w [T, HEADS, DK], y into u [T, HEADS, DV], b into totals [HEADS, T], 1/|k| into k_scales [HEADS, T]. Grid (HEADS, tiles)."""
    head = tl.program_id(0)
    seq, start, length, first = find_tile(cu_seqlens, num_seqs, tl.program_id(1), _C)
    if (first >= length) | (length == 1):
        return
    if tl.load(places + seq) < 0:
        return
    i, d, e = tl.arange(0, _C), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row, valid = (start + first + i).to(tl.int64), first + i < length
    gates = row * HEADS + head
    total = tl.cumsum(tl.load(log_decay + gates, mask=valid, other=0.0), 0)
    strength = tl.load(beta + gates, mask=valid, other=0.0)
    key = tl.load(
        k + row[:, None] * k_row + head // RATIO * k_head + d[None, :], mask=valid[:, None] & (d[None, :] < DK), other=0.0
    )  # fmt: skip
    value = tl.load(v + row[:, None] * v_row + head * v_head + e[None, :], mask=valid[:, None] & (e[None, :] < DV), other=0.0)
    wide = key.to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
    tl.store(totals + head.to(tl.int64) * tokens + row, total, mask=valid)
    tl.store(k_scales + head.to(tl.int64) * tokens + row, k_scale, mask=valid)
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * (strength * k_scale)[:, None] * k_scale[None, :]
    below = i[:, None] > i[None, :]
    # Above the diagonal the differences are positive and might overflow.
    system *= tl.exp(tl.where(below, total[:, None] - total[None, :], float("-inf")))
    inverse = _inverse(system, PRECISION)
    wanted = tl.dot(_narrow(inverse * strength[None, :], key.dtype), value, input_precision=PRECISION)
    tl.store(u + gates[:, None] * DV + e[None, :], _narrow(wanted, u.dtype.element_ty), mask=valid[:, None] & (e[None, :] < DV))
    known = tl.dot(_narrow(inverse * (strength * tl.exp(total) * k_scale)[None, :], key.dtype), key, input_precision=PRECISION)
    tl.store(w + gates[:, None] * DK + d[None, :], _narrow(known, w.dtype.element_ty), mask=valid[:, None] & (d[None, :] < DK))


@triton.jit(do_not_specialize=["tokens"])
def _scan(
    k, w, u, totals, k_scales, states, places, cu_seqlens, noted, tokens, k_row, k_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u in place of y; the state before every chunk into noted [tiles, HEADS, DK, DV]. Grid (ceil(DV / BLOCK_V), HEADS, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - start
    place = tl.load(places + seq).to(tl.int64)
    if (length <= 1) | (place < 0):
        return
    dtype: tl.constexpr = w.dtype.element_ty
    i, d, e = tl.arange(0, _C), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d[:, None] < DK) & (e[None, :] < DV)
    within = d[:, None] * DV + e[None, :]
    page = states + place * UNIT + head * (DK * DV) + within
    note = noted + ((start // _C + seq).to(tl.int64) * HEADS + head) * (DK * DV) + within
    gate_row = head.to(tl.int64) * tokens
    state = tl.load(page, mask=inside, other=0.0)
    for first in range(0, length, _C):
        row, valid = (start + first + i).to(tl.int64), first + i < length
        rounded = _narrow(state, dtype)
        tl.store(note, rounded, mask=inside)
        note += HEADS * DK * DV
        known = tl.load(w + (row[:, None] * HEADS + head) * DK + d[None, :], mask=valid[:, None] & (d[None, :] < DK), other=0.0)
        wanted = u + (row[:, None] * HEADS + head) * DV + e[None, :]
        keep = valid[:, None] & (e[None, :] < DV)
        change = tl.load(wanted, mask=keep, other=0.0).to(tl.float32) - tl.dot(known, rounded, input_precision=PRECISION)
        tl.store(wanted, _narrow(change, dtype), mask=keep)
        last = tl.load(totals + gate_row + (start + tl.minimum(first + _C, length) - 1))
        left = tl.exp(last - tl.load(totals + gate_row + row, mask=valid, other=0.0))
        left *= tl.load(k_scales + gate_row + row, mask=valid, other=0.0)
        key = tl.load(
            k + row[:, None] * k_row + head // RATIO * k_head + d[None, :], mask=valid[:, None] & (d[None, :] < DK), other=0.0
        )  # fmt: skip
        state = tl.dot(tl.trans(key), _narrow(change * left[:, None], dtype), state * tl.exp(last), input_precision=PRECISION)
    tl.store(page, state, mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
def _output(
    q, k, u, totals, k_scales, places, cu_seqlens, noted, scale, num_seqs, tokens, q_row, q_head, k_row, k_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs in place of u, each program its own columns of its own chunk. Grid (ceil(DV / BLOCK_V), HEADS, tiles)."""
    head, tile = tl.program_id(1), tl.program_id(2)
    seq, start, length, first = find_tile(cu_seqlens, num_seqs, tile, _C)
    if (first >= length) | (length == 1):
        return
    i, d, e = tl.arange(0, _C), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    row, valid = (start + first + i).to(tl.int64), first + i < length
    target, keep = u + (row[:, None] * HEADS + head) * DV + e[None, :], valid[:, None] & (e[None, :] < DV)
    dtype: tl.constexpr = u.dtype.element_ty
    if tl.load(places + seq) < 0:
        tl.store(target, tl.zeros([_C, BLOCK_V], dtype), mask=keep)
        return
    gate_row = head.to(tl.int64) * tokens
    mask = valid[:, None] & (d[None, :] < DK)
    query = tl.load(q + row[:, None] * q_row + head // RATIO * q_head + d[None, :], mask=mask, other=0.0)
    key = tl.load(k + row[:, None] * k_row + head // RATIO * k_head + d[None, :], mask=mask, other=0.0)
    page = noted + (tile.to(tl.int64) * HEADS + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    state = tl.load(page, mask=(d[:, None] < DK) & (e[None, :] < DV), other=0.0)
    change = tl.load(target, mask=keep, other=0.0)
    total = tl.load(totals + gate_row + row, mask=valid, other=0.0)
    k_scale = tl.load(k_scales + gate_row + row, mask=valid, other=0.0)
    wide = query.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(wide * wide, 1) + EPS) * scale
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * q_scale[:, None] * k_scale[None, :]
    visible = (i[:, None] >= i[None, :]) & valid[:, None]
    scores *= tl.exp(tl.where(visible, total[:, None] - total[None, :], float("-inf")))
    out = tl.dot(query, state, input_precision=PRECISION) * (q_scale * tl.exp(total))[:, None]
    out = tl.dot(scores.to(dtype), change, out, input_precision=PRECISION)
    tl.debug_barrier()  # all of u has been read
    tl.store(target, _narrow(out, dtype), mask=keep)


def precision(half: bool) -> str:
    """Of products of float32: of the triangular system beside inputs of 2 bytes; of all products beside inputs of 4, near float32's own."""
    return "tf32" if half else "tf32x3"


def warps(half: bool) -> int:
    """Warps of a program, for inputs of 2 bytes or of 4."""
    return 4 if half else 8


def stages(half: bool, shared_bytes: int = 0) -> int:
    """Chunks whose w, u and k the scan has in shared memory at once, where a block may have so much of it."""
    return (3 if shared_bytes >= ROOMY else 2) if half else 1


def output_columns(half: bool) -> int:
    """Columns of a state that a program of the output reads."""
    return 2 * OUTPUT_COLUMNS if half else OUTPUT_COLUMNS


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a block may have on a device."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, places: Places, cu_seqlens: Tensor, out: Tensor
) -> None:  # fmt: skip
    """The sequences that have several rows; arguments as for `kernel.step`, which computes those that have one.

    Takes, for the time of the call, about Hv (dk dv / 64 + dk) elements of out's dtype and Hv 8 bytes a row: 25 kB a row for 32 heads
    of 128 in half precision.
    """
    tokens, key_heads, dk = q.shape
    heads, dv = v.shape[1:]
    seqs = places.offsets.shape[0]
    tiles, device = num_tiles(tokens, seqs, CHUNK), q.device
    w = torch.empty((tokens, heads, dk), dtype=out.dtype, device=device)
    totals, k_scales = torch.empty((2, heads, tokens), dtype=torch.float32, device=device)
    noted = torch.empty((tiles, heads, dk, dv), dtype=out.dtype, device=device)
    block_k, block_v = (max(LEAST_BLOCK, triton.next_power_of_2(size)) for size in (dk, dv))
    half = out.dtype.itemsize < 4
    scan_v, output_v = min(SCAN_COLUMNS, block_v), min(output_columns(half), block_v)
    sizes = {
        "HEADS": heads, "RATIO": heads // key_heads, "DK": dk, "DV": dv, "BLOCK_K": block_k,
        "PRECISION": precision(half), "num_warps": warps(half),
    }  # fmt: skip
    _prepare[(heads, tiles)](
        k, v, log_decay, beta, places.offsets, cu_seqlens, w, out, totals, k_scales, seqs, tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), BLOCK_V=block_v, **sizes,
    )  # fmt: skip
    _scan[(triton.cdiv(dv, scan_v), heads, seqs)](
        k, w, out, totals, k_scales, places.base, places.offsets, cu_seqlens, noted, tokens, k.stride(0), k.stride(1),
        UNIT=places.unit, BLOCK_V=scan_v, num_stages=stages(half, _shared_bytes(device)), **sizes,
    )  # fmt: skip
    _output[(triton.cdiv(dv, output_v), heads, tiles)](
        q, k, out, totals, k_scales, places.offsets, cu_seqlens, noted, dk**-0.5, seqs, tokens,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), BLOCK_V=output_v, **sizes,
    )  # fmt: skip
