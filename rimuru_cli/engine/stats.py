"""Small frozen pictures of the engine for the command line, the dashboard and `--json`. Bytes are ints, times are seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ContextReason = Literal["that is the model's own context", "that is the context that was set", "the memory ceiling allows no more"]


@dataclass(frozen=True)
class EngineInfo:
    """What was loaded and how it is run; fixed after loading.

    Attributes:
        context_limit: most tokens one sequence can hold here: the model's own limit, or what the pool can give with experts at the floor.
        model_context: the model's own limit.
        context_reason: which of the limits on the context is the tightest, in words.
        notices: everything the person should know: fallbacks, reductions, defaults that differ from the model's.
        profile: path of the hotset profile that seeded the ranking, or None.
    """

    model: str
    architecture: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    context_limit: int
    model_context: int
    context_reason: ContextReason
    device: str
    backend_reason: str
    weight_dtype: str
    memory_bytes: int
    pool_bytes: int
    dense_bytes: int
    workspace_bytes: int
    page_bytes: int
    expert_bytes: int
    block_tokens: int
    notices: tuple[str, ...] = ()
    profile: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class AdjusterEvent:
    """One decision that moved pages: at which step, what, and why."""

    step: int
    shrunk: int
    expanded: int
    reason: str
    required_blocks: int
    free_blocks: int


@dataclass(frozen=True)
class Snapshot:
    """The pool's composition and the engine's counters at one moment.

    Attributes:
        bytes_by_kind: bytes owned per kind: expert, buffer (the two loading buffers), kv, ssm, conv.
        tail_bytes: bytes lost at page tails.
        cached_kv_bytes: part of kv that no running sequence uses (kept for prompt reuse).
        resident_by_layer: resident experts of each MoE layer.
        expert_uses, expert_hits: selections so far, and those that found their expert resident.
        expert_bytes_read: bytes of experts copied or read from the host tier so far.
    """

    step: int
    pool_bytes: int
    free_bytes: int
    tail_bytes: int
    bytes_by_kind: dict[str, int]
    cached_kv_bytes: int
    resident_experts: int
    total_experts: int
    resident_by_layer: tuple[int, ...]
    expert_uses: int
    expert_hits: int
    expert_bytes_read: int
    running: int
    waiting: int
    context_tokens: int
    preemptions: int
    events: tuple[AdjusterEvent, ...] = field(default=())

    @property
    def hit_rate(self) -> float | None:
        """Share of expert selections that found their expert resident; None before the first token."""
        return self.expert_hits / self.expert_uses if self.expert_uses else None

    @property
    def resident_share(self) -> float:
        """Share of all experts that is resident."""
        return self.resident_experts / self.total_experts if self.total_experts else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able values, with the two derived shares."""
        return {**asdict(self), "hit_rate": self.hit_rate, "resident_share": self.resident_share}
