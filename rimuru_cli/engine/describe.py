"""What to tell the person about a loaded model: sizes, device, and which limit on the context is the tightest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rimuru_cli.engine.config import EngineConfig, MemoryPlan
from rimuru_cli.engine.stats import ContextReason, EngineInfo
from rimuru_models.config import ModelConfig
from rimuru_models.layout import expert_bytes

if TYPE_CHECKING:
    from rimuru_cli.engine.device.plan import DevicePlan

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def engine_info(
    name: str, model: ModelConfig, dtype: torch.dtype, plan: MemoryPlan | DevicePlan, config: EngineConfig, *, device: str, reason: str
) -> EngineInfo:
    """What was loaded and how it is run; `dtype` is the experts' on disk, `reason` says why this device."""
    return EngineInfo(
        model=name,
        architecture=model.architecture,
        num_layers=model.num_layers,
        num_moe_layers=len(model.moe_layers),
        num_experts=model.num_experts,
        top_k=model.top_k,
        context_limit=plan.context,
        model_context=model.max_positions,
        context_reason=context_reason(plan.context, config, model.max_positions),
        device=device,
        backend_reason=reason,
        weight_dtype=_DTYPE_NAMES[dtype],
        memory_bytes=plan.ceiling,
        pool_bytes=plan.pool,
        dense_bytes=plan.dense,
        workspace_bytes=plan.workspace,
        page_bytes=plan.geometry.expert_page_bytes,
        expert_bytes=expert_bytes(model, dtype.itemsize),
        block_tokens=plan.block_tokens,
        mapped_bytes=len(model.moe_layers) * model.num_experts * expert_bytes(model, dtype.itemsize),
        notices=context_notices(plan.context, config, model.max_positions),
        profile=str(config.profile) if config.profile is not None else None,
    )


def context_reason(context: int, config: EngineConfig, model_context: int) -> ContextReason:
    """Why a sequence can have `context` tokens and no more."""
    if context == model_context:
        return "that is the model's own context"
    return "that is the context that was set" if context == config.context else "the memory ceiling allows no more"


def context_notices(context: int, config: EngineConfig, model_context: int) -> tuple[str, ...]:
    """A notice if memory cuts the context that the model or the person asked for."""
    wanted = min(model_context, config.context or model_context)
    if context >= wanted:
        return ()
    return (f"The memory ceiling allows {context:,} tokens of context instead of {wanted:,}; a higher --memory allows more.",)
