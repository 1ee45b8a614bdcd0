"""Which limit on the context is the tightest, and what to tell the person about it."""

from __future__ import annotations

from rimuru_cli.engine.config import EngineConfig
from rimuru_cli.engine.stats import ContextReason


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
