"""Paged attention beside torch's SDPA on contiguous keys and values, in Qwen3-30B-A3B's shape (32 query heads, 4 key heads of 128)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rimuru_cli.bench.graph_time import graph_microseconds
from rimuru_kernels.paged_attention import KVLayout, paged_attention_decode, paged_attention_prefill, store_kv_entries
from rimuru_models.errors import UsageError

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
SCALE = HEAD_DIM**-0.5
DECODE_CASES = ((1, 1024, 16), (1, 4096, 16), (1, 32768, 16), (1, 32768, 4), (1, 32768, 64), (1, 131072, 16), (8, 4096, 16), (32, 1024, 16))
PREFILL_CASES = ((0, 512), (0, 2048), (0, 4096), (0, 8192), (28672, 4096))
DECODE_GOAL = 1.15
PREFILL_GOAL = 0.70


class PagedSequences:
    """Sequences of equal length with random keys and values in shuffled pages, and the same contiguous, [S, Hkv, n, D]."""

    def __init__(self, seqs: int, length: int, block_tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        device = torch.device("cuda")
        self.layout = KVLayout(block_tokens, KV_HEADS, HEAD_DIM)
        blocks = -(-length // block_tokens)
        page_bytes = self.layout.page_bytes(dtype.itemsize)
        self.pool = torch.empty(seqs * blocks * page_bytes, dtype=torch.uint8, device=device)
        order = torch.randperm(seqs * blocks, device=device).view(seqs, blocks)
        self.table = (order * (page_bytes // 256)).to(torch.int32)
        self.lengths = torch.full((seqs,), length, dtype=torch.int32, device=device)
        self.keys, self.values = (torch.randn(seqs, KV_HEADS, length, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
        positions = torch.arange(length, device=device)
        for seq in range(seqs):
            owner = torch.full((length,), seq, dtype=torch.int32, device=device)
            k, v = (t[seq].transpose(0, 1).contiguous() for t in (self.keys, self.values))
            store_kv_entries(k, v, self.pool, self.table, positions, self.layout, token_seqs=owner)


def run_attention_bench() -> dict[str, Any]:
    """Rows for decode and prefill. Needs a GPU.

    Returns:
        JSON-able: device; `decode` rows (seqs, context, block_tokens, us, sdpa_us, ratio, gb_per_s), `prefill` rows (past, tokens, us,
        sdpa_us, tflops, share of SDPA's rate), and whether each goal is met.
    """
    if not torch.cuda.is_available():
        raise UsageError("Kernels are measured on a GPU and this machine has none.")
    decode = [decode_row(*case) for case in DECODE_CASES]
    prefill = [prefill_row(*case) for case in PREFILL_CASES] + [mixed_prefill_row()]
    long = [row["ratio"] for row in decode if row["context"] == 32768 and row["block_tokens"] == 16]
    chunk = [row["share_of_sdpa"] for row in prefill if row["tokens"] == 4096 and row["past"] == 0]
    return {
        "bench": "attention",
        "device": torch.cuda.get_device_name(),
        "decode": decode,
        "prefill": prefill,
        "decode_goal_met": all(ratio <= DECODE_GOAL for ratio in long),
        "prefill_goal_met": all(share >= PREFILL_GOAL for share in chunk),
    }


def decode_row(seqs: int, context: int, block_tokens: int) -> dict[str, Any]:
    """One token for each of `seqs` sequences of `context` tokens; buffers rotate so that keys and values come from memory."""
    cache_bytes = seqs * context * 2 * KV_HEADS * HEAD_DIM * 2
    sets = [PagedSequences(seqs, context, block_tokens) for _ in range(max(1, min(8, (256 << 20) // cache_bytes)))]
    q = torch.randn(seqs, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    own = graph_microseconds([_decode_call(q, kv) for kv in sets], repeats=4)
    peer = graph_microseconds([_sdpa_call(q[:, :, None], kv.keys, kv.values, causal=False) for kv in sets], repeats=4)
    return {
        "seqs": seqs,
        "context": context,
        "block_tokens": block_tokens,
        "us": round(own, 2),
        "sdpa_us": round(peer, 2),
        "ratio": round(own / peer, 3),
        "gb_per_s": round(cache_bytes / own / 1e3, 1),
    }


def prefill_row(past: int, tokens: int) -> dict[str, Any]:
    """`tokens` new tokens of one sequence after `past` cached ones; SDPA is given the same work only where nothing is cached."""
    kv = PagedSequences(1, past + tokens, 16)
    q = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    own = graph_microseconds([_prefill_call(q, kv, bounds)])
    pairs = tokens * past + tokens * (tokens + 1) // 2
    row: dict[str, Any] = {
        "past": past,
        "tokens": tokens,
        "us": round(own, 1),
        "tflops": round(4 * pairs * HEADS * HEAD_DIM / own / 1e6, 1),
    }
    if past == 0:
        peer = graph_microseconds([_sdpa_call(q.transpose(0, 1)[None].contiguous(), kv.keys, kv.values, causal=True)])
        row |= {"sdpa_us": round(peer, 1), "share_of_sdpa": round(peer / own, 3)}
    return row


def mixed_prefill_row() -> dict[str, Any]:
    """Sequences of very different lengths in one batch: 1, 7, 100, 900 and 3000 new tokens after 2000 cached ones each."""
    new = (1, 7, 100, 900, 3000)
    kv = PagedSequences(len(new), 2000 + max(new), 16)
    bounds = torch.tensor([0, *new]).cumsum(0).to("cuda", torch.int32)
    kv.lengths = torch.tensor([2000 + n for n in new], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(new), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    own = graph_microseconds([_prefill_call(q, kv, bounds)])
    pairs = sum(n * 2000 + n * (n + 1) // 2 for n in new)
    return {"past": 2000, "tokens": sum(new), "us": round(own, 1), "tflops": round(4 * pairs * HEADS * HEAD_DIM / own / 1e6, 1)}


def _decode_call(q: Tensor, kv: PagedSequences) -> Callable[[], Tensor]:
    return lambda: paged_attention_decode(q, kv.pool, kv.table, kv.lengths, kv.layout, scale=SCALE)


def _prefill_call(q: Tensor, kv: PagedSequences, bounds: Tensor) -> Callable[[], Tensor]:
    return lambda: paged_attention_prefill(q, kv.pool, kv.table, bounds, kv.lengths, kv.layout, scale=SCALE)


def _sdpa_call(q: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, keys, values, is_causal=causal, scale=SCALE, enable_gqa=True)

    return call
