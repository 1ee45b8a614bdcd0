"""Run the command line with the fake engine, in a process of its own: python fake_cli.py '{"step_seconds": 0.05, …}' chat …"""

from __future__ import annotations

import json
import sys
from typing import Any

from fake_engine import FakeEngine, FakeSpeech

from rimuru_cli.chat import loading
from rimuru_cli.main import main
from rimuru_cli.output import Output
from rimuru_cli.settings import Settings


def fake_loader(engine: FakeEngine, speech: FakeSpeech | None = None, notices: tuple[str, ...] = ()) -> loading.Loader:
    """A loader that gives this engine whatever the model's name."""

    def load(name: str | None, settings: Settings, out: Output, *, chat: bool) -> loading.LoadedModel:
        return loading.LoadedModel(engine, speech or FakeSpeech(), notices)

    return load


def _run(options: dict[str, Any], arguments: list[str]) -> int:
    text = options.pop("reply", None)
    engine = FakeEngine(**options) if text is None else FakeEngine(reply=lambda prompt: text, **options)
    loading.load_model = fake_loader(engine)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(_run(json.loads(sys.argv[1]), sys.argv[2:]))
