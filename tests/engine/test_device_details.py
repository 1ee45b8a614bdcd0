"""What only a look inside the device's engine shows: near ties of routers, copies called back, and the stream that graphs are made on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic import CONTEXT, prompts_of
from engines import GREEDY, load_engine, run_all
from tiny_checkpoints import write_tiny_checkpoint

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.device import runner
from rimuru_cli.engine.device.experts import ROUTED_ROWS, DeviceExperts

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["emulated", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, ROUTED_ROWS + 1])
def test_a_near_tie_of_two_experts_is_no_tie(rows: int, device: str, tmp_path: Path) -> None:
    """Logits of 8 and 8.02, which are the same number in bfloat16."""
    folder = write_tiny_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16)
    engine = load_engine(folder, 1.0, EngineConfig(device=device, context=CONTEXT))
    experts = engine._parts.experts
    assert isinstance(experts, DeviceExperts)
    seen: list[torch.Tensor] = []
    experts.recorder = lambda layer, ids, weights: seen.append(weights)
    where, hidden = engine._parts.pool.data.device, 64
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=where)
    x[:, :2] = 1.0  # normed: sqrt(32) in both
    router = torch.zeros(8, hidden, dtype=torch.bfloat16, device=where)
    router[2, 0] = router[5, 0] = 8 / 32**0.5
    router[5, 1] = 0.02 / 32**0.5
    norm = torch.ones(hidden, dtype=torch.bfloat16, device=where)
    with torch.inference_mode():
        experts.begin_streamed(rows, None)
        layer = engine._parts.model.config.moe_layers[0]
        experts.forward_routed(layer, x, torch.zeros_like(x), norm=norm, eps=1e-6, router=router, top_k=3, renormalize=True)
        experts.end_step()
    weights = seen[0]
    # Ids ascend, and a third expert comes before, between or behind the two.
    first, second = weights[0].topk(2).values.tolist()
    assert first / second == pytest.approx(torch.tensor(0.02).exp().item(), abs=0.01)
    experts.recorder = None
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_lower_ceiling_waits_for_no_expert_that_has_to_go(device: str, qwen3: Path) -> None:
    engine = load_engine(qwen3, 0.5, EngineConfig(device=device, context=CONTEXT, device_batch_tokens=24, max_batch_tokens=24))
    request = engine.submit(prompts_of()[0], replace(GREEDY, max_tokens=4))
    run_all(engine)
    residency = engine._parts.residency
    residency.settle()
    assert residency.shrink(3) == 3
    gate, over = threading.Event(), threading.Event()
    residency._loader.submit(lambda: (gate.wait(timeout=3), over.set())[1])
    assert residency.expand(3) == 3
    change = engine.set_memory(engine.least_memory)
    assert not over.is_set() and residency.num_resident == residency.resident.sum()
    assert change.retired_experts >= 3
    gate.set()
    engine.check_integrity()
    assert len(request.output_ids) == 4
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nobody_else_gets_the_stream_that_graphs_are_captured_on() -> None:
    """torch has 32 streams and hands them out in turn; a copy on the one that captures would be refused, or become part of the graph."""
    own = runner._capture_stream().cuda_stream
    assert own not in {torch.cuda.Stream().cuda_stream for _ in range(100)}
