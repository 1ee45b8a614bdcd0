"""Triton top-k gating: one program a token, the experts of a row spread over a warp."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def choose_experts(logits, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr):
    """The experts of some tokens: whether each is chosen, its weight, and its place among the chosen, all [rows, BLOCK_E].

    logits float32 [rows, BLOCK_E], anything beyond EXPERTS. Probability and index are packed into one integer that is larger for the more
    probable and, among equals, for the lower index; so exactly TOP_K experts are chosen whatever a row holds, NaN included.
    """
    NEVER: tl.constexpr = -(2**63)
    e = tl.arange(0, BLOCK_E)[None, :]
    valid = e < EXPERTS
    logits = tl.where(valid, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    key = (weights.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (BLOCK_E - 1 - e).to(tl.int64)
    key = tl.where(valid, key, NEVER)
    for _ in range(TOP_K):
        key = tl.where(key == tl.max(key, 1)[:, None], NEVER, key)
    chosen = valid & (key == NEVER)
    if RENORMALIZE:
        weights = weights / tl.sum(tl.where(chosen, weights, 0.0), 1)[:, None]
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    return chosen, weights, place


@triton.jit
def write_experts(
    logits, weights, ids, t, T, tokens,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Choose for the tokens t [rows] and store those below T; those from `tokens` on are padding and get ids of -1, weights of 0."""
    chosen, weight, place = choose_experts(logits, EXPERTS, TOP_K, RENORMALIZE, BLOCK_E)
    slots = t[:, None] * TOP_K + place
    mask = chosen & (t < T)[:, None]
    present = (t < tokens)[:, None]
    tl.store(weights + slots, tl.where(present, weight, 0.0), mask=mask)
    tl.store(ids + slots, tl.where(present, tl.arange(0, BLOCK_E)[None, :], -1).to(ids.dtype.element_ty), mask=mask)


@triton.jit
def _topk_gating(
    logits, weights, ids, num_tokens, T, row_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    rows = tl.load(logits + t[:, None] * row_stride + e[None, :], mask=e[None, :] < EXPERTS, other=float("-inf")).to(tl.float32)
    tokens = T
    if num_tokens is not None:
        tokens = tl.load(num_tokens)
    write_experts(rows, weights, ids, t, T, tokens, EXPERTS, TOP_K, RENORMALIZE, BLOCK_E)


def topk_gating(logits: Tensor, top_k: int, renormalize: bool, weights: Tensor, ids: Tensor, num_tokens: Tensor | None = None) -> None:
    """See `rimuru_kernels.topk_gating.topk_gating`; arguments are taken as checked. Writes weights float32 [T, k] and ids int [T, k]."""
    tokens, experts = logits.shape
    block = triton.next_power_of_2(experts)
    _topk_gating[(tokens,)](
        logits, weights, ids, num_tokens, tokens, logits.stride(0), EXPERTS=experts, TOP_K=top_k, RENORMALIZE=renormalize,
        BLOCK_E=block, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
