"""A conversation: what was said, and the file it is saved to and loaded from."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rimuru_models.errors import NotFoundError, UsageError

FORMAT = "rimuru-conversation"
VERSION = 1
_MAX_FILE_BYTES = 256 * 2**20
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


@dataclass(frozen=True)
class Message:
    """One thing said. `reasoning` is what the model thought before answering; `stopped` marks an answer cut short by Ctrl-C."""

    role: Literal["user", "assistant"]
    content: str
    reasoning: str = ""
    stopped: bool = False


@dataclass
class Conversation:
    """Messages in turn, user first, under an optional system prompt."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def prompt(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them."""
        spoken = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages:
            entry = {"role": message.role, "content": message.content}
            if message.reasoning:
                entry["reasoning_content"] = message.reasoning
            spoken.append(entry)
        return spoken

    def last_question(self) -> int | None:
        """Index of the last user message, or None when nothing was asked yet."""
        return next((i for i in reversed(range(len(self.messages))) if self.messages[i].role == "user"), None)

    def save(self, file: Path, *, model: str, params: dict[str, Any], overwrite: bool = False) -> None:
        """Write everything to a JSON file, whole or not at all.

        Raises:
            UsageError: the file exists and overwrite is False, it is a folder or a device, or its folder does not exist.
        """
        if file.is_dir():
            raise UsageError(f"{file} is a folder.", hint="Name a file in it.")
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} is not a regular file, so nothing is saved there.")
        if file.exists() and not overwrite:
            raise UsageError(f"{file} exists already.", hint=f"Overwrite it with: /save! {file}")
        document = {
            "format": FORMAT,
            "version": VERSION,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": model,
            "system": self.system,
            "params": params,
            "messages": [_message_to_dict(message) for message in self.messages],
        }
        write_whole(file, whole_characters(json.dumps(document, ensure_ascii=False, indent=2)) + "\n")

    @classmethod
    def load(cls, file: Path) -> tuple[Conversation, dict[str, Any]]:
        """Read a file that `save` wrote. Returns the conversation and the sampling settings that were in force (unchecked).

        Raises:
            NotFoundError: no such file.
            UsageError: it is not a conversation, or one of a newer version; says what is wrong.
        """
        try:
            found = file.stat()
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # such as a device, which never ends
                raise UsageError(f"{file} is not a regular file.")
            if found.st_size > _MAX_FILE_BYTES:
                raise UsageError(f"{file} is too large to be a conversation.")
            document = json.loads(file.read_bytes().decode("utf-8"))
        except UsageError:  # a ValueError, too
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"There is no file {file}.") from error
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not a saved conversation: it is not JSON in UTF-8.") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UsageError(f'{file} is not a saved conversation (its "format" is not {FORMAT!r}).')
        if document.get("version") != VERSION:
            raise UsageError(f"{file} has version {document.get('version')!r}; this rimuru reads version {VERSION}.")
        system, params, messages = document.get("system"), document.get("params", {}), document.get("messages")
        if not (system is None or isinstance(system, str)) or not isinstance(params, dict) or not isinstance(messages, list):
            raise UsageError(f'{file}: "system", "params" or "messages" has the wrong type.')
        if len(messages) % 2:
            raise UsageError(f"{file} ends with a question that has no answer.", hint="Take the last message out, and ask it yourself.")
        return cls(
            whole_characters(system) if system is not None else None, [_message_from(file, i, entry) for i, entry in enumerate(messages)]
        ), params


def _message_to_dict(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        entry["reasoning"] = message.reasoning
    if message.stopped:
        entry["stopped"] = True
    return entry


def _message_from(file: Path, index: int, entry: object) -> Message:
    expected = "user" if index % 2 == 0 else "assistant"
    if not isinstance(entry, dict) or entry.get("role") != expected:
        raise UsageError(f"{file}: message {index + 1} should be of the role {expected!r}; user and assistant take turns.")
    content, reasoning, stopped = entry.get("content"), entry.get("reasoning", ""), entry.get("stopped", False)
    if not isinstance(content, str) or not isinstance(reasoning, str) or not isinstance(stopped, bool):
        raise UsageError(f"{file}: message {index + 1} has a field of the wrong type.")
    role: Literal["user", "assistant"] = "user" if expected == "user" else "assistant"
    return Message(role, whole_characters(content), whole_characters(reasoning), stopped)


def whole_characters(text: str) -> str:
    """The text with halves of surrogate pairs replaced: no tokenizer and no UTF-8 file takes them."""
    return text.translate(_SURROGATES)


def write_whole(file: Path, text: str) -> None:
    """Write a text file so that at any moment either the old or the new content is there. Of a link, what it points to is written.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    temporary: str | None = None
    file = Path(os.path.realpath(file))
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.replace(temporary, file)
        temporary = None
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"There is no folder {file.parent}.") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
