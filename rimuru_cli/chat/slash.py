"""Slash commands: one table; each command changes the session or says something on stderr."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from rimuru_cli.chat import show
from rimuru_cli.chat.session import SAMPLING_NAMES, ChatSession
from rimuru_cli.output import Output
from rimuru_cli.settings import MemorySize, parse_size, parse_switch
from rimuru_models.errors import UsageError

# What the line editor has to do after a command.
After = Literal["stay", "leave", "regenerate"]
_SHOWABLE = ("model", "system", "params", "last prompt")


@dataclass(frozen=True)
class SlashCommand:
    """A command: how it is written, what it does, and the words that its argument may begin with."""

    name: str
    usage: str
    help: str
    act: Callable[[ChatSession, Output, str], After]
    words: tuple[str, ...] = ()


def is_command(message: str) -> bool:
    """Whether a message is a command: it begins with one slash. Two slashes send a message that begins with one."""
    return message.startswith("/") and not message.startswith("//")


def obey(message: str, session: ChatSession, out: Output) -> After:
    """Carry out a command.

    Raises:
        UsageError: no such command (with the nearest one) or a wrong argument.
    """
    name, argument = [*message.split(maxsplit=1), ""][:2]
    command = COMMANDS.get(name.lower())
    if command is None:
        close = get_close_matches(name.lower(), [known for known in COMMANDS if known != "/?"], n=1, cutoff=0.5)
        hint = (f"Did you mean {close[0]}? " if close else "") + "/help lists all. To send a message that begins with a slash, type two."
        raise UsageError(f"There is no command {name[:40]}.", hint=hint)
    return command.act(session, out, argument.strip())


def completions(name: str) -> tuple[str, ...]:
    """Words that can follow a command."""
    command = COMMANDS.get(name)
    return command.words if command else ()


def _help(session: ChatSession, out: Output, argument: str) -> After:
    listed = {command.name: command for command in COMMANDS.values()}.values()
    width = max(len(command.usage) for command in listed)
    for command in listed:
        out.note(f"  {command.usage.ljust(width)}  {command.help}")
    out.note('\nEnd a line with \\ to go on in the next one, or put several lines between """ and """.')
    out.note("Ctrl-C stops an answer, a second one leaves; Ctrl-D leaves.")
    return "stay"


def _leave(session: ChatSession, out: Output, argument: str) -> After:
    return "leave"


def _clear(session: ChatSession, out: Output, argument: str) -> After:
    session.clear()
    out.note("Everything said is forgotten" + ("; the system prompt stays." if session.conversation.system else "."), "dim")
    return "stay"


def _regenerate(session: ChatSession, out: Output, argument: str) -> After:
    params = session.params()
    if params.temperature == 0 or params.seed is not None:
        why = "the temperature is 0" if params.temperature == 0 else f"the seed is fixed at {params.seed}"
        out.note(f"({why}, so the answer will be the same; see /set)", "dim")
    return "regenerate"


def _system(session: ChatSession, out: Output, argument: str) -> After:
    if argument.lower() == "none":
        session.set_system(None)
    elif argument:
        session.set_system(argument)
    system = session.conversation.system
    out.note(f"System prompt: {system}" if system else "No system prompt.", "dim")
    return "stay"


def _set(session: ChatSession, out: Output, argument: str) -> After:
    if argument:
        name, value = [*argument.replace("=", " ", 1).split(maxsplit=1), ""][:2]
        if not value:
            raise UsageError("A value is missing.", hint="For example: /set temperature 0.7, or /set temperature default")
        session.set_param(name, value)
    for name, value, source in session.param_rows():
        mark = "" if source == "model" else "  (set)"
        out.note(f"  {name:<20} {'-' if value is None else value}{mark}")
    return "stay"


def _show(session: ChatSession, out: Output, argument: str) -> After:
    what = {"prompt": "last"}.get(argument.partition(" ")[0], argument)
    if what == "model":
        for line in show.banner(session.engine.info, session.engine.snapshot()):
            out.note(line)
        for notice in session.notices:
            out.note(f"note: {notice}")
    elif what == "system":
        _system(session, out, "")
    elif what == "params":
        _set(session, out, "")
    elif what.startswith("last"):
        out.note("Nothing was asked yet." if session.last_prompt is None else session.last_prompt)
    else:
        raise UsageError("Show what?", hint="/show model, /show system, /show params or /show last prompt")
    return "stay"


def _save(session: ChatSession, out: Output, argument: str, *, overwrite: bool = False) -> After:
    file = _file(argument, "/save")
    session.save(file, overwrite=overwrite)
    out.note(f"Saved {len(session.conversation.messages)} messages to {file}", "dim")
    return "stay"


def _save_over(session: ChatSession, out: Output, argument: str) -> After:
    return _save(session, out, argument, overwrite=True)


def _load(session: ChatSession, out: Output, argument: str) -> After:
    file = _file(argument, "/load")
    for ignored in session.load(file):
        out.warn(ignored)
    out.note(f"Loaded {len(session.conversation.messages)} messages from {file}", "dim")
    return "stay"


def _think(session: ChatSession, out: Output, argument: str) -> After:
    if not session.speech.can_think:
        raise UsageError("This model does not reason before it answers, so there is nothing to switch.")
    if argument:
        session.think = None if argument.lower() == "default" else parse_switch(argument)
    state = {None: "as the model likes", True: "on", False: "off"}[session.think]
    out.note(f"Reasoning: {state}", "dim")
    return "stay"


def _pool(session: ChatSession, out: Output, argument: str) -> After:
    for line in show.pool_lines(session.engine.snapshot()):
        out.note(line)
    return "stay"


def _memory(session: ChatSession, out: Output, argument: str) -> After:
    if argument:
        size = parse_size(argument)
        if size.share is not None:
            from rimuru_cli.engine.config import device_memory_bytes

            size = MemorySize(size.of(device_memory_bytes()))
        out.note(session.engine.set_memory(size.of(0)).summary(), "dim")
        for notice in session.renew_notices():
            out.note(f"note: {notice}", "yellow")
    for line in show.memory_lines(session.engine.info, session.engine.snapshot(), session.engine.least_memory):
        out.note(line)
    return "stay"


def _context(session: ChatSession, out: Output, argument: str) -> After:
    out.note(show.context_line(session.used_tokens(), session.engine.info))
    return "stay"


def _file(argument: str, command: str) -> Path:
    name = argument.strip().strip("\"'")
    if not name:
        raise UsageError("A file name is missing.", hint=f"For example: {command} talk.json")
    try:
        file = Path(name).expanduser()
        possible = b"\0" not in os.fsencode(file)
    except RuntimeError as error:
        raise UsageError(f"There is no home folder for {name}.") from error
    except UnicodeEncodeError:  # half of a surrogate pair, from a paste
        possible = False
    if not possible:
        raise UsageError(f"{name[:60]!r} cannot be the name of a file.")
    return file


_TABLE = (
    SlashCommand("/help", "/help", "list the commands", _help),
    SlashCommand("/exit", "/exit", "leave (also /quit, /bye, Ctrl-D)", _leave),
    SlashCommand("/clear", "/clear", "forget everything said, keep the system prompt", _clear),
    SlashCommand("/regen", "/regen", "make the last answer again", _regenerate),
    SlashCommand("/system", "/system [TEXT|none]", "show, set or remove the system prompt", _system, ("none",)),
    SlashCommand("/set", "/set [NAME VALUE]", "show or change the sampling settings; VALUE may be default", _set, SAMPLING_NAMES),
    SlashCommand("/show", "/show WHAT", "model, system, params, or last prompt", _show, _SHOWABLE),
    SlashCommand("/save", "/save FILE", "save the conversation as JSON (/save! overwrites)", _save),
    SlashCommand("/load", "/load FILE", "go on with a saved conversation", _load),
    SlashCommand("/think", "/think [on|off|default]", "whether the model reasons before it answers", _think, ("on", "off", "default")),
    SlashCommand("/pool", "/pool", "how the page pool is divided now", _pool),
    SlashCommand("/memory", "/memory [SIZE]", "show the memory ceiling, or change it: /memory 12GiB", _memory),
    SlashCommand("/ctx", "/ctx", "how full the context is", _context),
)
COMMANDS: dict[str, SlashCommand] = {command.name: command for command in _TABLE}
COMMANDS |= {"/quit": COMMANDS["/exit"], "/bye": COMMANDS["/exit"], "/?": COMMANDS["/help"]}
COMMANDS["/save!"] = SlashCommand("/save!", "/save! FILE", "save, and overwrite the file if it exists", _save_over)
