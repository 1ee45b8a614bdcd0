"""Textual's thread that reads keys, made to survive what a terminal may send."""

from __future__ import annotations

import codecs
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.driver import Driver

    from rimuru_cli.tui.app import RimuruApp


def _forgiving(encoding: str) -> partial[codecs.IncrementalDecoder]:
    """As `codecs.getincrementaldecoder`, but bytes that are no characters become U+FFFD instead of an error."""
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")


def patient(driver: type[Driver]) -> type[Driver]:
    """A driver like this one that takes bytes which are no characters (a terminal set to another encoding), and leaves failures to the app.

    Textual's ends the app with a traceback either way. Drivers for other systems than POSIX are returned as they are.
    """
    if sys.platform == "win32":
        return driver
    from textual.drivers import linux_driver

    if not issubclass(driver, linux_driver.LinuxDriver):
        return driver
    # The decoder is made inside of the thread's function, from this name.
    linux_driver.getincrementaldecoder = _forgiving  # type: ignore[attr-defined, assignment]

    class PatientDriver(driver):  # type: ignore[misc, valid-type]
        """Reads on."""

        _app: RimuruApp

        def _run_input_thread(self) -> None:
            try:
                self.run_input_thread()
            except Exception as error:
                self._app.call_later(self._app._handle_exception, error)

    return PatientDriver
