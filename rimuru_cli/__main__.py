"""Where the process begins and ends: `python -m rimuru_cli` is the same as `rimuru`.

Before and after `main`, which has an answer to Ctrl-C, there is nothing to clean up, and Python's own answer would be a traceback.
"""

from __future__ import annotations

import os
import signal
import sys


def start() -> int:
    """Run the command line and return its exit code. Before and after that, Ctrl-C ends the process without a word."""
    handler = signal.getsignal(signal.SIGINT)
    deaf = handler is signal.SIG_IGN  # a background job of a shell stays so
    quiet = signal.SIG_IGN if deaf else lambda signum, frame: os._exit(130)
    signal.signal(signal.SIGINT, quiet)
    from rimuru_cli.main import main  # a tenth of a second, most of it Typer's

    signal.signal(signal.SIGINT, handler)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, quiet)


if __name__ == "__main__":
    sys.exit(start())
