"""The Triton kernels of paged attention against a float64 formula, in a pool full of NaN with shuffled pages and wild table tails."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.paged_attention import KVLayout, kernel, paged_attention_decode, paged_attention_prefill, quantized, store_kv_entries

WILD = 1 << 30  # an entry far outside any pool: reading it would fail


@dataclass
class Cache:
    layout: KVLayout
    pool: Tensor
    table: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_cache(lengths: list[int], layout: KVLayout, dtype: torch.dtype, spare_blocks: int = 2) -> Cache:
    blocks = [-(-n // layout.block_tokens) for n in lengths]
    page_units = -(-layout.page_bytes(dtype.itemsize) // 256)
    pool = torch.full((max(1, sum(blocks)) * page_units * 256 + 256,), 0xFF, dtype=torch.uint8, device=DEVICE)
    order = torch.randperm(sum(blocks)).tolist()
    table = torch.full((len(lengths), max(blocks, default=0) + spare_blocks), WILD, dtype=torch.int32)
    for seq, count in enumerate(blocks):
        for block in range(count):
            table[seq, block] = 1 + order.pop() * page_units  # entry 0 stays unused
    table = table.to(DEVICE)
    keys, values = ([torch.randn(n, layout.kv_heads, layout.head_dim).to(DEVICE, dtype) for n in lengths] for _ in range(2))
    cache = Cache(layout, pool, table, keys, values)
    total = sum(lengths)
    if total:
        positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE, torch.int32)
        seqs = torch.cat([torch.full((n,), s) for s, n in enumerate(lengths)]).to(DEVICE, torch.int32)
        kernel.store(torch.cat(keys), torch.cat(values), pool, table, positions, seqs, layout)
    if layout.quantized:
        for stored in (cache.keys, cache.values):
            stored[:] = [quantized.dequantize_heads(*quantized.quantize_heads(x), torch.float32) for x in stored]
    return cache


def expected(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """q [R, H, D], the last R positions, over keys and values [n, G, D], in float64."""
    tokens, share = len(keys), q.shape[1] // keys.shape[1]
    positions = torch.arange(tokens - len(q), tokens)[:, None]
    columns = torch.arange(tokens)[None]
    visible = columns <= positions
    if window is not None:
        visible &= columns > positions - window
    wide_k, wide_v = (t.double().cpu().repeat_interleave(share, dim=1) for t in (keys, values))
    scores = torch.einsum("rhd,nhd->hrn", q.double().cpu(), wide_k) * scale
    return torch.einsum("hrn,nhd->rhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), wide_v)


SHAPES = [(4, 2, 4, 16), (1, 1, 3, 8), (64, 1, 7, 24)]  # block_tokens, key heads, query heads, head size
GPU_SHAPES = [(16, 4, 32, 128), (4, 4, 32, 128), (32, 2, 16, 64), (16, 2, 16, 256)]
WINDOWS = [None, 1, 37] if ON_GPU else [None, 37]  # the interpreter takes seconds a case
# Keys and values as codes are read alike whatever the queries are: without a GPU each dtype meets them with one of the windows.
CASES = [
    pytest.param(window, dtype, codes, id=f"W{window}-{dtype}-{'q8' if codes else 'plain'}")
    for window, dtype, codes in itertools.product(WINDOWS, DTYPES, (False, True))
    if ON_GPU or not codes or (window is None) == (dtype is DTYPES[0])
]
SHAPE_PARAMS = [pytest.param(*shape, id=f"B{shape[0]}-{shape[2]}over{shape[1]}x{shape[3]}") for shape in SHAPES + GPU_SHAPES * ON_GPU]


@pytest.mark.parametrize(("window", "dtype", "codes"), CASES)
@pytest.mark.parametrize(("block_tokens", "kv_heads", "heads", "head_dim"), SHAPE_PARAMS)
def test_decode(block_tokens: int, kv_heads: int, heads: int, head_dim: int, window: int | None, dtype: torch.dtype, codes: bool) -> None:
    layout = KVLayout(block_tokens, kv_heads, head_dim, quantized=codes)
    lengths = sorted({1, max(1, block_tokens - 1), block_tokens, block_tokens + 1, 200}) + [0] + [5000] * ON_GPU
    cache = make_cache(lengths, layout, dtype)
    q = torch.randn(len(lengths), heads, head_dim).to(DEVICE, dtype)
    scale = head_dim**-0.5 * 1.5
    out = poisoned(*q.shape, dtype=dtype)
    kernel.decode(q, cache.pool, cache.table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), out, layout, scale, window)
    for seq, length in enumerate(lengths):
        if length == 0:
            assert not out[seq].any()
        else:
            want = expected(q[seq : seq + 1], cache.keys[seq], cache.values[seq], scale, window)
            assert relative_error(out[seq : seq + 1], want) < TOLERANCE[dtype], length


@pytest.mark.parametrize(("window", "dtype", "codes"), CASES)
@pytest.mark.parametrize(("block_tokens", "kv_heads", "heads", "head_dim"), SHAPE_PARAMS)
def test_prefill(block_tokens: int, kv_heads: int, heads: int, head_dim: int, window: int | None, dtype: torch.dtype, codes: bool) -> None:
    layout = KVLayout(block_tokens, kv_heads, head_dim, quantized=codes)
    pairs = [(1, 1), (70, 70), (90, 3), (0, 0), (block_tokens + 1, 1), (block_tokens, block_tokens)] + [(3000, 1500)] * ON_GPU
    lengths, new = [n for n, _ in pairs], [r for _, r in pairs]
    cache = make_cache(lengths, layout, dtype)
    bounds = torch.tensor([0, *new]).cumsum(0).to(DEVICE, torch.int32)
    q = torch.randn(sum(new) + 5, heads, head_dim).to(DEVICE, dtype)  # the last rows belong to no sequence
    scale = head_dim**-0.5 * 1.5
    out = poisoned(*q.shape, dtype=dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    kernel.prefill(q, cache.pool, cache.table, bounds, seq_lens, out, layout, scale, window)
    for seq, (start, stop) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        if stop > start:
            want = expected(q[start:stop], cache.keys[seq], cache.values[seq], scale, window)
            assert relative_error(out[start:stop], want) < TOLERANCE[dtype], pairs[seq]
    assert out[sum(new) :].isnan().all()


def test_a_result_does_not_depend_on_the_batch_or_the_width_of_the_table() -> None:
    layout = KVLayout(64, 1, 16)
    cache = make_cache([130, 77], layout, torch.float32, spare_blocks=300)
    q = torch.randn(2, 2, 16).to(DEVICE)
    lengths = torch.tensor([130, 77], dtype=torch.int32, device=DEVICE)
    together = torch.empty_like(q)
    kernel.decode(q, cache.pool, cache.table, lengths, together, layout, 0.25, None)
    alone = torch.empty_like(q[1:])
    kernel.decode(q[1:], cache.pool, cache.table[1:, :256], lengths[1:].clone(), alone, layout, 0.25, None)
    assert torch.equal(alone[0], together[1])


def test_strided_queries_and_padded_tokens_when_storing() -> None:
    layout = KVLayout(4, 2, 8)
    cache = make_cache([6, 3], layout, torch.float32)
    before = cache.pool.clone()
    qkv = torch.randn(3, 8, 8, device=DEVICE)  # 4 query heads, 2 key heads, 2 value heads
    positions = torch.tensor([5, 2, -1], device=DEVICE)
    kernel.store(qkv[:, 4:6], qkv[:, 6:], cache.pool, cache.table, positions, None, layout)
    for seq, last in ((0, 5), (1, 2)):
        cache.keys[seq][last], cache.values[seq][last] = qkv[seq, 4:6], qkv[seq, 6:]
    changed = int((cache.pool != before).sum())
    assert 0 < changed <= 2 * 2 * 2 * 8 * 4  # two tokens, keys and values, two heads of 8 floats
    out = poisoned(2, 4, 8, dtype=torch.float32)
    lengths = torch.tensor([6, 3], dtype=torch.int32, device=DEVICE)
    kernel.decode(qkv[:2, :4], cache.pool, cache.table, lengths, out, layout, 0.5, None)
    for seq in range(2):
        assert relative_error(out[seq][None], expected(qkv[seq : seq + 1, :4], cache.keys[seq], cache.values[seq], 0.5, None)) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_pages_beyond_four_gibibytes() -> None:
    layout = KVLayout(16, 4, 128)
    pool = torch.empty((9 << 30) + 256, dtype=torch.uint8, device=DEVICE)
    length, dtype = 100, torch.bfloat16
    blocks = -(-length // 16)
    far = (9 << 30) // 256 - (torch.arange(blocks) + 1) * (layout.page_bytes(2) // 256)
    table = far.to(DEVICE, torch.int32)[None]
    k, v = (torch.randn(length, 4, 128).to(DEVICE, dtype) for _ in range(2))
    positions = torch.arange(length, device=DEVICE)
    store_kv_entries(k, v, pool, table, positions, layout, token_seqs=torch.zeros(length, dtype=torch.int32, device=DEVICE))
    q = torch.randn(length, 32, 128).to(DEVICE, dtype)
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    want = expected(q, k, v, 0.1, None)
    assert relative_error(paged_attention_prefill(q, pool, table, bounds, lengths, layout, scale=0.1), want) < 1e-2
    assert relative_error(paged_attention_decode(q[-1:], pool, table, lengths, layout, scale=0.1), want[-1:]) < 1e-2
