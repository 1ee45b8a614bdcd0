"""The engine: one model, one page pool, one clock.

    step():  commit loaded experts -> schedule (take pages) -> adjust (experts <-> free blocks) -> forward -> sample -> reclaim

Pages change owners between forward passes only, so nothing is read while it is given away. One thread steps; a publisher may look on, and
change the ceiling, from another between two steps.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rimuru_cli.engine.alike import TOKEN, Around, take
from rimuru_cli.engine.ceiling import MemoryChange, Running, described, least_ceiling, replan, shrink_pool
from rimuru_cli.engine.config import EngineConfig, Progress
from rimuru_cli.engine.counting import Clock, count_alike, count_rows
from rimuru_cli.engine.experts.adjuster import AdjusterStats
from rimuru_cli.engine.experts.executor import Recorder
from rimuru_cli.engine.hybrid_scheduler import HybridScheduler
from rimuru_cli.engine.loading import load_parts
from rimuru_cli.engine.memory.geometry import PageKind
from rimuru_cli.engine.parts import Parts
from rimuru_cli.engine.pictures import snapshot_of, tally_of
from rimuru_cli.engine.request import FinishReason, Request, RequestStatus, SamplingParams
from rimuru_cli.engine.sampler import SamplerState, sample
from rimuru_cli.engine.scheduler import ScheduledRows, Scheduler
from rimuru_cli.engine.sequence import Sequence as TokenSequence
from rimuru_cli.engine.stats import CEILING_LOWERED, AdjusterEvent, EngineInfo, Snapshot, Tally, Work
from rimuru_cli.engine.table_checks import check_tables
from rimuru_cli.engine.telemetry.collect import Watched
from rimuru_cli.engine.telemetry.publish import Publisher
from rimuru_cli.engine.turns import in_turn, undisturbed
from rimuru_cli.engine.worth import Worth
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


class Engine:
    """Runs one model over one page pool.

    Attributes:
        info: what was loaded.
        eos_ids: tokens that end an answer; read from the checkpoint, may be added to.
    """

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self._parts = parts
        self._now = parts.clock
        self._config = config
        self.info: EngineInfo = parts.info
        self.eos_ids: frozenset[int] = parts.eos_ids
        self._allocator = parts.pool.allocator
        self._uses_per_row = parts.host.num_layers * parts.info.top_k
        self._kv_per_block = parts.plan.geometry.layout(PageKind.KV).per_parent
        self._scheduler = self._make_scheduler()
        self._sequences: dict[int, TokenSequence] = {}
        self._samplers: dict[int, SamplerState] = {}
        self._clocks: dict[int, Clock] = {}
        self._ids = itertools.count(1)
        self._work = Work(captured_rows=parts.captured_rows)
        self._worth = Worth(parts, config.admission, self._work, self._scheduler)
        self._turn = threading.RLock()
        self._publisher: Publisher | None = None
        self._events: deque[AdjusterEvent] = deque(maxlen=_KEPT_EVENTS)
        self._watched = Watched(lambda: self.info, self._parts, self._scheduler, self._work, self._events)
        self._closed = False

    def _make_scheduler(self) -> Scheduler:
        parts, recurrent = self._parts, self._parts.recurrent
        limits = {"max_batch_tokens": parts.plan.max_batch_tokens, "max_sequences": self._config.max_sequences}

        def worth(blocks: int, joins: bool) -> bool:
            return self._worth.of(blocks, joins=joins)

        if recurrent is None:
            return Scheduler(parts.blocks, self._available_pages, self._make_room, worth, **limits)
        recurrent.room.adjust, recurrent.room.crowded = self._adjust, lambda: self._worth.crowded
        return HybridScheduler(parts.blocks, recurrent.states, recurrent.bookmarks, recurrent.room, worth, **limits)

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

    @in_turn
    @undisturbed()
    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt.

        Raises:
            UsageError: an empty prompt or token ids outside the vocabulary, or the engine is closed.
            DoesNotFitError: the prompt leaves no room for an answer in the context that model and pool allow.
        """
        if self._closed:
            raise UsageError("The engine is closed, so it answers nothing any more.")
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
        # Without an end of its own it goes as far as the ceiling of that time allows, see `_accept`.
        furthest = min(self.info.model_context, self._config.context or self.info.model_context)
        longest = furthest if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
        sequence = TokenSequence(request, list(prompt), longest)
        self._sequences[request.id] = sequence
        self._samplers[request.id] = SamplerState(params, prompt, device=self._parts.device)
        self._clocks[request.id] = Clock(self._now())
        self._scheduler.add(sequence)
        return request

    @in_turn
    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Compute one batch and return the tokens it produced; an empty list if there was nothing to do or only prompts were computed."""
        began, runner = self._now(), self._parts.runner
        outputs: list[TokenOutput] | None = None
        with undisturbed():
            plan = self._plan()
        if not plan:
            return []
        sampling = [rows.sequence for rows in plan if rows.samples]
        try:
            logits = runner.forward(plan)
            states = [self._samplers[s.request.id] for s in sampling]
            # Random numbers that are drawn belong to tokens that are kept, or a Ctrl-C in between would change the text.
            with undisturbed():
                tokens = [] if logits is None else sample(logits, states, runner.launch_ahead)
                # Only now, so that a step that fails can be tried again: a sequence whose newest token is computed always has a next one.
                count_rows(plan, self._parts.experts.row_hits, self._uses_per_row, self._work)
                self._scheduler.computed(plan)
                now = self._now()
                outputs = [self._accept(sequence, token, now) for sequence, token in zip(sampling, tokens, strict=True)]
        except BaseException:
            if outputs is None:
                with undisturbed():
                    self._scheduler.torn(plan)
            raise
        self._work.add_step(self._now() - began)
        if self._publisher is not None:
            self._publisher.stepped()
        return outputs

    @in_turn
    @undisturbed()
    @torch.inference_mode()
    def steps_alike(self, told: Callable[[list[TokenOutput]], bool]) -> list[Request]:
        """Take more steps as long as each is like the last one; only in simulations, elsewhere none. See `alike.take`."""
        parts, scheduler = self._parts, self._scheduler
        if parts.repeats is None or self._publisher is not None or len(scheduler.running) >= parts.plan.max_batch_tokens:
            return []
        around = Around(
            begin=self._begin,
            adjust=lambda: self._adjust(required_blocks=0),
            end=lambda rows, began: self._work.add_tokens(0, rows, self._now() - began),
            put_down=self._put_down,
            accept=lambda sequence, token: self._accept(sequence, token, self._now()),
        )
        size, longest = parts.blocks.block_tokens, self.info.context_limit
        return take(around, scheduler, parts.repeats, told, block_tokens=size, longest=longest)

    def _begin(self) -> float:
        """Make experts visible that have arrived; returns the time before."""
        began, residency = self._now(), self._parts.residency
        waited = residency.waited
        residency.commit()
        self._handed_over(0, began, waited)
        return began

    def _plan(self) -> list[ScheduledRows]:
        """The rows of the next step, their pages taken and experts moved as it is best for them."""
        self._begin()
        plan = self._scheduler.schedule()
        if not plan:
            return []
        self._adjust(required_blocks=0)
        now = self._now()
        for rows in plan:
            clock = self._clocks[rows.sequence.request.id]
            if clock.started is None:
                clock.started = now
                rows.sequence.request.timings.cached_tokens = rows.sequence.computed
        return plan

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

    @in_turn
    @undisturbed()
    def cancel(self, request: Request) -> None:
        """End a request now; its pages are kept for reuse or freed. Does nothing if it ended already."""
        sequence = self._sequences.get(request.id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    def publish(self, publisher: Publisher) -> None:
        """Let dashboards of this user look on until the engine is closed.

        Raises:
            OSError: they cannot (no folder, no room); the engine is as before.
        """
        if self._publisher is not None:
            self._publisher.close()
        publisher.open(self._watched, self._turn, lambda ceiling: self.set_memory(ceiling).summary())
        self._publisher = publisher

    @in_turn
    @undisturbed()
    @torch.inference_mode()
    def set_memory(self, ceiling_bytes: int) -> MemoryChange:
        """Change the memory ceiling between two steps, also in the middle of answers; what they say does not change.

        A lower ceiling gives memory back to the driver or the system: experts leave the pool, and what lies at its end moves. A higher one
        takes memory, up to what the machine has, and experts come in with the next steps. `info` follows. An answer without a
        `max_tokens` of its own ends where the context that the new ceiling allows is full; others keep what they were promised.

        Raises:
            UsageError: not a positive number, or the engine is closed.
            DoesNotFitError: too little for the model or for what is running (says the least that is enough), or more than the machine has;
                nothing has changed.
        """
        if self._closed:
            raise UsageError("The engine is closed, so its memory cannot be changed.")
        began, parts = self._now(), self._parts
        plan = replan(parts, self._config, ceiling_bytes, self._running())
        before, pool = parts.plan, parts.pool
        retired = moved = evicted = returned = taken = 0
        held = pool.committed_bytes
        if plan.pool < pool.num_bytes:
            retired, moved, evicted, returned = shrink_pool(parts, plan.pool)
        elif plan.pool > pool.num_bytes:
            try:
                pool.grow(plan.pool)
            except MemoryError as error:
                raise DoesNotFitError(
                    f"There is not enough memory for this ceiling ({error}); nothing has changed.",
                    hint="Close other programs, or give less.",
                ) from error
            taken = pool.committed_bytes - held
        parts.plan = plan
        self.info = described(self.info, parts, self._config, plan)
        if retired:
            free = self._allocator.available(PageKind.EXPERT)
            self._events.append(AdjusterEvent(self._work.steps, retired, 0, CEILING_LOWERED, 0, free, time.time()))
            self._work.adjustments += 1
        return MemoryChange(
            memory_before=before.ceiling,
            memory_bytes=plan.ceiling,
            pool_before=before.pool,
            pool_bytes=plan.pool,
            returned_bytes=returned,
            taken_bytes=taken,
            retired_experts=retired,
            moved_bytes=moved,
            evicted_tokens=evicted,
            context_limit=plan.context,
            seconds=self._now() - began,
        )

    @in_turn
    @undisturbed()
    def forget(self) -> None:
        """Give up all text that is kept only for reuse: the next prompts are computed from their first token."""
        self._forget_kept()

    @property
    def least_memory(self) -> int:
        """The smallest ceiling in bytes that `set_memory` would accept now."""
        with self._turn:
            return least_ceiling(self._parts, self._config, self._running())

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Tell `recorder` what the routers choose while the block runs, from a state without prompts kept for reuse."""
        self._forget_kept()
        self._parts.experts.recorder = recorder
        try:
            yield
        finally:
            self._parts.experts.recorder = None

    @in_turn
    def snapshot(self) -> Snapshot:
        """The pool's composition and the counters right now."""
        return snapshot_of(self._watched)

    def tally(self) -> Tally:
        """What `snapshot` says that changes with every step, at a tenth of the cost. Only for the thread that steps."""
        return tally_of(self._watched)

    @in_turn
    def check_integrity(self) -> None:
        """All tables agree: allocator, resident experts, loading buffers, token blocks. Raises AssertionError otherwise."""
        check_tables(self._parts, list(self._sequences.values()))

    def close(self) -> None:
        """End all requests and give every page back. The engine cannot be used afterwards."""
        if self._publisher is not None:
            self._publisher.close()
        self._give_everything_back()

    @in_turn
    def _give_everything_back(self) -> None:
        if self._closed:
            return
        self._closed = True
        parts = self._parts
        try:
            for sequence in list(self._sequences.values()):
                self._finish(sequence, "cancelled")
            self._forget_kept()
            parts.residency.close()
            parts.buffers.close()
        finally:
            # Whatever a torn step left behind: threads and files are given up.
            parts.experts.close()
            parts.loader.close()
            parts.host.close()
            parts.reader.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _forget_kept(self) -> None:
        """Give up everything that is kept only for reuse."""
        if self._parts.recurrent is not None:
            self._parts.recurrent.bookmarks.forget_all()
        self._parts.blocks.evict(self._parts.blocks.idle_pages)

    def _running(self) -> Running:
        """What has to go on: pages that are held, and the longest text that was promised; without `max_tokens`, what there is so far."""
        longest = [s.limit if s.request.params.max_tokens is not None else len(s.tokens) + 1 for s in self._sequences.values()]
        recurrent = self._parts.recurrent
        if recurrent is not None:
            held, states = recurrent.room.held()
            return Running(held, max(longest, default=0), states)
        held = self._allocator.owned(PageKind.KV) - self._parts.blocks.idle_pages
        return Running(kv_pages=held, tokens=max(longest, default=0))

    def _kv_allowance(self) -> int:
        """KV pages that may still be taken before experts at their floor and loading buffers would not fit beside them."""
        return self._parts.plan.kv_pages - self._allocator.owned(PageKind.KV)

    def _available_pages(self) -> int:
        return min(self._allocator.available(PageKind.KV), self._kv_allowance())

    def _make_room(self, num_pages: int) -> bool:
        """Retire experts until `num_pages` KV pages are free; changes nothing and returns False if the floor does not allow it."""
        residency, lent = self._parts.residency, self._parts.lent
        lacking = num_pages - self._allocator.available(PageKind.KV)
        beyond = lacking - residency.shrinkable_pages * self._kv_per_block
        if num_pages > self._kv_allowance() or beyond > (lent.num_pages * self._kv_per_block if lent is not None else 0):
            return False
        if beyond > 0 and lent is not None:
            # Loading buffers take what is free, also more than the least that is set aside for them.
            lent.close()
            lacking = num_pages - self._allocator.available(PageKind.KV)
        while lacking > 0:
            self._adjust(required_blocks=-(-lacking // self._kv_per_block))
            lacking = num_pages - self._allocator.available(PageKind.KV)
        return True

    def _adjust(self, required_blocks: int) -> None:
        residency, began = self._parts.residency, self._now()
        waited = residency.waited
        spare = self._worth.spare_blocks()
        stats = AdjusterStats(
            required_blocks=required_blocks,
            free_blocks=self._allocator.available(PageKind.EXPERT) + spare,
            pages_per_expert=residency.pages_per_expert,
            shrinkable=residency.shrinkable,
            expandable=residency.expandable,
        )
        decision = self._config.adjuster(stats)
        # Whatever the policy, a sequence that needs pages gets them while experts are above the floor, and no expert takes them back.
        shrink = max(decision.shrink, 1 if required_blocks > 0 else 0)
        # Nor are experts put aside for sequences that would not be given them.
        if shrink and required_blocks == 0 and not self._worth.of_youngest():
            shrink = 0
        expand = 0 if shrink else max(decision.expand, 0)
        if not shrink and not expand:
            return
        owned = residency.owned_pages
        shrunk = residency.shrink(shrink) if shrink else 0
        if expand and spare:
            self._worth.evict_for(expand)
        expanded = residency.expand(expand) if expand else 0
        if shrunk or expanded:
            handed_over = abs(residency.owned_pages - owned) * self._parts.plan.geometry.expert_page_bytes
            self._handed_over(handed_over, began, waited)
            blocks = stats.required_blocks, stats.free_blocks
            self._events.append(AdjusterEvent(self._work.steps, shrunk, expanded, decision.reason, *blocks, time.time()))
            self._work.adjustments += 1

    def _handed_over(self, num_bytes: int, began: float, waited: float) -> None:
        """Count pages that changed hands since `began`; while the device was busy with what was queued before, nothing stood still."""
        self._work.add_handover(num_bytes, self._now() - began - (self._parts.residency.waited - waited))

    def _put_down(self, sequence: TokenSequence, steps: int, tokens: int, hits: int) -> None:
        """Count steps that were alike for one sequence, and the tokens that it got in them."""
        first = self._clocks[sequence.request.id].first_token
        assert first is not None, "who answers has got a token"
        sequence.request.timings.generation_seconds = self._now() - first
        count_alike(sequence, steps, [TOKEN] * tokens, hits, uses=steps * self._uses_per_row)

    def _accept(self, sequence: TokenSequence, token: int, now: float) -> TokenOutput:
        request = sequence.request
        clock, timings = self._clocks[request.id], request.timings
        assert clock.started is not None
        if clock.first_token is None:
            clock.first_token = now
            timings.prompt_seconds = now - clock.started
            timings.ttft_seconds = self._work.ttft_seconds = now - clock.submitted
        timings.generation_seconds = now - clock.first_token
        if token in self.eos_ids and not request.params.ignore_eos:
            self._finish(sequence, "stop")
            return TokenOutput(request, None, "stop")
        sequence.tokens.append(token)
        request.output_ids.append(token)
        timings.generated_tokens += 1
        # A ceiling that was lowered meanwhile may allow less than when the request came.
        if len(sequence.tokens) >= min(sequence.limit, self.info.context_limit):
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
