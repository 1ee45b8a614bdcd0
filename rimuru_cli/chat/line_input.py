"""Reading what a person types: line editing, history, completion, paste, and messages of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rimuru_cli.output import is_terminal

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = ">>> "
CONTINUED = "... "
_FENCE = '"""'


class LineDropped(KeyboardInterrupt):
    """Ctrl-C while something was typed already: it throws that away, and is no wish to leave yet."""


class LineReader(Protocol):
    """Something that asks for one line. Raises EOFError on Ctrl-D, LineDropped or (on an empty line) KeyboardInterrupt on Ctrl-C."""

    def read_line(self, prompt: str) -> str:
        """Return the line without its end. A paste may hold line breaks."""
        ...


def read_message(reader: LineReader) -> str:
    '''Read one message: one line, lines joined by a trailing backslash, or everything between two """.

    A pasted text of several lines is one line in this sense, so it is never sent in pieces.

    Raises as the reader does; Ctrl-C in a later line is always LineDropped.
    '''
    line = reader.read_line(PROMPT)
    try:
        return _whole_message(line, reader)
    except KeyboardInterrupt as error:
        raise LineDropped from error


def _whole_message(line: str, reader: LineReader) -> str:
    if line.lstrip().startswith(_FENCE):
        body = line.lstrip()[len(_FENCE) :]
        while _FENCE not in body:
            body += "\n" + reader.read_line(CONTINUED)
        inside, _, after = body.partition(_FENCE)
        return (inside + after).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + reader.read_line(CONTINUED)
    return line


class PromptReader:
    """The line editor of a terminal (prompt_toolkit), with a history file only its owner can read.

    Args:
        history_file: where entered lines are kept; its folder is made.
        words: gives the completions of a slash command for the text before the cursor.

    Attributes:
        notice: why the history is not kept on disk, or None.
    """

    def __init__(self, history_file: Path, words: Callable[[str], Iterable[str]]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.output import create_output

        class SlashCompleter(Completer):
            def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
                before = document.text_before_cursor
                start = len(before) - before.rfind(" ") - 1
                return [Completion(word, start_position=-start) for word in words(before)]

        class Forgiving(FileHistory):
            """A file that cannot be read or written (any more) is no reason to lose what was typed."""

            def load_history_strings(self) -> Iterable[str]:
                with contextlib.suppress(OSError):
                    return super().load_history_strings()
                return []

            def store_string(self, string: str) -> None:
                with contextlib.suppress(OSError):
                    super().store_string(string)

        self.notice: str | None = None
        try:
            _make_private(history_file)
        except OSError as error:
            self.notice = f"what you type is not remembered: {history_file} cannot be written ({error.strerror})"
        # The editor draws on stderr: stdout is for answers, and may be a file.
        screen = create_output(stdout=sys.stderr if is_terminal(sys.stderr) else sys.stdout)
        self._session: PromptSession[str] = PromptSession(
            history=Forgiving(str(history_file)),
            completer=SlashCompleter(),
            complete_while_typing=False,
            output=screen,
            enable_open_in_editor=True,
            enable_suspend=True,
        )

    def read_line(self, prompt: str) -> str:
        """Ask for one line on the terminal."""
        try:
            return self._session.prompt(prompt)
        except KeyboardInterrupt as error:
            if self._session.default_buffer.text:
                raise LineDropped from error
            raise


def complete_words(before: str, commands: Sequence[str], arguments: Callable[[str], Sequence[str]]) -> list[str]:
    """Completions for a line that begins with a slash: command names, then the first argument's words."""
    if not before.startswith("/") or "\n" in before:
        return []
    name, space, rest = before.partition(" ")
    if not space:
        return [command for command in commands if command.startswith(name)]
    return [word for word in arguments(name) if word.startswith(rest)] if " " not in rest else []


def _make_private(file: Path) -> None:
    """Create the file if missing, readable by its owner only where the system knows such rights."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
    if os.name == "posix":
        with contextlib.suppress(OSError):
            file.chmod(0o600)
