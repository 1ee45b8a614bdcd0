"""The engine's process behind a window: `python -m rimuru_cli.chat.child` speaks `protocol` over its stdin and stdout.

It ends when it is told to, when its window is gone (end of stdin), or after a fatal failure. Ctrl-C is the window's affair and is ignored
here. Whatever libraries print goes to stderr, so that it cannot get between the messages.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from rimuru_cli import errors
from rimuru_cli.chat import loading, protocol, show, slash
from rimuru_cli.chat.repl import why_cut
from rimuru_cli.output import Output, Progress, Style
from rimuru_cli.settings import resolve
from rimuru_models.errors import RimuruError

if TYPE_CHECKING:
    from rimuru_cli.chat.session import ChatSession, Turn

_GRACE_SECONDS = 5.0
"""How long a step may still take after the window is gone, before the process ends in the middle of it."""
_PROGRESS_SECONDS = 0.1


class Line:
    """The line to the window. Messages come from one thread at a time; a window that is gone ends the process quietly."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, message: protocol.ToWindow) -> None:
        """Write one message. Raises BrokenPipeError when nobody listens any more."""
        with self._lock:
            self._stream.write(protocol.encode(message))
            self._stream.flush()


class PipedOutput(Output):
    """What commands and loading would print, as messages to the window."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self._held: list[protocol.Note] | None = None

    @contextlib.contextmanager
    def held_back(self) -> Iterator[list[protocol.Note]]:
        """Collect notes instead of sending them; whoever asked for that sends them when it is their turn."""
        self._held = []
        try:
            yield self._held
        finally:
            self._held = None

    def data(self, text: str) -> None:
        """Text as a note; the answers themselves go another way."""
        self.write_note(text)

    def write_note(self, text: str, style: Style | None = None) -> None:
        """One note a call, without the newline at its end."""
        note = protocol.Note(text.removesuffix("\n"), style)
        if self._held is not None:
            self._held.append(note)
        else:
            self._line.send(note)

    @contextlib.contextmanager
    def progress(self, unit: Literal["bytes", "items"] = "bytes") -> Iterator[Progress]:
        """Progress as messages, at most ten a second and stage."""
        seen: tuple[str, float] = ("", 0.0)

        def report(stage: str, done: int, total: int) -> None:
            nonlocal seen
            now = time.monotonic()
            if stage != seen[0] or now - seen[1] >= _PROGRESS_SECONDS or done >= total > 0:
                seen = (stage, now)
                self._line.send(protocol.Progress(stage, done, total))

        yield report


class Child:
    """One talk behind a window: reads requests on a thread, answers them one after the other."""

    def __init__(self, requests: BinaryIO, line: Line) -> None:
        self._requests = requests
        self._line = line
        self._waiting: queue.Queue[protocol.ToEngine] = queue.Queue()
        self._stop = threading.Event()
        self._out = PipedOutput(line)

    def run(self) -> int:
        """Serve until the window leaves; return the exit code."""
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        try:
            start = self._waiting.get()
            if not isinstance(start, protocol.Start):
                return 0
            return self._serve(start)
        except BrokenPipeError:
            return 0
        except Exception as error:
            return self._fail(error, fatal=True)

    def _listen(self) -> None:
        """Take requests until the window is gone. Runs on a thread of its own, so that `Stop` is seen in the middle of an answer."""
        while True:
            try:
                line = self._requests.readline(protocol.MAX_LINE_BYTES)
                message = protocol.decode(line) if line else protocol.Leave()
            except (OSError, ValueError):
                message = protocol.Leave()
            if isinstance(message, protocol.Stop):
                self._stop.set()
                continue
            if isinstance(message, protocol.Say):
                self._stop.clear()  # here, not when its turn comes: the next line may be a Stop that means it
            self._waiting.put(message)  # type: ignore[arg-type]  # the window sends nothing else
            if isinstance(message, protocol.Leave):
                self._stop.set()
                # A step or a load that takes longer is left where it is: nothing that it does outlives the process.
                threading.Timer(_GRACE_SECONDS, os._exit, (0,)).start()
                return

    def _serve(self, start: protocol.Start) -> int:
        settings = resolve(start.flags)
        system = loading.read_system_prompt(settings, Path(start.system_file) if start.system_file else None)
        with loading.opened_session(loading.load_model, settings["model"], settings, self._out, system=system, stop=start.stop) as session:
            commands = {name: list(command.words) for name, command in slash.COMMANDS.items()}
            self._line.send(protocol.Ready(session.engine.info.model, os.getpid(), commands))
            while True:
                self._line.send(protocol.Idle(session.used_tokens(), session.engine.info.context_limit))
                message = self._waiting.get()
                if isinstance(message, protocol.Leave):
                    return 0
                if isinstance(message, protocol.Say) and self._obey_or_ask(session, message.text) == "leave":
                    self._line.send(protocol.Left())
                    return 0

    def _obey_or_ask(self, session: ChatSession, text: str) -> slash.After:
        before = session.conversation.messages
        try:
            if slash.is_command(text):
                with self._out.held_back() as notes:
                    after = slash.obey(text, session, self._out)
                if session.conversation.messages is not before:
                    self._send_conversation(session)
                for note in notes:  # what was said about it belongs below the new conversation
                    self._line.send(note)
                if after == "regenerate":
                    self._answer(session, session.regenerate)
                return after
            question = text[1:] if text.startswith("//") else text
            self._answer(session, lambda stop_now: session.ask(question, stop_now))
        except BrokenPipeError:
            raise
        except (RimuruError, OSError) as error:  # the talk goes on
            self._fail(error, fatal=False)
        return "stay"

    def _answer(self, session: ChatSession, begin: Callable[[Callable[[], object]], Turn]) -> None:
        turn = begin(self._stop.is_set)
        self._line.send(protocol.Begun(session.conversation.messages[-1].content))
        turn.stream.reading = lambda read, total: self._line.send(protocol.Reading(read, total))
        for piece in session.pieces(turn):
            if piece.text:
                self._line.send(protocol.Piece(piece.kind, piece.text))
        answer = session.settle(turn)
        notes = []
        if answer.finish_reason == "cancelled":
            kept = "what it said so far stays in the conversation" if answer.text.strip() else "the question was taken back"
            notes.append(f"(stopped; {kept})")
        elif answer.finish_reason == "length":
            notes.append(why_cut(answer, session.engine.info.context_limit))
        if answer.finish_reason != "cancelled" or answer.token_ids:
            notes.append(show.timings_line(answer.timings, answer.hit_rate, session.engine.snapshot()))
        self._line.send(protocol.Answered(answer.finish_reason, tuple(notes)))

    def _send_conversation(self, session: ChatSession) -> None:
        messages = session.conversation.messages
        self._line.send(protocol.Spoken(tuple((m.role, m.content, m.reasoning) for m in messages)))

    def _fail(self, error: Exception, *, fatal: bool) -> int:
        failure = errors.explain(error)
        if fatal and os.environ.get("RIMURU_DEBUG"):
            import traceback

            traceback.print_exception(error)
        with contextlib.suppress(BrokenPipeError):
            self._line.send(protocol.Failed(failure.message, failure.hint, failure.exit_code, fatal))
        return failure.exit_code


def main() -> int:
    """Serve the window at the other ends of stdin and stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = Line(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return Child(sys.stdin.buffer, line).run()


if __name__ == "__main__":
    # Non-daemon threads of libraries must not keep the process once the window is gone.
    code = main()
    sys.stderr.flush()
    os._exit(code)
