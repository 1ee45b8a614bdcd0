"""The engine: one model, one page pool, one clock.

    step():  commit loaded experts -> schedule (take pages) -> adjust (experts <-> free blocks) -> forward -> sample -> reclaim

Pages change owners between forward passes only, so nothing is read while it is given away. Not thread-safe: one thread steps.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rimuru_cli.engine.config import EngineConfig, Progress
from rimuru_cli.engine.experts.adjuster import AdjusterStats
from rimuru_cli.engine.experts.executor import Recorder
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.request import FinishReason, Request, RequestStatus, SamplingParams
from rimuru_cli.engine.sampler import SamplerState, sample
from rimuru_cli.engine.scheduler import ScheduledRows, Scheduler
from rimuru_cli.engine.sequence import Sequence as TokenSequence
from rimuru_cli.engine.stats import AdjusterEvent, EngineInfo, Snapshot
from rimuru_models.errors import DoesNotFitError, UsageError

_KEPT_EVENTS = 64
_LONGER = {
    "that is the model's own context": "Shorten the prompt, or start anew with /clear.",
    "that is the context that was set": "Give a larger --context, shorten the prompt, or start anew with /clear.",
    "the memory ceiling allows no more": "Give more --memory, shorten the prompt, or start anew with /clear.",
}


@dataclass(frozen=True)
class TokenOutput:
    """One sampled token of a request, or the end of it.

    Attributes:
        token_id: the token; None when the request ended without one (end-of-answer token, cancellation).
        finish_reason: set on the last output of a request.
    """

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None


@dataclass
class _Clock:
    submitted: float
    started: float | None = None
    first_token: float | None = None


class Engine:
    """Runs one model over one page pool.

    Attributes:
        info: what was loaded.
        eos_ids: tokens that end an answer; read from the checkpoint, may be added to.
    """

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self._parts = parts
        self._config = config
        self.info: EngineInfo = parts.info
        self.eos_ids: frozenset[int] = parts.eos_ids
        self._allocator = parts.pool.allocator
        self._kv_per_block = parts.plan.geometry.layout(PageKind.KV).per_parent
        self._scheduler = Scheduler(
            parts.blocks,
            self._available_pages,
            self._make_room,
            max_batch_tokens=parts.plan.max_batch_tokens,
            max_sequences=config.max_sequences,
        )
        self._sequences: dict[int, TokenSequence] = {}
        self._samplers: dict[int, SamplerState] = {}
        self._clocks: dict[int, _Clock] = {}
        self._ids = itertools.count(1)
        self._steps = 0
        self._events: deque[AdjusterEvent] = deque(maxlen=_KEPT_EVENTS)
        self._closed = False

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig | None = None, progress: Progress | None = None) -> Engine:
        """Open a checkpoint folder and make it ready to answer.

        Raises:
            CheckpointError, NotFoundError: the folder holds no usable checkpoint.
            DoesNotFitError: the memory ceiling is too small; says the minimum.
        """
        config = config or EngineConfig()
        return cls(load_parts(Path(model_dir), config, progress), config)

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows: 0 to this, exclusive."""
        return self._parts.model.config.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt.

        Raises:
            UsageError: an empty prompt or token ids outside the vocabulary.
            DoesNotFitError: the prompt leaves no room for an answer in the context that model and pool allow.
        """
        vocab = self._parts.model.config.vocab_size
        prompt = tuple(int(t) for t in prompt_ids)
        if not prompt:
            raise UsageError("The prompt is empty.", hint="Write something to answer.")
        if any(not 0 <= t < vocab for t in prompt):
            raise UsageError(
                f"The prompt contains token ids outside the model's vocabulary of {vocab}.", hint="Check that the tokenizer fits the model."
            )
        limit = self.info.context_limit
        if len(prompt) >= limit:
            raise DoesNotFitError(_too_long(len(prompt), self.info), hint=_LONGER[self.info.context_reason])
        request = Request(next(self._ids), prompt, params)
        request.timings.prompt_tokens = len(prompt)
        longest = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
        sequence = TokenSequence(request, list(prompt), longest)
        self._sequences[request.id] = sequence
        self._samplers[request.id] = SamplerState(params, prompt, device=self._parts.device)
        self._clocks[request.id] = _Clock(time.perf_counter())
        self._scheduler.add(sequence)
        return request

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Compute one batch and return the tokens it produced; an empty list if there was nothing to do or only prompts were computed."""
        parts = self._parts
        parts.residency.commit()
        plan = self._scheduler.schedule()
        if not plan:
            return []
        self._adjust(required_blocks=0)
        now = time.perf_counter()
        for rows in plan:
            clock = self._clocks[rows.sequence.request.id]
            if clock.started is None:
                clock.started = now
                rows.sequence.request.timings.cached_tokens = rows.sequence.computed
        logits = parts.runner.forward(plan)
        sampling = [rows.sequence for rows in plan if rows.samples]
        tokens = [] if logits is None else sample(logits, [self._samplers[s.request.id] for s in sampling])
        # Only now, so that a step that fails can be tried again: a sequence whose newest token is computed always has a next one.
        self._count_rows(plan)
        self._steps += 1
        return [self._accept(sequence, token) for sequence, token in zip(sampling, tokens, strict=True)]

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[int]:
        """Tokens of one answer as they come; closing the iterator cancels the request."""
        request = self.submit(prompt_ids, params)
        try:
            while request.finish_reason is None:
                for output in self.step():
                    if output.request is request and output.token_id is not None:
                        yield output.token_id
        finally:
            self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are kept for reuse or freed. Does nothing if it ended already."""
        sequence = self._sequences.get(request.id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Tell `recorder` what the routers choose while the block runs, from a state without prompts kept for reuse."""
        self._parts.blocks.evict(self._parts.blocks.idle_pages)
        self._parts.experts.recorder = recorder
        try:
            yield
        finally:
            self._parts.experts.recorder = None

    def snapshot(self) -> Snapshot:
        """The pool's composition and the counters right now."""
        parts = self._parts
        residency, experts = parts.residency, parts.experts
        owned = {kind.value: size for kind, size in self._allocator.bytes_by_kind().items()}
        buffers = parts.buffers.num_pages * parts.plan.geometry.expert_page_bytes
        owned["expert"] = owned.get("expert", 0) - buffers
        owned["buffer"] = buffers
        return Snapshot(
            step=self._steps,
            pool_bytes=parts.plan.pool,
            free_bytes=self._allocator.free_bytes,
            tail_bytes=self._allocator.tail_bytes,
            bytes_by_kind=owned,
            cached_kv_bytes=parts.blocks.idle_pages * parts.plan.geometry.kv_page_bytes,
            resident_experts=residency.num_resident,
            total_experts=residency.total,
            resident_by_layer=tuple(residency.counts),
            expert_uses=experts.uses,
            expert_hits=experts.hits,
            expert_bytes_read=parts.host.bytes_read,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            context_tokens=sum(len(s.tokens) for s in self._sequences.values()),
            preemptions=self._scheduler.preemptions,
            events=tuple(self._events),
        )

    def check_integrity(self) -> None:
        """All tables agree: allocator, resident experts, loading buffers, token blocks. Raises AssertionError otherwise."""
        self._allocator.check_integrity()
        self._parts.residency.check_integrity()
        held = {id(b): b for s in self._sequences.values() for b in s.blocks}
        kv_pages = sum(len(b.pages) for b in held.values()) + self._parts.blocks.idle_pages
        assert kv_pages == self._allocator.owned(PageKind.KV), (
            f"{kv_pages} KV pages are known, {self._allocator.owned(PageKind.KV)} are owned"
        )
        ours = self._parts.residency.num_resident * self._parts.residency.pages_per_expert + self._parts.buffers.num_pages
        assert ours == self._allocator.owned(PageKind.EXPERT), (
            f"{ours} expert pages are known, {self._allocator.owned(PageKind.EXPERT)} are owned"
        )

    def close(self) -> None:
        """End all requests and give every page back. The engine cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        parts = self._parts
        try:
            for sequence in list(self._sequences.values()):
                self._finish(sequence, "cancelled")
            parts.blocks.evict(parts.blocks.idle_pages)
            parts.residency.close()
            parts.buffers.close()
        finally:
            # Whatever a torn step left behind: thread and files are given up.
            parts.loader.close()
            parts.host.close()
            parts.reader.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _kv_allowance(self) -> int:
        """KV pages that may still be taken before experts at their floor and loading buffers would not fit beside them."""
        return self._parts.plan.kv_pages - self._allocator.owned(PageKind.KV)

    def _available_pages(self) -> int:
        return min(self._allocator.available(PageKind.KV), self._kv_allowance())

    def _make_room(self, num_pages: int) -> bool:
        """Retire experts until `num_pages` KV pages are free; changes nothing and returns False if the floor does not allow it."""
        residency = self._parts.residency
        lacking = num_pages - self._allocator.available(PageKind.KV)
        if num_pages > self._kv_allowance() or lacking > residency.shrinkable * residency.pages_per_expert * self._kv_per_block:
            return False
        while lacking > 0:
            self._adjust(required_blocks=-(-lacking // self._kv_per_block))
            lacking = num_pages - self._allocator.available(PageKind.KV)
        return True

    def _adjust(self, required_blocks: int) -> None:
        residency = self._parts.residency
        stats = AdjusterStats(
            required_blocks=required_blocks,
            free_blocks=self._allocator.available(PageKind.EXPERT),
            pages_per_expert=residency.pages_per_expert,
            shrinkable=residency.shrinkable,
            expandable=residency.expandable,
        )
        decision = self._config.adjuster(stats)
        # Whatever the policy, a sequence that needs pages gets them while experts are above the floor, and no expert takes them back.
        shrink = max(decision.shrink, 1 if required_blocks > 0 else 0)
        expand = 0 if shrink else max(decision.expand, 0)
        shrunk = residency.shrink(shrink) if shrink else 0
        expanded = residency.expand(expand) if expand else 0
        if shrunk or expanded:
            self._events.append(AdjusterEvent(self._steps, shrunk, expanded, decision.reason, stats.required_blocks, stats.free_blocks))

    def _count_rows(self, plan: Sequence[ScheduledRows]) -> None:
        row_hits = self._parts.experts.row_hits
        uses = self._parts.host.num_layers * self.info.top_k
        start = 0
        for rows in plan:
            request = rows.sequence.request
            request.expert_uses += rows.count * uses
            request.expert_hits += int(row_hits[start : start + rows.count].sum())
            request.timings.computed_tokens += rows.count
            rows.sequence.computed += rows.count
            start += rows.count

    def _accept(self, sequence: TokenSequence, token: int) -> TokenOutput:
        request, now = sequence.request, time.perf_counter()
        clock, timings = self._clocks[request.id], request.timings
        assert clock.started is not None
        if clock.first_token is None:
            clock.first_token = now
            timings.prompt_seconds = now - clock.started
            timings.ttft_seconds = now - clock.submitted
        timings.generation_seconds = now - clock.first_token
        if token in self.eos_ids and not request.params.ignore_eos:
            self._finish(sequence, "stop")
            return TokenOutput(request, None, "stop")
        sequence.tokens.append(token)
        request.output_ids.append(token)
        timings.generated_tokens += 1
        if len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, "length")
        return TokenOutput(request, token, request.finish_reason)

    def _finish(self, sequence: TokenSequence, reason: FinishReason) -> None:
        request = sequence.request
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        self._scheduler.remove(sequence)
        del self._sequences[request.id], self._samplers[request.id], self._clocks[request.id]


def _too_long(prompt_tokens: int, info: EngineInfo) -> str:
    return (
        f"The prompt has {prompt_tokens} tokens, but at most {info.context_limit} tokens of prompt and answer fit: {info.context_reason}."
    )
