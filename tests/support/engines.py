"""Engines over tiny checkpoints, and the same model in plain memory as their oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rimuru_cli.engine.config import EngineConfig, MemoryPlan, plan_memory
from rimuru_cli.engine.device.plan import plan_device_memory
from rimuru_cli.engine.engine import Engine
from rimuru_cli.engine.request import Request, SamplingParams
from rimuru_models import load_model
from rimuru_models.interfaces import ForwardContext
from rimuru_models.resident import ResidentExperts, ResidentKVCache, ResidentStates
from rimuru_models.weights import CheckpointReader

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def plan_for(folder: Path, config: EngineConfig | None = None) -> MemoryPlan:
    """The memory plan of a checkpoint with a pool that holds everything."""
    with CheckpointReader(folder) as reader:
        return plan_memory(reader.config, config or EngineConfig(), program=0)


def load_engine(folder: Path, share: float = 1.0, config: EngineConfig | None = None) -> Engine:
    """An engine with room for `share` of the experts above the floor and the smallest context; share 1 holds everything and long chats."""
    config = config or EngineConfig()
    with CheckpointReader(folder) as reader:
        model, dtype = reader.config, reader.expert_dtype
    if config.device in ("emulated", "cuda"):
        device_plan = plan_device_memory(
            model, dtype, replace(config, memory_bytes=None, pool_bytes=0), program=0, free=0, max_batch_tokens=config.device_batch_tokens
        )
        geometry, floor, least, full = device_plan.geometry, device_plan.floor, device_plan.pool, 0
    else:
        plan = plan_for(folder, config)
        geometry, floor, least, full = plan.geometry, plan.floor, plan.least_pool, plan.full_pool
    experts = len(model.moe_layers) * (model.num_experts - floor) * geometry.pages_per_expert * geometry.expert_page_bytes
    pool_bytes = max(full, least + experts) if share == 1.0 else least + int(share * experts)
    return Engine.load(folder, replace(config, pool_bytes=pool_bytes, poison=True))


def resident_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of the model in plain memory, one sequence, no pool."""
    with CheckpointReader(folder) as reader:
        return resident_tokens_of(reader, prompt, count)


def resident_tokens_of(reader: CheckpointReader, prompt: Sequence[int], count: int) -> list[int]:
    """As `resident_tokens`, of an open checkpoint."""
    with torch.inference_mode():
        model = load_model(reader, torch.float32)
        cache, experts = ResidentKVCache(reader.config), ResidentExperts(reader)
        states = ResidentStates(reader.config) if reader.config.recurrent else None
        tokens, out, done = list(prompt), [], 0
        for _ in range(count):
            new = tokens[done:]
            context = ForwardContext(torch.arange(done, len(tokens)), cache, experts, recurrent=states)
            if states is not None:
                states.begin_step([len(new)])
            hidden = model.forward(torch.tensor(new), context)
            done = len(tokens)
            token = int(model.logits(hidden[-1:]).argmax())
            tokens.append(token)
            out.append(token)
        return out


def run_all(engine: Engine, each_step: Callable[[], None] | None = None) -> None:
    """Step until nothing is left to do, with all tables checked after every step."""
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if each_step is not None:
            each_step()


def answer(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY) -> Request:
    """Run one request to its end."""
    request = engine.submit(prompt, params)
    run_all(engine)
    return request


def assert_all_free(engine: Engine) -> None:
    """Close the engine and check that every page came back."""
    engine.close()
    engine.check_integrity()
    assert engine.snapshot().free_bytes == engine.info.pool_bytes
