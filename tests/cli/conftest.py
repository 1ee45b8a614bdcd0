"""Shared by the tests of the command line: an isolated home and no settings from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A RIMURU_HOME of its own, no other RIMURU_ variables, no NO_COLOR."""
    for name in [name for name in os.environ if name.startswith("RIMURU_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "home"
    monkeypatch.setenv("RIMURU_HOME", str(folder))
    return folder
