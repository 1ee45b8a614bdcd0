"""Norm, gating and rotary kernels against float64 formulas, outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.paged_attention import KVLayout
from rimuru_kernels.paged_attention.reference import read_pages
from rimuru_kernels.rms_norm import add_rms_norm
from rimuru_kernels.rms_norm import kernel as rms_norm_kernel
from rimuru_kernels.rotary import kernel as rotary_kernel
from rimuru_kernels.rotary import rotary_store, rotary_tables
from rimuru_kernels.topk_gating import kernel as gating_kernel
from rimuru_kernels.topk_gating import topk_gating


def norm_by_hand(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 48), (2, 2048), (1, 5120)])
def test_rms_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    wide = torch.randn(rows, n + 16).to(DEVICE, dtype)
    x, residual = wide[:, :n], torch.randn(rows, n).to(DEVICE, dtype)
    weight = (torch.rand(n) + 0.5).to(DEVICE, dtype)
    out = poisoned(rows, n, dtype=dtype)
    rms_norm_kernel.rms_norm(x, weight, 1e-6, out)
    assert relative_error(out, norm_by_hand(x, weight, 1e-6)) < TOLERANCE[dtype]
    out, total = poisoned(rows, n, dtype=dtype), residual.clone()
    rms_norm_kernel.rms_norm(x, weight, 1e-6, out, total, total)
    assert relative_error(total, x.double() + residual.double()) < TOLERANCE[dtype]
    assert relative_error(out, norm_by_hand(total, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize < 4], ids=str)
def test_rms_norm_with_a_float32_weight_rounds_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 96).to(DEVICE, dtype), (torch.rand(96) + 0.5).to(DEVICE)
    out = poisoned(5, 96, dtype=dtype)
    rms_norm_kernel.rms_norm(x, weight, 1e-6, out)
    expected = norm_by_hand(x, weight, 1e-6).to(dtype)
    assert (out != expected).float().mean() < 0.01
    rounded_twice = poisoned(5, 96, dtype=dtype)
    rms_norm_kernel.rms_norm(x, weight.to(dtype), 1e-6, rounded_twice)
    assert (rounded_twice != expected).float().mean() > 0.1


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.rand(8)
    want = x + residual
    total, normed = add_rms_norm(x, residual, weight, 1e-5)
    assert total is residual and torch.equal(total, want)
    assert relative_error(normed, norm_by_hand(want, weight, 1e-5)) < 1e-6
    with pytest.raises(ValueError, match="add_rms_norm"):
        add_rms_norm(x, residual[:1], weight, 1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (3, 8, 8), (5, 60, 4), (4, 128, 8), (1, 512, 10)])
def test_gating(tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits = (torch.randn(tokens, experts + 3) * 2).to(DEVICE)[:, :experts]
    weights = poisoned(tokens, top_k, dtype=torch.float32)
    ids = torch.full((tokens, top_k), -7, device=DEVICE)
    gating_kernel.topk_gating(logits, top_k, renormalize, weights, ids)
    want_weights, want_ids = topk_gating(logits.cpu().double().float(), top_k, renormalize)
    assert torch.equal(ids.cpu(), want_ids)
    exact = torch.softmax(logits.cpu().double(), -1).gather(1, want_ids)
    if renormalize:
        exact /= exact.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.cpu().double(), exact, rtol=1e-5, atol=1e-7)
    assert want_weights.shape == weights.shape


def test_gating_breaks_ties_by_index_and_marks_padding() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0.0] * 6, [0.0] * 6, [float("nan")] * 6], device=DEVICE)
    for dtype in (torch.int64, torch.int32):
        weights = poisoned(4, 4, dtype=torch.float32)
        ids = torch.full((4, 4), 99, dtype=dtype, device=DEVICE)
        gating_kernel.topk_gating(logits, 4, True, weights, ids, torch.tensor([2], dtype=torch.int32, device=DEVICE))
        assert ids.tolist() == [[0, 1, 3, 5], [0, 1, 2, 3], [-1] * 4, [-1] * 4]
        assert weights[2:].tolist() == [[0.0] * 4] * 2
    gating_kernel.topk_gating(logits, 4, True, weights, ids)
    assert ids[3].tolist() == [0, 1, 2, 3]  # a row of NaN still names four different experts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("norm", "clip"), [(None, None), ("own", None), ("wide", None), (None, 0.7)], ids=["plain", "norm", "float32 norm", "clip"]
)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "turned"),
    [(2, 4, 2, 8, 8), (17, 3, 1, 24, 24), (3, 32, 4, 128, 128), (3, 4, 2, 32, 8), (17, 2, 1, 24, 6), (2, 4, 2, 16, 0), (2, 16, 2, 256, 64)],
)
def test_rotary_store(
    tokens: int, heads: int, kv_heads: int, head_dim: int, turned: int, norm: str | None, clip: float | None, dtype: torch.dtype
) -> None:
    layout = KVLayout(4, kv_heads, head_dim)
    # rows of a wider matrix, as where a gate is part of the projection
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 16).to(dtype)[:, :-16]
    kind = torch.float32 if norm == "wide" else dtype
    weights = [None if norm is None else (torch.rand(head_dim) + 0.5).to(kind) for _ in range(2)]
    positions = torch.randint(0, 40, (tokens,))
    positions[-1] = -1
    cos, sin = rotary_tables(positions.clamp(min=0), 10000.0 ** -(torch.arange(0, turned, 2) / max(1, turned)), torch.float32)
    units = -(-layout.page_bytes(dtype.itemsize) // 256)
    table = (torch.randperm(tokens * 10).view(tokens, 10) * units).to(torch.int32)
    pools = [torch.full((tokens * 10 * units * 256,), 0xFF, dtype=torch.uint8) for _ in range(2)]
    pool = pools[0].to(DEVICE)
    on_device = [None if t is None else t.to(DEVICE) for t in (*weights, cos, sin)]
    on_device.insert(0, torch.nn.functional.pad(qkv, (0, 16)).to(DEVICE)[:, :-16])
    out = poisoned(tokens, heads, head_dim, dtype=dtype)
    rotary_kernel.rotary_store(*on_device, out, pool, table.to(DEVICE), positions.to(DEVICE), None, layout, 1e-6, clip)

    exact_weights = [None if w is None else w.double() for w in weights]
    wide = KVLayout(4, kv_heads, head_dim)
    wide_units = -(-wide.page_bytes(8) // 256)
    wide_pool = torch.full((tokens * 10 * wide_units * 256,), 0xFF, dtype=torch.uint8)
    want = rotary_store(
        qkv.double(), cos.double(), sin.double(), wide_pool, table // units * wide_units, positions, wide,
        q_norm=exact_weights[0], k_norm=exact_weights[1], eps=1e-6, clip=clip,
    )  # fmt: skip
    assert relative_error(out, want) < TOLERANCE[dtype]
    page = layout.page_bytes(dtype.itemsize)
    stored = pool.cpu().view(-1, units * 256)[:, :page].view(dtype).double()
    exact = wide_pool.view(-1, wide_units * 256)[:, : wide.page_bytes(8)].view(torch.float64)
    assert torch.equal(stored.isnan(), exact.isnan())
    assert relative_error(stored.nan_to_num(), exact.nan_to_num()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim"), [(3, 4, 2, 8), (17, 3, 1, 24), (2, 16, 2, 128)])
def test_rotary_store_of_codes(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """What is stored is what rounding the plain keys and values gives; a code may be one off where the rotation was rounded otherwise."""
    plain, codes = KVLayout(4, kv_heads, head_dim), KVLayout(4, kv_heads, head_dim, quantized=True)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(DEVICE, dtype)
    positions = torch.arange(tokens, device=DEVICE)
    positions[1] = -1  # a padded row
    cos, sin = rotary_tables(positions.clamp(min=0), 10000.0 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim), torch.float32)
    stored = []
    for layout in (plain, codes):
        units = -(-layout.page_bytes(dtype.itemsize) // 256)
        pool = torch.zeros(tokens * units * 256, dtype=torch.uint8, device=DEVICE)
        table = (torch.randperm(tokens).view(1, tokens) * units).to(DEVICE, torch.int32)
        out = poisoned(tokens, heads, head_dim, dtype=dtype)
        owners = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
        rotary_kernel.rotary_store(qkv, None, None, cos, sin, out, pool, table, positions, owners, layout, 1e-6, None)
        blocks = table[0, : -(-tokens // 4)].tolist()
        stored.append([torch.cat(pages) for pages in read_pages(pool, blocks, layout, torch.float32 if layout.quantized else dtype)])
    for exact, rounded in zip(*stored, strict=True):
        step = exact.float().abs().amax(-1, keepdim=True) / 127
        assert ((rounded - exact.float()).abs() <= 0.6 * step + 1e-6).all()
        assert rounded.abs().amax() > 0 and not rounded[1].any()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_rotary_store_beyond_two_to_the_31_elements() -> None:
    layout, far = KVLayout(4, 2, 64), 5 << 30
    pool = torch.empty(far + 4 * layout.page_bytes(2), dtype=torch.uint8, device=DEVICE)
    near = torch.empty(4 * layout.page_bytes(2), dtype=torch.uint8, device=DEVICE)
    qkv, positions = torch.randn(3, 8 * 64, device=DEVICE).bfloat16(), torch.tensor([0, 5, 11], device=DEVICE)
    cos, sin = rotary_tables(positions, 10000.0 ** -(torch.arange(0, 64, 2, device=DEVICE) / 64), torch.float32)
    outs = []
    for memory, first in ((near, 0), (pool, far // 256)):
        memory[first * 256 :].fill_(0xFF)
        table = (first + torch.arange(4) * (layout.page_bytes(2) // 256)).to(DEVICE, torch.int32).repeat(3, 1)
        outs.append(rotary_store(qkv, cos, sin, memory, table, positions, layout))
    assert torch.equal(*outs)
    stored = pool[far:].view(torch.int16)
    assert torch.equal(stored, near.view(torch.int16)) and not (stored == -1).all()


def test_rotary_store_refuses_what_does_not_fit() -> None:
    layout = KVLayout(4, 2, 8)
    cos, sin = rotary_tables(torch.arange(2), torch.rand(4), torch.float32)
    pool, table = torch.zeros(4096, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows of 40"):
        rotary_store(torch.zeros(2, 40), cos, sin, pool, table, torch.arange(2), layout)
    with pytest.raises(ValueError, match="tables"):
        rotary_store(torch.zeros(2, 64), cos[:1], sin[:1], pool, table, torch.arange(2), layout)
    with pytest.raises(ValueError, match="norms of q and k"):
        rotary_store(torch.zeros(2, 64), cos, sin, pool, table, torch.arange(2), layout, q_norm=torch.ones(8))
    for turned in (3, 10):
        with pytest.raises(ValueError, match=f"{turned} dimensions cannot turn"):
            rotary_store(torch.zeros(2, 64), *torch.zeros(2, 2, 1, turned), pool, table, torch.arange(2), layout)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_the_ops_take_the_kernels_on_a_gpu() -> None:
    logits = torch.randn(7, 128, device=DEVICE)
    weights, ids = topk_gating(logits, 8, True)
    want_weights, want_ids = topk_gating(logits.cpu(), 8, True)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-5, atol=1e-7)
