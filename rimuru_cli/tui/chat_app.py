"""The chat window's app: the dashboard's keys and pool, a talk, and the engine's process behind both. `run_chat` is the way in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textual.screen import Screen

from rimuru_cli.chat import protocol
from rimuru_cli.engine.telemetry.sources import FrameSource
from rimuru_cli.errors import explain
from rimuru_cli.settings import BY_NAME
from rimuru_cli.tui.app import INTERRUPT_SECONDS, RimuruApp
from rimuru_cli.tui.chat_history import TypedHistory
from rimuru_cli.tui.chat_link import COMMAND, ChatLink, EngineEnded, EngineSaid, OwnEngine
from rimuru_cli.tui.screens.chat import ChatScreen
from rimuru_cli.tui.screens.dialogs import HelpScreen
from rimuru_cli.tui.widgets.chat_panel import ChatInput, ChatStatus
from rimuru_cli.tui.widgets.transcript import Transcript
from rimuru_models.errors import RimuruError, UsageError

_ANSWERING = "answering; Esc stops"


class EngineFailed(RimuruError):
    """The engine's process ended by itself: with the words of a failure that it told, or without any."""

    def __init__(self, what: str, hint: str | None, exit_code: int) -> None:
        super().__init__(what, hint=hint)
        self.exit_code = exit_code


