"""What to tell the person about a loaded model: sizes, device, and which limit on the context is the tightest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rimuru_cli.engine.config import EngineConfig, MemoryPlan
from rimuru_cli.engine.stats import ContextReason, EngineInfo
from rimuru_models.config import ModelConfig
from rimuru_models.layout import expert_bytes
from rimuru_models.quantization.formats import WeightFormats
from rimuru_models.quantization.precision import precision_of

if TYPE_CHECKING:
    from rimuru_cli.engine.device.plan import DevicePlan

_SHORT = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def engine_info(
    name: str,
    model: ModelConfig,
    dtype: torch.dtype,
    plan: MemoryPlan | DevicePlan,
    config: EngineConfig,
    *,
    device: str,
    reason: str,
    formats: WeightFormats | None = None,
) -> EngineInfo:
    """What was loaded and how it is run.

    Args:
        dtype: of plain experts on disk.
        reason: why this device.
        formats: what the weights are stored as; None: plain numbers.
    """
    experts, dense = _precision(model, dtype, formats, on_cpu=isinstance(plan, MemoryPlan))
    one_expert = plan.experts.expert_bytes if plan.experts.packed else expert_bytes(model, dtype.itemsize)
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
        weight_dtype=experts,
        dense_dtype=dense,
        memory_bytes=plan.ceiling,
        pool_bytes=plan.pool,
        dense_bytes=plan.dense,
        workspace_bytes=plan.workspace,
        page_bytes=plan.geometry.expert_page_bytes,
        expert_bytes=one_expert,
        block_tokens=plan.block_tokens,
        mapped_bytes=len(model.moe_layers) * model.num_experts * one_expert,
        notices=context_notices(plan.context, config, model.max_positions),
        profile=str(config.profile) if config.profile is not None else None,
        kv_dtype=config.kv if config.kv != "auto" else "f32" if isinstance(plan, MemoryPlan) else _DTYPE_NAMES[dtype],
    )


def _precision(model: ModelConfig, dtype: torch.dtype, formats: WeightFormats | None, *, on_cpu: bool) -> tuple[str, str]:
    """What experts and dense matrices are called. Where a CPU computes, packed dense matrices have become float32."""
    if formats is None or not (formats.quantised_experts or formats.dense):
        return _DTYPE_NAMES[dtype], _DTYPE_NAMES[dtype]
    words = precision_of(model, formats)
    dense = "f32" if on_cpu and formats.dense else words.dense
    return _SHORT.get(words.experts, words.experts), _SHORT.get(dense, dense)


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
