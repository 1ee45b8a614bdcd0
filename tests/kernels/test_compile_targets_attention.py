"""Attention, fetch and the fused row kernels compile for every supported GPU and fit a gaming card's shared memory; no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = 101_376  # bytes a block may have on sm_86, sm_89 and sm_120

# In a process of its own: kernels imported by other tests may be the interpreter's, which cannot be compiled.
SCRIPT = """
import json, sys
import torch
from record_launches import compile_launch, record
from rimuru_kernels.expert_fetch import FetchPlan, LayerResidency, ResolvePolicy
from rimuru_kernels.expert_fetch import count_kernel
from rimuru_kernels.expert_fetch import kernel as fetch
from rimuru_kernels.paged_attention import KVLayout
from rimuru_kernels.paged_attention import kernel as attention
from rimuru_kernels.rms_norm import kernel as norm
from rimuru_kernels.rotary import kernel as rotary
from rimuru_kernels.topk_gating import kernel as gating

cpu, i32, i64 = torch.device("cpu"), torch.int32, torch.int64
pool, table = torch.empty(4096, dtype=torch.uint8), torch.empty(1, 2048, dtype=i32)
one, two, position = torch.empty(1, dtype=i32), torch.empty(2, dtype=i32), torch.empty(1, dtype=i64)


def attend(dtype, heads, kv_heads, head_dim, window, quantized=False):
    layout = KVLayout(16, kv_heads, head_dim, quantized=quantized)
    q = torch.empty(1, heads, head_dim, dtype=dtype)
    if quantized:
        k = torch.empty(1, kv_heads, head_dim, dtype=dtype)
        attention.store(k, k, pool, table, position, None, layout)
    attention.decode(q, pool, table, one, q, layout, 0.1, window)
    attention.prefill(q, pool, table, two, one, q, layout, 0.1, window)


def rows(dtype, heads, kv_heads, head_dim, hidden, experts, top_k):
    layout = KVLayout(16, kv_heads, head_dim)
    x, weight, head_weight = (torch.empty(*shape, dtype=dtype) for shape in ((1, hidden), (hidden,), (head_dim,)))
    norm.rms_norm(x, weight, 1e-6, x, x, x)
    tables = [torch.empty(1, 1, head_dim)] * 2
    for tokens in (1, 512):
        qkv = torch.empty(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        q = torch.empty(tokens, heads, head_dim, dtype=dtype)
        for pages in (layout, KVLayout(16, kv_heads, head_dim, quantized=True)):
            rotary.rotary_store(qkv, head_weight, head_weight, *tables, q, pool, table, position, None, pages, 1e-6, None)
    ids, weights = torch.empty(1, top_k, dtype=i64), torch.empty(1, top_k)
    gating.topk_gating(torch.empty(1, experts, dtype=dtype), top_k, True, weights, ids)
    host, counters = torch.empty(experts, dtype=i64), torch.empty(4, dtype=i64)
    state = LayerResidency(torch.empty(experts, 3, dtype=i32), torch.empty(experts), host, counters)
    plan = FetchPlan.create(experts, 3, experts, cpu, torch.empty(8, 3, dtype=i32))
    policy = ResolvePolicy(never_evict_better=True)
    router = torch.empty(experts, hidden, dtype=dtype)
    for tokens in (1, 8):  # compared with every expert, and added up in memory
        row, chosen = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens, top_k, dtype=i64)
        fetch.route(row, row, weight, 1e-6, router, True, row, row, chosen, torch.empty(tokens, top_k), state, plan, policy, None)
    for tokens in (1, 64):
        fetch.resolve(torch.empty(tokens, top_k, dtype=i64), torch.empty(tokens, top_k), state, plan, policy, None)
    for tokens in (1, 512):
        count_kernel.count(torch.empty(tokens, top_k, dtype=i64), torch.empty(tokens, top_k), state, 0.9)
    fetch.fetch(plan, pool, 3 << 20, (0, 3))


with record() as launches:
    attend(torch.bfloat16, 32, 4, 128, None)
    attend(torch.bfloat16, 32, 4, 128, None, quantized=True)
    if sys.argv[1] == "90":  # wgmma keeps operands in shared memory that others keep in registers
        attend(torch.float16, 16, 16, 64, None)
        attend(torch.bfloat16, 16, 2, 256, None)
        attend(torch.bfloat16, 16, 2, 256, None, quantized=True)
    if sys.argv[1] == "86":
        attend(torch.bfloat16, 32, 4, 128, 4096)
        attend(torch.float32, 32, 4, 128, None)
        attend(torch.float32, 32, 4, 128, 4096, quantized=True)
    rows(torch.bfloat16, 32, 4, 128, 2048, 128, 8)
found = [(launch.function.__name__, compile_launch(launch, int(sys.argv[1])).metadata.shared) for launch in launches]
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    support = Path(__file__).parents[1] / "support"
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # compile afresh
        "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"_decode_split", "_decode_combine", "_prefill", "_count"} <= {name for name, _ in found}
    assert not [(name, shared) for name, shared in found if shared > SHARED_LIMIT]
