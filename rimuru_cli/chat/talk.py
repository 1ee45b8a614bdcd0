"""The two ways to talk: at a terminal, and through a pipe."""

from __future__ import annotations

from pathlib import Path

from rimuru_cli.chat import loading, slash
from rimuru_cli.chat.line_input import PromptReader, complete_words
from rimuru_cli.chat.repl import Repl, can_edit_lines, read_stdin
from rimuru_cli.chat.single import SingleRun
from rimuru_cli.output import Output
from rimuru_cli.settings import Settings


def talk(settings: Settings, out: Output, *, system_file: Path | None = None, stop: tuple[str, ...] = ()) -> int:
    """Talk with the model that the settings name; return the exit code.

    Raises:
        RimuruError: the model cannot be loaded, or (from a pipe) the message cannot be answered.
    """
    system = loading.read_system_prompt(settings, system_file)
    interactive = can_edit_lines(out)
    # A bad message must not cost the time to load a model first.
    message = None if interactive else read_stdin()
    with loading.opened_session(loading.load_model, settings["model"], settings, out, system=system, stop=stop) as session:
        if message is not None:
            return SingleRun()(session, message, out)
        from rimuru_cli.hub.paths import data_dir

        reader = PromptReader(data_dir() / "history", lambda before: complete_words(before, tuple(slash.COMMANDS), slash.completions))
        if reader.notice:
            out.warn(reader.notice)
        out.note("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.\n", "dim")
        return Repl(session, reader, out).run()


def answer_once(
    settings: Settings,
    prompt: str,
    out: Output,
    single: SingleRun,
    *,
    system_file: Path | None = None,
    stop: tuple[str, ...] = (),
) -> int:
    """Answer one prompt with the model that the settings name; return the exit code. Raises as `talk`."""
    system = loading.read_system_prompt(settings, system_file)
    with loading.opened_session(
        loading.load_model, settings["model"], settings, out, system=system, stop=stop, banner=False, chat=not single.raw, role="run"
    ) as session:
        return single(session, prompt, out)
