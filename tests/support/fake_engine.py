"""An engine and a tokenizer without torch: every token is one UTF-8 byte, and the answer is whatever the test says."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rimuru_cli.engine.reasoning import TextDelta
from rimuru_cli.engine.request import FinishReason, Request, RequestStatus, SamplingParams
from rimuru_cli.engine.stats import EngineInfo, Snapshot
from rimuru_models.errors import DoesNotFitError, UsageError

END = -1


@dataclass(frozen=True)
class FakeOutput:
    """What a step produced."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class FakeChange:
    """What another ceiling changed."""

    text: str

    def summary(self) -> str:
        """In one sentence."""
        return self.text


@dataclass
class FakeEngine:
    """Answers with `reply(prompt)`, one byte a step.

    Attributes:
        reply: from the prompt's text to the answer's.
        step_seconds: how long a step takes.
        fail_at: the step number at which the engine raises RuntimeError.
        piece_tokens: how many tokens of a prompt a step reads; None: it takes no step at all.
    """

    reply: Callable[[str], str] = lambda prompt: "Hello there."
    context_limit: int = 4096
    step_seconds: float = 0.0
    fail_at: int | None = None
    piece_tokens: int | None = None
    notices: tuple[str, ...] = ()
    submitted: list[tuple[str, SamplingParams]] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    closed: bool = False
    memory_bytes: int = 1 << 30
    steps: int = 0
    in_step: bool = False
    _running: dict[int, tuple[Request, list[int]]] = field(default_factory=dict)

    @property
    def info(self) -> EngineInfo:
        """A made-up model."""
        return EngineInfo(
            model="fake-model",
            architecture="FakeForCausalLM",
            num_layers=4,
            num_moe_layers=4,
            num_experts=8,
            top_k=2,
            context_limit=self.context_limit,
            model_context=max(8192, self.context_limit),
            context_reason="the memory ceiling allows no more",
            device="cpu",
            backend_reason="no GPU",
            weight_dtype="bfloat16",
            memory_bytes=self.memory_bytes,
            pool_bytes=1000,
            dense_bytes=1 << 20,
            workspace_bytes=1 << 20,
            page_bytes=256,
            expert_bytes=768,
            block_tokens=16,
            notices=self.notices,
        )

    @property
    def has_work(self) -> bool:
        """Whether a request runs."""
        return bool(self._running)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt of bytes."""
        if not prompt_ids:
            raise UsageError("The prompt is empty.")
        if len(prompt_ids) >= self.context_limit:
            raise DoesNotFitError(
                f"The prompt has {len(prompt_ids)} tokens, but at most {self.context_limit} tokens of prompt and answer fit.",
                hint="Start anew with /clear.",
            )
        text = bytes(prompt_ids).decode("utf-8", "replace")
        self.submitted.append((text, params))
        request = Request(len(self.submitted), tuple(prompt_ids), params)
        request.timings.prompt_tokens = len(prompt_ids)
        request.timings.computed_tokens = len(prompt_ids) if self.piece_tokens is None else 0
        request.timings.prompt_seconds = request.timings.ttft_seconds = 0.5
        self._running[request.id] = (request, [*self.reply(text).encode("utf-8"), END])
        return request

    def step(self) -> list[FakeOutput]:
        """One byte for every request."""
        assert not self.in_step, "the last step was torn"
        self.in_step = True
        self.steps += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.steps == self.fail_at:
            self.in_step = False
            raise RuntimeError("the fake engine broke")
        outputs = []
        for request, tokens in list(self._running.values()):
            timings = request.timings
            if self.piece_tokens is not None and timings.computed_tokens < timings.prompt_tokens:
                timings.computed_tokens = min(timings.prompt_tokens, timings.computed_tokens + self.piece_tokens)
                if timings.computed_tokens < timings.prompt_tokens:
                    continue
            token = tokens.pop(0)
            if token == END:
                self._finish(request, "stop")
                outputs.append(FakeOutput(request, None, "stop"))
                continue
            request.output_ids.append(token)
            request.expert_uses += 8
            request.expert_hits += 6
            request.timings.generated_tokens += 1
            request.timings.generation_seconds += 0.1
            longest = request.params.max_tokens
            if len(request.output_ids) == longest or request.num_tokens >= self.context_limit:
                self._finish(request, "length")
            outputs.append(FakeOutput(request, token, request.finish_reason))
        self.in_step = False
        return outputs

    def cancel(self, request: Request) -> None:
        """End a request."""
        if request.id in self._running:
            self.cancelled.append(request)
            self._finish(request, "cancelled")

    def snapshot(self) -> Snapshot:
        """A pool of 1000 bytes: 60 % experts, 10 % buffers, 10 % KV, 20 % free."""
        return Snapshot(
            step=self.steps,
            pool_bytes=1000,
            free_bytes=200,
            tail_bytes=0,
            bytes_by_kind={"expert": 600, "buffer": 100, "kv": 100, "ssm": 0, "conv": 0},
            cached_kv_bytes=50,
            resident_experts=16,
            total_experts=32,
            resident_by_layer=(4, 4, 4, 4),
            expert_uses=100,
            expert_hits=75,
            expert_bytes_read=768,
            running=len(self._running),
            waiting=0,
            context_tokens=0,
            preemptions=0,
        )

    def set_memory(self, ceiling_bytes: int) -> FakeChange:
        """Nothing below 512 MiB."""
        if ceiling_bytes < self.least_memory:
            raise DoesNotFitError("The model needs a memory ceiling of at least 512 MiB.", hint="Give at least 512MiB.")
        self.memory_bytes = ceiling_bytes
        return FakeChange(f"The memory ceiling is {ceiling_bytes >> 20:,} MiB now.")

    @property
    def least_memory(self) -> int:
        """The smallest ceiling."""
        return 1 << 29

    def close(self) -> None:
        """Nothing may run afterwards."""
        self.closed = True

    def _finish(self, request: Request, reason: FinishReason) -> None:
        del self._running[request.id]
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED


@dataclass
class FakeReader:
    """Bytes to text; '<think>' ... '</think>' at the start is reasoning; stop strings end the answer."""

    stop: tuple[str, ...] = ()
    stopped: bool = False
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _seen: str = ""
    _sent: dict[str, int] = field(default_factory=lambda: {"reasoning": 0, "text": 0})

    def feed(self, token_id: int) -> list[TextDelta]:
        """Take one byte."""
        self._seen += self._decoder.decode(bytes([token_id]))
        for stop in self.stop:
            if stop in self._seen:
                self._seen = self._seen.partition(stop)[0]
                self.stopped = True
        return self._new(done=self.stopped)

    def finish(self) -> list[TextDelta]:
        """Give what was held back."""
        self._seen += self._decoder.decode(b"", final=True)
        return self._new(done=True)

    def _new(self, *, done: bool) -> list[TextDelta]:
        reasoning, text = "", self._seen
        if self._seen.startswith("<think>"):
            reasoning, _, text = self._seen[7:].partition("</think>")
        elif "<think>".startswith(self._seen) and not done:
            return []
        held = 0 if done else max([8 if reasoning and not text else 0, *(len(stop) - 1 for stop in self.stop)])
        pieces = []
        for kind, whole in (("reasoning", reasoning), ("text", text)):
            upto = max(self._sent[kind], len(whole) - held)
            if whole[self._sent[kind] : upto]:
                pieces.append(TextDelta("reasoning" if kind == "reasoning" else "content", whole[self._sent[kind] : upto]))
            self._sent[kind] = upto
        return pieces


@dataclass
class FakeSpeech:
    """A template of '<role>content' lines over bytes; what it was given is kept in `rendered`."""

    can_think: bool = False
    refuses_system: bool = False
    rendered: list[tuple[list[dict[str, str]], bool | None]] = field(default_factory=list)

    def render(self, messages: list[dict[str, str]], *, think: bool | None, answer_next: bool = True) -> str:
        """Lay the messages out."""
        if self.refuses_system and messages[0]["role"] == "system":
            raise UsageError("The chat template of fake-model refuses this conversation: no system role")
        self.rendered.append(([dict(message) for message in messages], think))
        lines = [f"<{message['role']}>{message['content']}\n" for message in messages]
        return "".join(lines) + ("<assistant>" if answer_next else "")

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Bytes of the text."""
        return list(text.encode("utf-8", "surrogatepass"))

    def reader(self, prompt: str, params: SamplingParams, *, raw: bool = False) -> FakeReader:
        """A fresh reader."""
        return FakeReader(params.stop)

    def sampling(self, overrides: dict[str, Any]) -> SamplingParams:
        """The model's own settings are temperature 0.7 and top-p 0.9."""
        return SamplingParams(**{"temperature": 0.7, "top_p": 0.9, **overrides})
