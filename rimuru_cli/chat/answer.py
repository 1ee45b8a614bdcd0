"""One answer: steps of the engine turned into pieces of text, until the model ends, a stop string comes, or somebody stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rimuru_cli.engine.reasoning import TextDelta
    from rimuru_cli.engine.request import Request, SamplingParams, Timings
    from rimuru_cli.engine.stats import EngineInfo, Snapshot


class TokenOutput(Protocol):
    """What a step produced for one request."""

    @property
    def request(self) -> Request:
        """The request that the token belongs to."""
        ...

    @property
    def token_id(self) -> int | None:
        """The new token, or None if the request ended without one."""
        ...


class MemoryAnswer(Protocol):
    """What another memory ceiling changed."""

    def summary(self) -> str:
        """What happened, in one sentence."""
        ...


class EngineLike(Protocol):
    """What talking needs of an engine; `rimuru_cli.engine.engine.Engine` is one."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        ...

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request. Raises DoesNotFitError or UsageError."""
        ...

    def step(self) -> Sequence[TokenOutput]:
        """Compute one step."""
        ...

    def cancel(self, request: Request) -> None:
        """End a request and free its pages."""
        ...

    def snapshot(self) -> Snapshot:
        """The pool's composition now."""
        ...

    def set_memory(self, ceiling_bytes: int) -> MemoryAnswer:
        """Change the memory ceiling. Raises DoesNotFitError or UsageError."""
        ...

    @property
    def least_memory(self) -> int:
        """The smallest ceiling that would be accepted now, in bytes."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class PieceReader(Protocol):
    """Turns tokens into pieces of text: detokenises, splits reasoning off, finds stop strings; see `engine.text.TextStream`."""

    def feed(self, token_id: int) -> Sequence[TextDelta]:
        """Take one token; return what became certain."""
        ...

    def finish(self) -> Sequence[TextDelta]:
        """Return what was held back."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: nothing after it belongs to the answer."""
        ...


@dataclass
class Answer:
    """A finished answer (text and reasoning without stop strings and special tokens).

    Attributes:
        finish_reason: "stop" (the model ended or a stop string came), "length" (max_tokens or the context), "cancelled" (Ctrl-C).
        hit_rate: share of expert selections of this answer that found their expert resident; None if there were none.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    timings: Timings
    hit_rate: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values, as `run --json` prints them."""
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "timings": asdict(self.timings),
            "expert_hit_rate": self.hit_rate,
        }


@dataclass
class AnswerStream:
    """Iterate it for the pieces; afterwards `answer` holds the whole.

    Args:
        engine: the engine; nobody else steps it meanwhile.
        request: a request that was just submitted.
        reader: turns its tokens into pieces.
        stop_now: looked at before every step; when true the request is cancelled and the answer ends there.
        reading: told (tokens of the prompt that are read, all of them) after each step that left some unread.
    """

    engine: EngineLike
    request: Request
    reader: PieceReader
    stop_now: Callable[[], object]
    reading: Callable[[int, int], None] | None = None
    _pieces: list[TextDelta] = field(default_factory=list)

    def __iter__(self) -> Iterator[TextDelta]:
        torn = False
        try:
            while self.request.finish_reason is None and not self.reader.stopped and not self.stop_now():
                assert self.engine.has_work, "the engine has no work, but the request is not finished"
                for output in self.engine.step():
                    if output.request is self.request and output.token_id is not None:
                        yield from self._keep(self.reader.feed(output.token_id))
                self._tell_progress()
            yield from self._keep(self.reader.finish())
        except (KeyboardInterrupt, SystemExit):
            torn = True  # maybe in the middle of a step: the process is leaving, and the engine must not be touched again
            raise
        finally:
            # Also when the reader of the pieces went away, or a step failed: no page may stay behind.
            if self.request.finish_reason is None and not torn:
                self.engine.cancel(self.request)

    def _tell_progress(self) -> None:
        timings = self.request.timings
        read = timings.cached_tokens + timings.computed_tokens
        if self.reading is not None and not self.request.output_ids and read < timings.prompt_tokens:
            self.reading(read, timings.prompt_tokens)

    def _keep(self, pieces: Sequence[TextDelta]) -> Sequence[TextDelta]:
        self._pieces += pieces
        return pieces

    @property
    def answer(self) -> Answer:
        """The whole answer, or the part of it that has come so far."""
        request = self.request
        text, reasoning = ("".join(p.text for p in self._pieces if p.kind == kind) for kind in ("content", "reasoning"))
        return Answer(
            text=text,
            reasoning=reasoning,
            token_ids=tuple(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            finish_reason="stop" if self.reader.stopped else request.finish_reason or "cancelled",
            timings=request.timings,
            hit_rate=request.expert_hits / request.expert_uses if request.expert_uses else None,
        )
