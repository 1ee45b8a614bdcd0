"""Running an app so that the terminal is clean afterwards, however it ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rimuru_cli.tui.app import RimuruApp

RESET: Final = "\x1b[<u\x1b[?2048l\x1b[?2004l\x1b[?1004l\x1b[?1015l\x1b[?1006l\x1b[?1003l\x1b[?1000l\x1b[?7h\x1b[0m\x1b[?1049l\x1b[?25h"
"""Key protocol, in-band resize, bracketed paste, focus and mouse reports off; line wrap on; no style; main screen; cursor shown."""


def run_app(app: RimuruApp) -> int:
    """Run an app and return its exit code.

    SIGTERM and a hang-up end it as a key would, with 128 + the signal's number. A failure is raised after the terminal was put back, so
    that it is reported like everywhere else.

    Raises:
        Exception: what ended the app.
    """
    try:
        with _ended_by_signals(app) as caught:
            code = app.run()
    except BaseException:
        _reset_terminal()
        raise
    finally:
        app.let_go()
    if app.failure is not None:
        raise app.failure
    return 128 + caught[0] if caught else code or 0


@contextlib.contextmanager
def _ended_by_signals(app: RimuruApp) -> Iterator[list[int]]:
    """Let signals ask the app to leave instead of tearing it in the middle of its loop. Gives the list of those that came."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def leave(number: int, frame: object) -> None:
        caught.append(number)
        loop = app.running_loop
        if loop is None or len(caught) > 2:
            sys.exit(128 + number)
        loop.call_soon_threadsafe(app.exit, 128 + number)

    numbers = [signal.SIGTERM, signal.SIGINT] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _reset_terminal() -> None:
    """What textual could not do, because it was torn. Harmless if it could."""
    stream = sys.__stderr__
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream is not None and stream.isatty():
            stream.write(RESET)
            stream.flush()
