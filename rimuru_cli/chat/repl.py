"""The talk itself: read a message, stream the answer, say how it went, until somebody leaves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rimuru_cli import errors
from rimuru_cli.chat import show, slash
from rimuru_cli.chat.interrupt import InterruptFlag
from rimuru_cli.chat.line_input import LineDropped, LineReader, read_message
from rimuru_cli.chat.session import ChatSession, Turn
from rimuru_cli.output import Output, is_terminal
from rimuru_models.errors import RimuruError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rimuru_cli.chat.answer import Answer, AnswerStream
    from rimuru_cli.engine.reasoning import TextDelta

_HOW_TO_LEAVE = "(Ctrl-C again, Ctrl-D or /exit leaves)"


class Repl:
    """A talk on a terminal. `run` returns the exit code: 0 after /exit or Ctrl-D, 130 after a second Ctrl-C."""

    def __init__(self, session: ChatSession, reader: LineReader, out: Output) -> None:
        self.session = session
        self.reader = reader
        self.out = out
        # Set by a Ctrl-C, cleared by anything else that is entered: the next Ctrl-C leaves.
        self._armed = False

    def run(self) -> int:
        """Talk until somebody leaves."""
        while True:
            try:
                message = read_message(self.reader)
            except EOFError:
                return 0
            except KeyboardInterrupt as pressed:
                if self._armed and not isinstance(pressed, LineDropped):
                    return errors.INTERRUPTED
                self._armed = True
                self.out.note(_HOW_TO_LEAVE, "dim")
                continue
            self._armed = False
            if not message.strip():
                continue
            try:
                if self._obey_or_ask(message) == "leave":
                    return errors.INTERRUPTED if self._armed else 0
            except KeyboardInterrupt:  # it came a moment after the answer was complete, or while a command ran
                self._armed = True
                self.out.note(_HOW_TO_LEAVE, "dim")
            except (RimuruError, OSError) as error:  # the talk goes on
                errors.report(error, self.out)

    def _obey_or_ask(self, message: str) -> slash.After:
        if slash.is_command(message):
            after = slash.obey(message, self.session, self.out)
            return self._answer(None) if after == "regenerate" else after
        return self._answer(message[1:] if message.startswith("//") else message)

    def _answer(self, question: str | None) -> slash.After:
        """Stream one answer; None makes the last one again."""
        with InterruptFlag() as interrupt:

            def stop_now() -> bool:
                return bool(interrupt)

            turn = self.session.regenerate(stop_now) if question is None else self.session.ask(question, stop_now)
            # Closed at once if the answer cannot be written: its request must not go on behind the next one.
            with prompt_progress(turn.stream, self.out), contextlib.closing(self.session.pieces(turn)) as pieces:
                stream_pieces(pieces, self.out)
            answer = self.session.settle(turn)
        self._say_how_it_went(turn, answer)
        # A second Ctrl-C that came before the step was through leaves as it would have at the prompt.
        self._armed = interrupt.count > 0
        return "leave" if interrupt.count > 1 else "stay"

    def _say_how_it_went(self, turn: Turn, answer: Answer) -> None:
        info, snapshot = self.session.engine.info, self.session.engine.snapshot()
        if answer.finish_reason == "cancelled":
            kept = "what it said so far stays in the conversation" if answer.text.strip() else "the question was taken back"
            self.out.note(f"(stopped; {kept}; Ctrl-C again leaves)", "dim")
        elif answer.finish_reason == "length":
            self.out.note(why_cut(answer, info.context_limit), "yellow")
        if answer.finish_reason != "cancelled" or answer.token_ids:
            self.out.note(show.timings_line(answer.timings, answer.hit_rate, snapshot), "dim")


def why_cut(answer: Answer, context_limit: int, *, in_talk: bool = True) -> str:
    """Say why an answer ended with "length"; in a talk, slash commands help."""
    if answer.prompt_tokens + len(answer.token_ids) >= context_limit:
        anew = "/clear starts anew, " if in_talk else ""
        return f"(cut: the context of {context_limit:,} tokens is full; {anew}--memory or --context may give more room)"
    return f"(cut: --max-tokens is reached at {len(answer.token_ids):,} tokens)"


def stream_pieces(pieces: Iterable[TextDelta], out: Output, *, show_reasoning: bool = True) -> bool:
    """Write an answer as it arrives: text to stdout, reasoning dimmed to stderr. Returns whether any text came.

    Ends the line on a terminal, or when there was text: piped output is exactly the answer and one newline.
    """
    current, wrote_text, last = "content", False, "\n"
    try:
        for piece in pieces:
            if not piece.text:
                continue
            if piece.kind != current:
                if current == "reasoning" and last != "\n":
                    out.write_note("\n")
                current = piece.kind
            if piece.kind == "reasoning":
                if show_reasoning:
                    out.write_note(piece.text, "dim")
                    last = piece.text[-1]
                continue
            out.data(piece.text)
            wrote_text, last = True, piece.text[-1]
    finally:
        if current == "reasoning" and last != "\n":
            out.write_note("\n")
        elif wrote_text and last != "\n":
            out.data("\n")
    return wrote_text


@contextlib.contextmanager
def prompt_progress(stream: AnswerStream, out: Output) -> Iterator[None]:
    """Draw on stderr how far a prompt of several steps is read; the first text of the answer wipes it."""
    with out.progress("items") as progress:
        stream.reading = lambda read, total: progress("reading the prompt (tokens)", read, total)
        yield


def can_edit_lines(out: Output) -> bool:
    """Whether a person sits at a terminal: something to type on, and a screen for the prompt."""
    import sys

    return sys.stdin is not None and is_terminal(sys.stdin) and (is_terminal(out.stderr) or is_terminal(out.stdout))


def read_stdin(limit_bytes: int = 64 * 2**20) -> str:
    """Everything on stdin as one text, without the line break at its end.

    Raises:
        UsageError: it is not UTF-8 (names the byte), empty, or too long.
    """
    import sys

    if sys.stdin is None:
        raise UsageError("There is no standard input to read from.")
    raw = sys.stdin.buffer.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise UsageError(f"There are more than {limit_bytes >> 20} MiB on standard input.")
    text = decode_utf8(raw, "Standard input")
    if not text.strip():
        raise UsageError("Standard input is empty.", hint="Pipe a message into it, as in: echo 'Hello' | rimuru chat")
    return text.removesuffix("\n").removesuffix("\r")


def decode_utf8(raw: bytes, what: str) -> str:
    """Decode UTF-8, with or without a byte order mark.

    Raises:
        UsageError: it is something else; names the offset of the first wrong byte.
    """
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8: byte {error.start} (0x{raw[error.start]:02x}) does not belong there.",
            hint="Convert it, for example with iconv.",
        ) from error
