"""How many kernels a decode layer launches on a GPU, counted without one: tensors claim to be on it, and launches are only noted.

In a process of its own: kernels that other tests imported may be the interpreter's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import collections, json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from record_launches import record
from rimuru_cli.bench.synthetic import SyntheticReader
from rimuru_cli.engine.device.experts import DeviceExperts
from rimuru_cli.engine.device.kv_cache import DeviceKVCache
from rimuru_cli.engine.device.link import LinkRates
from rimuru_cli.engine.scheduler import ScheduledRows
from rimuru_kernels.expert_fetch import LayerResidency
from rimuru_kernels.paged_attention.layout import KVLayout
from rimuru_models import load_model
from rimuru_models.interfaces import ForwardContext

# Ops that make no kernel: views and memory.
FREE = {"view", "_unsafe_view", "t", "transpose", "split", "split_with_sizes", "slice", "select", "as_strided", "empty", "empty_like",
        "detach", "expand", "unsqueeze", "squeeze", "permute", "reshape", "new_empty", "alias", "_reshape_alias", "empty_strided"}

class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.name().split("::")[1].split(".")[0]
        if name not in FREE:
            self.names.append(name)
        return function(*arguments, **(options or {}))

reader, rows = SyntheticReader("tiny", dtype=torch.bfloat16), int(sys.argv[1])
shape, cpu = reader.config, torch.device("cpu")
model = load_model(reader, torch.bfloat16, device=cpu)
data, experts, layers = torch.zeros(1 << 20, dtype=torch.uint8), shape.num_experts, shape.num_layers
layer = LayerResidency(torch.zeros(experts, 3, dtype=torch.int32), torch.zeros(experts), torch.zeros(experts, dtype=torch.int64),
                       torch.zeros(4, dtype=torch.int64))
tables = SimpleNamespace(layer=lambda index: layer, counters=torch.zeros(layers, 4, dtype=torch.int64))
residency = SimpleNamespace(tables=tables, view=SimpleNamespace(f=shape.expert_intermediate, d=shape.hidden_size), pages_per_expert=3,
                            num_resident=1, total=2, stale=False, push=lambda: None, pull=lambda: None)
scratch = SimpleNamespace(rows=torch.zeros(experts, 3, dtype=torch.int32))
pages = SimpleNamespace(f=shape.expert_intermediate, d=shape.hidden_size, layers=[None] * layers, page_bytes=None)
host = SimpleNamespace(num_experts=experts, num_layers=layers, expert_bytes=1, mapped_bytes=0, pages=pages)
provider = DeviceExperts(host=host, residency=residency, pool=SimpleNamespace(data=data), scratch=scratch, moe_layers=shape.moe_layers,
                         top_k=shape.top_k, max_tokens=64, decay=0.9, dtype=torch.bfloat16, rates=LinkRates())
blocks = MagicMock(num_layers=layers, blocks_for=lambda tokens: -(-tokens // 16), block_tokens=16)
cache = DeviceKVCache(blocks, data, KVLayout(16, shape.num_kv_heads, shape.head_dim), max_sequences=64, max_tokens=64, context=256,
                      attention_layers=shape.attention_layers)
cache._num_rows = rows
cache._decode_rows, cache._num_sequences = (rows, rows) if sys.argv[2] == "decode" else (0, 1)
context = ForwardContext(positions=cache.positions[:rows], kv=cache, experts=provider, projected=cache, routed=provider)
provider.begin_on_demand(rows) if sys.argv[2] == "decode" else provider.begin_streamed(rows, None)
torch.Tensor.is_cuda = property(lambda tensor: True)
multiply = torch.mm
torch.mm = lambda a, b, out_dtype=None: multiply(a, b)  # a CPU has no product with another dtype's result
with torch.inference_mode():
    found = []
    everything, norms = model.layers, model._next_norms
    for count in (1, 2):
        model.layers, model._next_norms = everything[:count], norms[:count]
        with record() as launches, Count() as ops:
            model.forward(cache.tokens[:rows], context)
        found.append(collections.Counter([launch.function.__name__ for launch in launches] + ops.names))
print(json.dumps(found[1] - found[0]))
"""


def launches(rows: int, what: str) -> dict[str, int]:
    pytest.importorskip("triton")
    support = Path(__file__).parents[1] / "support"
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(rows), what], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decode_layer_of_few_sequences_is_ten_launches(rows: int) -> None:
    found = launches(rows, "decode")
    assert sum(found.values()) <= 10, found
    assert {"_route", "_fetch", "gate_up_rows", "down_rows"} <= set(found), found


def test_a_layer_of_a_prompt_is_fourteen_launches() -> None:
    """Each takes the host some 25 us, so a short prompt waits for them; counting alone was fourteen once."""
    found = launches(48, "prompt")
    assert sum(found.values()) <= 14, found
    assert {"_count", "grouped_gemm", "_prefill"} <= set(found), found
