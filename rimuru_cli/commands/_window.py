"""Whether a window can be drawn where the command runs."""

from __future__ import annotations

import os
import sys

from rimuru_cli.output import is_terminal


def why_no_window() -> str | None:
    """Why no window can be drawn here, None if one can: keys come from stdin, the picture goes to stderr, and somebody looks at stdout."""
    for name in ("stdin", "stdout", "stderr"):
        if not is_terminal(getattr(sys, name)):
            return f"{name} is none"
    if os.environ.get("TERM") == "dumb":
        return "this one calls itself dumb (TERM=dumb), so nothing can be drawn on it"
    return None
