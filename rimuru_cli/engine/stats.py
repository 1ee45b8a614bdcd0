"""Small frozen pictures of the engine for the command line, the dashboard and `--json`. Bytes are ints, times are seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

ContextReason = Literal["that is the model's own context", "that is the context that was set", "the memory ceiling allows no more"]


_FEW = 8  # steps of a kind whose times are remembered
CEILING_LOWERED = "the memory ceiling was lowered"
"""Reason of an event that stands for no decision of the adjuster."""


@dataclass(frozen=True)
class EngineInfo:
    """What was loaded and how it is run; only another memory ceiling changes it.

    Attributes:
        context_limit: most tokens one sequence can hold here: the model's own limit, or what the pool can give with experts at the floor.
        model_context: the model's own limit.
        context_reason: which of the limits on the context is the tightest, in words.
        pinned_bytes: experts in page-locked memory, which the device reads by itself; mapped_bytes: those that stay in the checkpoint's
            files.
        notices: everything the person should know: fallbacks, reductions, defaults that differ from the model's.
        profile: path of the hotset profile that seeded the ranking, or None.
        weight_dtype: precision of the experts, dense_dtype: of all other matrices, empty: the same; as "bf16" or "int4 (groups of 32)".
        kv_dtype: what keys and values are stored as: f32, bf16, f16 or q8.
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
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    notices: tuple[str, ...] = ()
    profile: str | None = None
    kv_dtype: str = "f32"
    dense_dtype: str = ""

    @property
    def precision(self) -> str:
        """What the weights are stored as, in a phrase."""
        plain = self.dense_dtype in ("", self.weight_dtype)
        return self.weight_dtype if plain else f"experts {self.weight_dtype}, dense {self.dense_dtype}"

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class AdjusterEvent:
    """One decision that moved pages: at which step, what, and why; `time` is seconds since 1970."""

    step: int
    shrunk: int
    expanded: int
    reason: str
    required_blocks: int
    free_blocks: int
    time: float = 0.0


@dataclass
class Work:
    """What the engine has done so far. Seconds are those of all steps that held such tokens.

    Attributes:
        steps: forward passes.
        prefill_tokens, prefill_seconds: tokens of prompts.
        decode_tokens, decode_seconds: tokens computed one by one.
        ttft_seconds: of the last request that got its first token; None before.
        adjustments: decisions of the adjuster that moved pages.
        elastic_bytes: of the pages that experts gave or got by them; elastic_seconds: how long steps waited for that, all in all.
        last_ids: requests that took part in the last step.
        step_seconds: of recent steps without prompts, on average; None before the first.
        captured_rows: most rows of a step that is replayed as one graph; None where none is.
    """

    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    ttft_seconds: float | None = None
    adjustments: int = 0
    elastic_bytes: int = 0
    elastic_seconds: float = 0.0
    last_ids: tuple[int, ...] = ()
    step_seconds: float | None = None
    captured_rows: int | None = None
    # Seconds of the last few steps of each width.
    _captured: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW), repr=False)
    _wide: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW), repr=False)
    _prompts: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW), repr=False)
    _rows: list[tuple[int, int, bool]] = field(default_factory=list, repr=False)

    @property
    def captured_seconds(self) -> float | None:
        """The least of recent steps that were one graph, which leaves out those in which a graph was made; None while few are known."""
        return min(self._captured) if len(self._captured) >= _FEW // 2 else None

    @property
    def wide_seconds(self) -> float | None:
        """The least of recent steps with more rows; before the first, of steps with prompts, which are launched in the same way."""
        return min(self._wide or self._prompts, default=None)

    @property
    def prompt_seconds(self) -> float | None:
        """The least of recent steps with prompts; None before the first."""
        return min(self._prompts, default=None)

    def add_rows(self, request_id: int, count: int, *, generating: bool) -> None:
        """Note `count` tokens of a request that the present step computes; `generating`: it has had its first token."""
        self._rows.append((request_id, count, generating and count == 1))

    def add_handover(self, num_bytes: int, seconds: float) -> None:
        """Pages of so many bytes changed hands, and the step waited so long."""
        self.elastic_bytes += num_bytes
        self.elastic_seconds += seconds

    def add_step(self, seconds: float) -> None:
        """The step whose rows were noted is done, and took so long."""
        prefill = sum(count for _, count, decodes in self._rows if not decodes)
        decode = sum(count for _, count, decodes in self._rows if decodes)
        self.last_ids = tuple(request_id for request_id, _, _ in self._rows)
        self._rows.clear()
        self.add_tokens(prefill, decode, seconds)

    def add_tokens(self, prefill: int, decode: int, seconds: float) -> None:
        """A step of the requests of the last one is done: so many tokens of prompts and of answers, and what it took."""
        self.steps += 1
        self.prefill_tokens += prefill
        self.prefill_seconds += seconds if prefill else 0.0
        self.decode_tokens += decode
        self.decode_seconds += seconds if decode else 0.0
        if not prefill:
            # About the last ten: what runs, and how many experts are absent, changes slowly.
            self.step_seconds = seconds if self.step_seconds is None else 0.9 * self.step_seconds + 0.1 * seconds
        if self.captured_rows is not None:
            (self._prompts if prefill else self._captured if decode <= self.captured_rows else self._wide).append(seconds)


class Tally(NamedTuple):
    """Counters after a step.

    Attributes:
        running, waiting: sequences now; preemptions: so far.
        prefill_rows, decode_rows: tokens computed so far, as of `Work`.
        uses, hits, link_bytes: expert selections, those that found their expert resident, and bytes of experts brought, so far.
        resident: experts now; kv_bytes, state_bytes (of recurrent layers), buffer_bytes, free_bytes: of the pool now.
    """

    running: int
    waiting: int
    preemptions: int
    prefill_rows: int
    decode_rows: int
    uses: int
    hits: int
    link_bytes: int
    resident: int
    kv_bytes: int
    state_bytes: int
    buffer_bytes: int
    free_bytes: int


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
        memory_bytes: the ceiling.
        withheld_bytes: memory that a lower ceiling keeps from use but that could not be given back.
        pinned_bytes, mapped_bytes: as of `EngineInfo`.
        host_brought: experts that the host had to bring because the device could not read them, so far.
        elastic_bytes, elastic_seconds: of pages that changed hands between experts and sequences, and how long steps waited for that.
        states_not_kept: how often states that a text could later be resumed from were not kept for lack of room, so far; it is then
            computed again from an earlier place.
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
    memory_bytes: int = 0
    withheld_bytes: int = 0
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    host_brought: int = 0
    elastic_bytes: int = 0
    elastic_seconds: float = 0.0
    states_not_kept: int = 0
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
