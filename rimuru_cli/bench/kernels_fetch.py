"""Expert residency and copies on the device, and the launches of a decode layer, in Qwen3-30B-A3B's shape (128 experts of 9 MiB, top-8)."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rimuru_cli.bench.graph_time import graph_microseconds
from rimuru_cli.bench.kernels_attention import HEAD_DIM, HEADS, KV_HEADS, SCALE, PagedSequences
from rimuru_kernels.expert_fetch import FetchPlan, LayerResidency, fetch, resolve, route
from rimuru_kernels.paged_attention import paged_attention_decode
from rimuru_kernels.rms_norm import add_rms_norm
from rimuru_kernels.rotary import rotary_store, rotary_tables
from rimuru_kernels.topk_gating import topk_gating
from rimuru_models.errors import UsageError

EXPERTS, TOP_K, HIDDEN, PAGE_BYTES, PAGES = 128, 8, 2048, 3 << 20, 3
EXPERT_BYTES = PAGES * PAGE_BYTES
HOST_EXPERTS = 64
GOALS = {"fetch_one_gb_per_s": 48.0, "fetch_none_us": 3.0, "resolve_us": 5.0}


@contextmanager
def registered_memory(num_bytes: int, *, huge_pages: bool = False) -> Iterator[Tensor]:
    """A mapping of our own, page-locked in place with cudaHostRegister; with `huge_pages` the system is asked for 2 MiB pages first."""
    mapping = mmap.mmap(-1, num_bytes)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    memory.random_(0, 256)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 2))  # 2: cudaHostRegisterMapped
    if code != 0:
        raise UsageError(f"The driver refused to page-lock {num_bytes} bytes (CUDA error {code}).", hint="See `ulimit -l` and free memory.")
    try:
        yield memory
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(memory.data_ptr())


@contextmanager
def pinned_memory(num_bytes: int) -> Iterator[Tensor]:
    """Memory from torch's page-locked allocator."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory.random_(0, 256)
    yield memory


