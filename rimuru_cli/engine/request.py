"""Requests: what is asked of the engine, and where each one stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from rimuru_models.errors import UsageError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is exact greedy decoding.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        repetition_penalty: > 1 makes tokens of the prompt and the answer less likely (CTRL, arXiv 1909.05858).
        presence_penalty: subtracted once from the logit of each token already generated.
        frequency_penalty: subtracted for every time a token was generated.
        seed: makes sampling repeatable; None draws one.
        max_tokens: most tokens to generate; None up to the context limit.
        stop: strings that end the answer and are not part of it.
        ignore_eos: keep generating past the end-of-answer token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(name: str, value: float, low: float, high: float) -> None:
            if not math.isfinite(value) or not low <= value <= high:
                top = f" and at most {high:g}" if math.isfinite(high) else ""
                raise UsageError(f"{name} must be at least {low:g}{top}, not {value:g}.")

        check("temperature", self.temperature, 0.0, math.inf)
        check("top_k", self.top_k, 0, math.inf)
        check("top_p", self.top_p, 0.0, 1.0)
        check("min_p", self.min_p, 0.0, 1.0)
        check("repetition_penalty", self.repetition_penalty, 1e-3, math.inf)
        check("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        if any(not s for s in self.stop):
            raise UsageError("a stop string must not be empty.")


class RequestStatus(Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Timings:
    """Counts and seconds of one request; the same names appear in `--json`.

    prompt_seconds runs from the first prefill step to the first token, ttft_seconds from submission to the first token,
    generation_seconds from the first token to the last. cached_tokens are the prompt's that were found computed; computed_tokens are those
    that were computed, prompt and answer together, some twice if the request was preempted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    ttft_seconds: float = 0.0


@dataclass(eq=False)
class Request:
    """One sequence: a prompt, the tokens generated so far, and the bookkeeping around them."""

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)
    expert_uses: int = 0
    expert_hits: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt_ids) + len(self.output_ids)
