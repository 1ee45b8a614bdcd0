"""One question, one answer: what `run` does, and `chat` when its input is a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rimuru_cli import errors
from rimuru_cli.chat import show
from rimuru_cli.chat.answer import Answer, AnswerStream
from rimuru_cli.chat.interrupt import InterruptFlag
from rimuru_cli.chat.repl import prompt_progress, read_stdin, stream_pieces, why_cut
from rimuru_cli.chat.session import ChatSession
from rimuru_cli.output import Output, is_terminal
from rimuru_models.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from rimuru_cli.engine.reasoning import TextDelta


@dataclass(frozen=True)
class SingleRun:
    """How one answer is made and shown.

    Attributes:
        raw: give the model the prompt as it is, without chat template.
        stream: show pieces as they arrive; with JSON: one object a line, the result last.
        timings: say on stderr how it went.
    """

    raw: bool = False
    stream: bool = True
    timings: bool = True

    def __call__(self, session: ChatSession, prompt: str, out: Output) -> int:
        """Answer the prompt and return the exit code: 0, or 130 after Ctrl-C (what was said until then stays printed).

        Raises:
            DoesNotFitError, UsageError, CheckpointError: the prompt cannot be run.
        """
        with InterruptFlag() as interrupt:
            try:
                stream, pieces, keep = self._begin(session, prompt, lambda: bool(interrupt))
            except DoesNotFitError as error:  # the engine's hint speaks of slash commands
                raise DoesNotFitError(error.what, hint="Shorten the prompt, or give more room with --context or --memory.") from error
            with prompt_progress(stream, out):
                if out.json and self.stream:
                    for piece in pieces:
                        out.emit({"event": "reasoning" if piece.kind == "reasoning" else "text", "text": piece.text}, compact=True)
                elif out.json or not self.stream:
                    for _ in pieces:
                        pass
                else:
                    stream_pieces(pieces, out)
        answer = keep()
        self._show(session, answer, out)
        return errors.INTERRUPTED if answer.finish_reason == "cancelled" else 0

    def _begin(
        self, session: ChatSession, prompt: str, stop_now: Callable[[], bool]
    ) -> tuple[AnswerStream, Iterator[TextDelta], Callable[[], Answer]]:
        if not self.raw:
            turn = session.ask(prompt, stop_now)
            return turn.stream, session.pieces(turn), lambda: session.settle(turn)
        stream = begin_raw(session, prompt, stop_now)
        return stream, iter(stream), lambda: stream.answer

    def _show(self, session: ChatSession, answer: Answer, out: Output) -> None:
        info, snapshot = session.engine.info, session.engine.snapshot()
        if out.json:
            result = {"model": info.model, **answer.to_dict(), "pool": snapshot.to_dict(), "notices": list(session.notices)}
            out.emit({"event": "result", **result} if self.stream else result, compact=self.stream)
            return
        if not self.stream and answer.text:
            out.data(answer.text if answer.text.endswith("\n") else answer.text + "\n")
        if answer.finish_reason == "cancelled":
            out.note("Interrupted.")
        elif answer.finish_reason == "length":
            out.note(why_cut(answer, info.context_limit, in_talk=False), "yellow")
        if self.timings and (answer.finish_reason != "cancelled" or answer.token_ids):
            out.note(show.timings_line(answer.timings, answer.hit_rate, snapshot), "dim")


def begin_raw(session: ChatSession, prompt: str, stop_now: Callable[[], object]) -> AnswerStream:
    """Start continuing a text as it stands.

    Raises:
        UsageError: the prompt has no tokens.
        DoesNotFitError: it does not fit the context; says the numbers.
    """
    params = session.params()
    prompt_ids = session.speech.encode(prompt, raw=True)
    if not prompt_ids:
        raise UsageError("The prompt is empty.")
    request = session.engine.submit(prompt_ids, params)
    reader = session.speech.reader(prompt, params, raw=True)
    return AnswerStream(session.engine, request, reader, stop_now)


def prompt_from(argument: str | None) -> str:
    """The prompt of `run`: the argument, or what is on stdin if that is '-' or missing.

    Raises:
        UsageError: no prompt at all, or stdin is not UTF-8.
    """
    if argument is not None and argument != "-":
        if not argument.strip():
            raise UsageError("The prompt is empty.")
        return argument
    if argument is None and (sys.stdin is None or is_terminal(sys.stdin)):
        raise UsageError("A prompt is missing.", hint="Type it after the model, or pipe it in: rimuru run MODEL 'Why is the sky blue?'")
    return read_stdin()


def read_prompts(text: str, file_name: str) -> list[str]:
    """Prompts from a file's text: JSON Lines (strings, or objects with "prompt", "text" or "messages"), else one prompt a line.

    Raises:
        UsageError: there is none, or a JSON line has none of these.
    """
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped:
            prompts.append(_prompt_of(stripped, f"{file_name}, line {number}") if file_name.endswith((".jsonl", ".ndjson")) else stripped)
    if not prompts:
        raise UsageError(f"{file_name} holds no prompts.")
    return prompts


def _prompt_of(line: str, place: str) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON.") from error
    if isinstance(value, dict):
        value = value.get("prompt", value.get("text", value.get("messages")))
    if isinstance(value, list):
        spoken = [m.get("content") for m in value if isinstance(m, dict) and m.get("role") == "user"]
        value = next((content for content in spoken if isinstance(content, str)), None)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{place} has no prompt.", hint='Write {"prompt": "…"}, or a JSON string, a line.')
    return value
