"""What a window and the engine behind it say to each other: one JSON object a line, over the engine's stdin and stdout.

The window draws, the engine's process computes; neither waits for the other's Python. Every message is a frozen dataclass here; its JSON
carries the class's name in lower case as "type". Lines that cannot be read are an error of the program, never skipped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read: a whole conversation fits, a runaway process does not."""


@dataclass(frozen=True)
class Start:
    """Load a model: the flags of the command line by setting name, before variables and the settings file are looked at."""

    flags: dict[str, Any]
    system_file: str | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Say:
    """A message for the model, or a slash command."""

    text: str


@dataclass(frozen=True)
class Stop:
    """End the answer that is being made; what came so far stays."""


@dataclass(frozen=True)
class Leave:
    """Free everything and end the process."""


@dataclass(frozen=True)
class Progress:
    """How far a long piece of work is. total 0 means unknown."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Note:
    """A line for the person; style is one of `rimuru_cli.output.Style` or None."""

    text: str
    style: str | None = None


@dataclass(frozen=True)
class Ready:
    """The model is loaded. `commands` are the slash commands and the words that may follow them."""

    model: str
    pid: int
    commands: dict[str, list[str]]


@dataclass(frozen=True)
class Begun:
    """An answer begins; `question` is the message that it answers."""

    question: str


@dataclass(frozen=True)
class Reading:
    """How many of a prompt's tokens are read, before its answer begins."""

    read: int
    total: int


@dataclass(frozen=True)
class Piece:
    """Text of the answer that is being made."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True)
class Answered:
    """The answer is complete. `notes` say how it went."""

    finish_reason: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Spoken:
    """The whole conversation anew, because a command changed it: (role, content, reasoning) of each message."""

    messages: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Failed:
    """Something went wrong; after a fatal failure the process ends with that code."""

    message: str
    hint: str | None
    exit_code: int
    fatal: bool


@dataclass(frozen=True)
class Idle:
    """The next `Say` may come. `used_tokens` is the part of the context that is taken, `context_limit` the whole of it now."""

    used_tokens: int
    context_limit: int


@dataclass(frozen=True)
class Left:
    """The person asked to leave with a command."""


ToEngine = Start | Say | Stop | Leave
ToWindow = Progress | Note | Ready | Begun | Reading | Piece | Answered | Spoken | Failed | Idle | Left
_TYPES: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Start, Say, Stop, Leave, Progress, Note, Ready, Begun, Reading, Piece, Answered, Spoken, Failed, Idle, Left)
}


class ProtocolError(ValueError):
    """A line that is no message."""


def encode(message: ToEngine | ToWindow) -> bytes:
    """One line with its end, pure ASCII, so that no locale and no lone surrogate can break it."""
    return json.dumps({"type": type(message).__name__.lower(), **asdict(message)}, allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> ToEngine | ToWindow:
    """The message of a line.

    Raises:
        ProtocolError: it is not JSON, or of no known type, or its fields are not that type's.
    """
    try:
        record = json.loads(line)
        kind = _TYPES[record.pop("type")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {line[:200]!r}") from error
    names = {field.name for field in fields(kind)}
    if not set(record) <= names:
        raise ProtocolError(f"{kind.__name__} has no {sorted(set(record) - names)}")
    try:
        message: ToEngine | ToWindow = kind(**{name: _frozen(value) for name, value in record.items()})
    except TypeError as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error
    return message


def _frozen(value: Any) -> Any:
    """Lists of a frozen message are tuples; dicts are left as JSON has them."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