class ChatApp(RimuruApp):
    """A chat beside the pool.

    Args:
        start: what to load.
        engine: frames of the chat's own engine.
        history: what was typed before.
        command: how to start the engine's process.
    """

    AWAITS_ENGINES = False

    def __init__(
        self,
        start: protocol.Start,
        engine: OwnEngine,
        history: TypedHistory,
        *,
        command: Sequence[str] = COMMAND,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(engine, environ=environ)
        self._first = start
        self._engine = engine
        self._history = history
        self._link = ChatLink(self.post_message, command)
        self._answering = False
        self._loaded = False
        self._dead = False
        self._leaving = False
        self._queued: str | None = None

    def first_screen(self) -> Screen[Any]:
        """Talk and pool."""
        return ChatScreen(self._history)

    def on_mount(self) -> None:
        """The window comes first (textual calls the base class's handler, too), then its engine."""
        self._link.start(self._first)

    def on_unmount(self) -> None:
        """Tell the engine at once; it is waited for when the terminal has been put back."""
        self._link.send(protocol.Leave())

    def let_go(self) -> None:
        """No more frames, no more engine."""
        super().let_go()
        self._link.stop()

    # What the engine says

    def on_engine_said(self, event: EngineSaid) -> None:
        """Show it."""
        match event.message:
            case protocol.Progress(stage, done, total):
                self._status.progress(stage, done, total)
            case protocol.Note(text, style):
                self._talk.say("warning" if style == "yellow" else "note", text)
            case protocol.Ready() as ready:
                self._loaded = True
                self._chat.query_one(ChatInput).commands = ready.commands
                self._bridge.ask(lambda source: self._engine.begin(ready.pid))
            case protocol.Begun(question):
                self._answering = True
                self._talk.say("you", question)
                self._status.stand(_ANSWERING)
            case protocol.Reading(read, total):
                self._status.stand(f"reading the prompt: {read:,} of {total:,} tokens; Esc stops")
            case protocol.Piece(kind, text):
                self._status.stand(_ANSWERING)
                self._talk.say("reasoning" if kind == "reasoning" else "model", text)
            case protocol.Answered(_, notes):
                self._talk.say("note", "\n".join(notes))
            case protocol.Spoken(messages):
                self._show_conversation(messages)
            case protocol.Failed() as failed:
                self._show_failure(failed)
            case protocol.Idle(used_tokens, context_limit):
                self._answering = False
                if self._queued is not None:
                    text, self._queued = self._queued, None
                    self._send(text)
                self._status.stand(f"context {used_tokens:,} of {context_limit:,} tokens")
            case protocol.Left():
                self._leaving = True
                self.exit(0)

    def on_engine_ended(self, event: EngineEnded) -> None:
        """Without its engine a chat is over. If it never began, the window closes and the failure is told below it; otherwise the talk
        stays to be read until the person leaves."""
        if self._leaving:
            return
        if self.failure is None:
            how = f"signal {-event.code}" if event.code < 0 else f"code {event.code}"
            words = event.last_words.strip().splitlines()
            hint = f"Its last words: {words[-1]}" if words else "If memory ran out, try a smaller --memory."
            self.failure = EngineFailed(f"The engine's process ended unexpectedly ({how}).", hint, 1)
        if not self._loaded:
            self.exit(1)
            return
        self._dead, self._answering = True, False
        self._talk.say("error", explain(self.failure).message)
        self._status.stand("The engine has ended. Ctrl-Q leaves.")

    def _show_conversation(self, messages: tuple[tuple[str, str, str], ...]) -> None:
        self._talk.clear()
        for role, content, reasoning in messages:
            if reasoning:
                self._talk.say("reasoning", reasoning)
            self._talk.say("you" if role == "user" else "model", content)

    def _show_failure(self, failed: protocol.Failed) -> None:
        if failed.fatal:
            self.failure = EngineFailed(failed.message, failed.hint, failed.exit_code)
            return  # the end of the process follows
        self._talk.say("error", failed.message + (f"\n{failed.hint}" if failed.hint else ""))

    # What the person wants

    def on_chat_input_sent(self, event: ChatInput.Sent) -> None:
        """Pass a message on, one at a time; what is typed while an answer is on its way stays in the line."""
        line = self._chat.query_one(ChatInput)
        if event.text.strip().split(maxsplit=1)[0].lower() in ("/exit", "/quit", "/bye") and not self._loaded:
            self.exit(0)
            return
        if self._dead:
            self._status.tell("The engine has ended, so nobody answers. Ctrl-Q leaves.")
            return
        if self._answering or self._queued is not None:
            self._status.tell(
                "Let the answer end first, or stop it with Esc." if self._loaded else "One message waits for the model already."
            )
            return
        line.taken(event.text)
        if not self._loaded:
            self._queued = event.text
            self._talk.say("note", f"(as soon as the model is loaded: {event.text})")
            return
        self._send(event.text)

    def _send(self, text: str) -> None:
        self._answering = True
        if text.startswith("/") and not text.startswith("//"):
            self._talk.say("you", text)
        self._link.send(protocol.Say(text))

    def stop_answer(self) -> bool:
        """Stop the answer; False if there is none."""
        if not self._answering:
            return False
        self._link.send(protocol.Stop())
        self._status.stand("stopping")
        return True

    def action_interrupt(self) -> None:
        """Ctrl-C stops the answer, or throws away what is typed; a second one leaves."""
        now = time.monotonic()
        if now - self._interrupted_at < INTERRUPT_SECONDS:
            self._leaving = True
            self.exit(130)
            return
        line = self._chat.query_one(ChatInput)
        if self.stop_answer() or not line.text:
            self._interrupted_at = now
            self._status.tell("Ctrl-C again leaves.", INTERRUPT_SECONDS)
        else:
            line.clear()

    async def action_quit(self) -> None:
        """Leave."""
        self._leaving = True
        self.exit(0)

    def action_help(self) -> None:
        """Keys of both halves."""
        self.push_screen(HelpScreen(self.palette, chat=True))

    @property
    def _chat(self) -> Screen[Any]:
        return next(screen for screen in self.screen_stack if isinstance(screen, ChatScreen))

    @property
    def _talk(self) -> Transcript:
        return self._chat.query_one(Transcript)

    @property
    def _status(self) -> ChatStatus:
        return self._chat.query_one(ChatStatus)


def run_chat(flags: Mapping[str, Any], *, system_file: Path | None = None, stop: tuple[str, ...] = ()) -> int:
    """Chat in a window until the person leaves; return the exit code.

    Args:
        flags: flags of the command line by setting name, JSON-able values only.
        system_file: file with the system prompt.
        stop: strings that end an answer.

    Raises:
        UsageError: the flags contradict one another.
        RimuruError: the model could not be loaded, or its engine ended by itself.
    """
    from rimuru_cli.hub.paths import data_dir, runtime_dir
    from rimuru_cli.tui.terminal import run_app

    def open_source(pid: int) -> FrameSource:
        from rimuru_cli.engine.telemetry.live import LiveSource

        return LiveSource(runtime_dir(), pid=pid)

    given = {name: value for name, value in flags.items() if name in BY_NAME and value is not None}
    if given.get("dashboard") is False:
        raise UsageError("--tui shows the engine's memory, so --no-dashboard cannot be given with it.", hint="Leave one of them out.")
    given["dashboard"] = True
    start = protocol.Start(given, None if system_file is None else str(system_file), stop)
    return run_app(ChatApp(start, OwnEngine(open_source), TypedHistory(data_dir() / "history")))