def make_residency(resident: int, host_base: int = 0) -> LayerResidency:
    """A layer of which the first `resident` experts own pages (entries 0 on); host experts repeat over HOST_EXPERTS places."""
    entries = torch.full((EXPERTS, PAGES), -1, dtype=torch.int32)
    entries[:resident] = (torch.arange(resident * PAGES, dtype=torch.int32) * (PAGE_BYTES // 256)).view(resident, PAGES)
    host = host_base + (torch.arange(EXPERTS) % HOST_EXPERTS) * EXPERT_BYTES if host_base else 16 * (1 + torch.arange(EXPERTS))
    return LayerResidency(entries.cuda(), torch.rand(EXPERTS).cuda(), host.cuda(), torch.zeros(4, dtype=torch.int64).cuda())


def run_fetch_bench() -> dict[str, Any]:
    """Rows for copies, decisions and a decode layer's launches. Needs a GPU and 1.2 GB of page-locked memory.

    Returns:
        JSON-able: device; `fetch` rows (memory, missing, us, gb_per_s), `resolve` rows (what, tokens, misses, us), `launches` rows (launch,
        us), and whether each goal is met.
    """
    if not torch.cuda.is_available():
        raise UsageError("Kernels are measured on a GPU and this machine has none.")
    rows = []
    providers = (
        ("cudaHostRegister", registered_memory),
        ("cudaHostRegister, huge pages", partial(registered_memory, huge_pages=True)),
        ("pinned by torch", pinned_memory),
    )
    for name, provider in providers:
        with provider(HOST_EXPERTS * EXPERT_BYTES) as memory:
            rows += [fetch_row(memory, name, missing) for missing in (0, 1, 2, 4, 8)]
    decisions = [resolve_row(1, 0), resolve_row(1, 8), resolve_row(8, 0), resolve_row(64, 0)] + [route_row(n) for n in (1, 2, 4, 8, 16)]
    return {
        "bench": "fetch",
        "device": torch.cuda.get_device_name(),
        "fetch": rows,
        "resolve": decisions,
        "launches": layer_rows(),
        "goals": GOALS,
        "goals_met": {
            "fetch_one_gb_per_s": all(r["gb_per_s"] >= GOALS["fetch_one_gb_per_s"] for r in rows if r["missing"] == 1),
            "fetch_none_us": all(r["us"] <= GOALS["fetch_none_us"] for r in rows if r["missing"] == 0),
            "resolve_us": all(r["us"] <= GOALS["resolve_us"] for r in decisions if r["what"] == "resolve"),
        },
    }


def fetch_row(memory: Tensor, name: str, missing: int) -> dict[str, Any]:
    """Copy `missing` experts; each call of the graph copies other experts. The copies are checked."""
    pool = torch.zeros(16 * EXPERT_BYTES, dtype=torch.uint8, device="cuda")
    calls, plans = [], []
    for start in range(0, HOST_EXPERTS, 8):
        plan = FetchPlan.create(EXPERTS, PAGES, TOP_K, torch.device("cuda"))
        sources = memory.data_ptr() + (start + torch.arange(TOP_K)) * EXPERT_BYTES
        plan.sources.copy_(sources)
        slots = (torch.randperm(16)[:TOP_K, None] * PAGES + torch.arange(PAGES)) * (PAGE_BYTES // 256)
        plan.pages.copy_(slots.to(torch.int32))
        plan.count.fill_(missing)
        plans.append(plan)
        calls.append(_fetch_call(plan, pool))
    us = graph_microseconds(calls, repeats=1 if missing else 40)
    for row in range(missing):  # the last plan's copies are still there
        start = int(plans[-1].sources[row]) - memory.data_ptr()
        content = memory[start : start + EXPERT_BYTES].cuda().view(PAGES, PAGE_BYTES)
        for page, entry in enumerate(plans[-1].pages[row].tolist()):
            assert torch.equal(pool[entry * 256 : entry * 256 + PAGE_BYTES], content[page]), "a fetched page differs from its source"
    return {"memory": name, "missing": missing, "us": round(us, 2), "gb_per_s": round(missing * EXPERT_BYTES / us / 1e3, 2)}


def resolve_row(tokens: int, misses: int) -> dict[str, Any]:
    """Decisions alone: experts at random, all resident, or all absent (three disjoint choices take turns in two places)."""
    plan = FetchPlan.create(EXPERTS, PAGES, tokens * TOP_K, torch.device("cuda"))
    state = make_residency(2 * TOP_K if misses else EXPERTS)
    sets = [torch.arange(start, start + TOP_K).repeat(tokens, 1) for start in (0, TOP_K, 2 * TOP_K)]
    if not misses:
        sets = [torch.rand(tokens, EXPERTS).topk(TOP_K).indices.sort().values for _ in range(3)]
    weights = torch.full((tokens, TOP_K), 1.0 / TOP_K, device="cuda")
    calls = [_resolve_call(ids.cuda(), weights, state, plan) for ids in sets]
    us = graph_microseconds(calls, repeats=50)
    return {"what": "resolve", "tokens": tokens, "misses": int(plan.count), "us": round(us, 2)}


def route_row(tokens: int) -> dict[str, Any]:
    """Residual add, norm, router, gating and decisions in one launch, nothing missing."""
    plan, state = FetchPlan.create(EXPERTS, PAGES, tokens * TOP_K, torch.device("cuda")), make_residency(EXPERTS)
    us = graph_microseconds([_route_call(tokens, state, plan) for _ in range(4)], repeats=40)
    return {"what": "route", "tokens": tokens, "misses": int(plan.count), "us": round(us, 2)}


def layer_rows(context: int = 4096) -> list[dict[str, Any]]:
    """Every launch of a decode layer but the experts' own, alone in a graph, then all in a row."""
    kv = PagedSequences(1, context, 16)
    x, residual = _random(1, HIDDEN), _random(1, HIDDEN)
    norm, head_norm = torch.rand(HIDDEN, device="cuda").bfloat16(), torch.rand(HEAD_DIM, device="cuda").bfloat16()
    qkv_weight, out_weight = _random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), _random(HIDDEN, HEADS * HEAD_DIM)
    positions = torch.tensor([context - 1], device="cuda")
    cos, sin = rotary_tables(positions, 1e6 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM), torch.float32)
    qkv, q, attended = _random(1, qkv_weight.shape[0]), _random(1, HEADS, HEAD_DIM), _random(1, HEADS * HEAD_DIM)
    state, plan = make_residency(EXPERTS), FetchPlan.create(EXPERTS, PAGES, TOP_K, torch.device("cuda"))
    pool = torch.empty(256, dtype=torch.uint8, device="cuda")
    logits, weights = _random(1, EXPERTS), torch.full((1, TOP_K), 0.125, device="cuda")
    parts: list[tuple[str, Callable[[], object]]] = [
        ("add + norm", lambda: add_rms_norm(x, residual, norm, 1e-6)),
        ("qkv matmul", lambda: linear(x, qkv_weight)),
        (
            "head norms + rotary + KV store",
            lambda: rotary_store(qkv, cos, sin, kv.pool, kv.table, positions, kv.layout, q_norm=head_norm, k_norm=head_norm, eps=1e-6),
        ),
        (f"attention at {context} (2 launches)", lambda: paged_attention_decode(q, kv.pool, kv.table, kv.lengths, kv.layout, scale=SCALE)),
        ("output matmul", lambda: linear(attended, out_weight)),
        ("add + norm + router + gating + resolve", _route_call(1, state, plan)),
        ("fetch, nothing missing", _fetch_call(plan, pool)),
    ]
    rows = [{"launch": name, "us": round(graph_microseconds([call], repeats=100), 2)} for name, call in parts]
    rows.append({"launch": "all of these in a row", "us": round(graph_microseconds([call for _, call in parts], repeats=48), 2)})
    apart: list[tuple[str, Callable[[], object]]] = [
        ("router matmul", lambda: linear(x, qkv_weight[:EXPERTS])),
        ("gating", lambda: topk_gating(logits, TOP_K, True)),
        ("resolve", _resolve_call(torch.arange(TOP_K, device="cuda")[None], weights, state, plan)),
    ]
    return rows + [
        {"launch": f"{name}, instead of the fused one", "us": round(graph_microseconds([call], repeats=100), 2)} for name, call in apart
    ]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _fetch_call(plan: FetchPlan, pool: Tensor) -> Callable[[], object]:
    return lambda: fetch(plan, pool, PAGE_BYTES)


def _resolve_call(ids: Tensor, weights: Tensor, state: LayerResidency, plan: FetchPlan) -> Callable[[], object]:
    return lambda: resolve(ids, weights, state, plan)


def _route_call(tokens: int, state: LayerResidency, plan: FetchPlan) -> Callable[[], object]:
    x, residual, router = _random(tokens, HIDDEN), _random(tokens, HIDDEN), _random(EXPERTS, HIDDEN)
    norm = torch.rand(HIDDEN, device="cuda").bfloat16()
    own = dataclasses.replace(plan, arrived=torch.zeros_like(plan.arrived))
    return lambda: route(x, residual, norm, 1e-6, router, TOP_K, True, state, own)
