"""Engines that only simulate, of models as small as a test needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rimuru_cli.bench.synthetic import SHAPES
from rimuru_cli.bench.workload.cost import H200
from rimuru_cli.bench.workload.driver import SimulatedClock
from rimuru_cli.bench.workload.policies import parse_policies
from rimuru_cli.bench.workload.simulated import simulated_engine
from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.engine import Engine
from rimuru_models.config import ModelConfig

SMALL = {
    **SHAPES["qwen1.5-moe-a2.7b"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "vocab_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 512,
}
HYBRID = {
    **SHAPES["granite-4.0-h-tiny"],
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_local_experts": 32,
    "vocab_size": 1024,
}
EXPERT_BYTES = {"small": 3 * 512 * 512 * 2, "hybrid": 3 * 512 * 1536 * 2}
MIB = 1 << 20


def engine_of(shape: str, policy: str, clock: SimulatedClock, spare_mib: int, **changes: Any) -> Engine:
    """All 4 x 32 experts fit, and `spare_mib` beside them."""
    model = ModelConfig.from_dict(SMALL if shape == "small" else HYBRID, where=shape)
    chosen = parse_policies(policy)[0]
    config = EngineConfig(max_sequences=64, context=512, device_batch_tokens=256, **changes)
    config = replace(config, pool_bytes=4 * 32 * EXPERT_BYTES[shape] + spare_mib * MIB)
    return simulated_engine(shape, model, chosen.configure(config, model), H200, clock, profiled=chosen.profiled)
