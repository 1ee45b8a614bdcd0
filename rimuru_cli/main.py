"""The table of contents of the command line: which verbs there are, and the one place where every error ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from rimuru_cli import __version__, errors
from rimuru_cli.commands import _options as options
from rimuru_cli.commands.bench import bench_app
from rimuru_cli.commands.chat import chat
from rimuru_cli.commands.config import config
from rimuru_cli.commands.dashboard import dashboard
from rimuru_cli.commands.doctor import doctor
from rimuru_cli.commands.fit import fit
from rimuru_cli.commands.list import list_models
from rimuru_cli.commands.profile_hotset import profile_hotset
from rimuru_cli.commands.pull import pull
from rimuru_cli.commands.quantize import quantize
from rimuru_cli.commands.rm import rm
from rimuru_cli.commands.run import run
from rimuru_cli.commands.show import show
from rimuru_cli.commands.verify import verify
from rimuru_cli.output import Output, ReaderGone, prepare_streams

EPILOG = "Examples:  rimuru chat  ·  echo 'Why is the sky blue?' | rimuru chat  ·  rimuru run ./my-model 'Hello' --json"

app = typer.Typer(
    name="rimuru",
    help="Talk to Mixture-of-Experts models that are larger than the memory you give them.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel=options.TALK)(chat)
app.command(rich_help_panel=options.TALK)(run)
app.command(rich_help_panel=options.TALK)(dashboard)
app.command(rich_help_panel=options.MODELS)(pull)
app.command("list", rich_help_panel=options.MODELS)(list_models)
app.command(rich_help_panel=options.MODELS)(show)
app.command(rich_help_panel=options.MODELS)(fit)
app.command(rich_help_panel=options.MODELS)(verify)
app.command(rich_help_panel=options.MODELS)(rm)
app.command(rich_help_panel=options.TUNE)(quantize)
app.command(rich_help_panel=options.TUNE)(profile_hotset)
app.add_typer(bench_app, name="bench", rich_help_panel=options.TUNE)
app.command(rich_help_panel=options.SETUP)(config)
app.command(rich_help_panel=options.SETUP)(doctor)


def _print_version(asked: bool) -> None:
    if asked:
        Output().line(f"rimuru {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Talk to Mixture-of-Experts models that are larger than the memory you give them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Whatever goes wrong ends as a message, never as a traceback.

    Args:
        arguments: the words after `rimuru`; sys.argv's when None.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    prepare_streams()
    out = Output(json=_asks_for_json(words))
    try:
        with _leaving_cleanly_when_terminated():
            code = app(args=words, prog_name="rimuru", standalone_mode=False)
        # Commands leave through sys.exit, so this is Typer's translation of a Ctrl-C.
        return _report(lambda: errors.report(KeyboardInterrupt(), out)) if code == errors.INTERRUPTED else int(code or 0)
    except ReaderGone:
        _silence_stdout()
        return 0
    except typer.TyperException as error:
        # No message: Typer has printed the help of a command that was given nothing.
        message = error.format_message()
        if not message:
            return error.exit_code
        failure = errors.Failure(message, f"{_command_words(words)} -h lists what is possible.", error.exit_code)
        return _report(lambda: errors.show(failure, out))
    except typer.Abort:
        return errors.INTERRUPTED
    except SystemExit as leaving:  # commands with an exit code of their own, shell completion, a terminated process
        return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:  # the end of the line for every error, Ctrl-C included
        cause = error
        return _report(lambda: errors.report(cause, out))


def _report(speak: Callable[[], int]) -> int:
    """Say what went wrong; if nobody listens any more, only the exit code is left to say it."""
    try:
        return speak()
    except ReaderGone:
        _silence_stdout()
        return 1


def _asks_for_json(words: Sequence[str]) -> bool:
    """Whether --json is among the flags. Needed before parsing, for the errors of parsing itself."""
    flags = words[: words.index("--")] if "--" in words else words
    return "--json" in flags


def _command_words(words: Sequence[str]) -> str:
    known = {
        "chat",
        "run",
        "dashboard",
        "pull",
        "list",
        "show",
        "fit",
        "verify",
        "rm",
        "profile-hotset",
        "quantize",
        "bench",
        "config",
        "doctor",
    }
    return f"rimuru {words[0]}" if words and words[0] in known else "rimuru"


def _silence_stdout() -> None:
    """Point stdout at nothing, so that Python does not complain about the closed pipe when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _terminal_restorer() -> Callable[[], None]:
    """A function that puts the terminal back as it is now: the line editor cannot, if it is torn in the middle of its own set-up."""
    try:
        import termios
    except ImportError:  # Windows: the console belongs to the system, which resets it
        return lambda: None
    try:
        fd = sys.stdin.fileno()
        state = termios.tcgetattr(fd)
    except (AttributeError, OSError, ValueError, termios.error):  # no stdin, or not a terminal
        return lambda: None

    def restore() -> None:
        with contextlib.suppress(OSError, ValueError, termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, state)

    return restore


@contextlib.contextmanager
def _leaving_cleanly_when_terminated() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the terminal is restored and temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    restore_terminal = _terminal_restorer()
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        restore_terminal()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
