"""The engine's process behind a chat window, with the fake engine: python fake_child.py '{"reply": "...", "step_seconds": 0.05}'."""

from __future__ import annotations

import json
import os
import sys

from fake_cli import fake_loader
from fake_engine import FakeEngine

from rimuru_cli.chat import child, loading

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if "die" in options:
        sys.stderr.write("the fake process died\n")
        os._exit(options["die"])
    child._GRACE_SECONDS = options.pop("grace", child._GRACE_SECONDS)
    text = options.pop("reply", "Hello there.")
    loading.load_model = fake_loader(FakeEngine(reply=lambda prompt: text, **options))
    code = child.main()
    os._exit(code)
