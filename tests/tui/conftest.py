"""Tests here may be coroutines: each runs in a loop of its own. (A plug-in for that would be one more dependency.)"""

from __future__ import annotations

import asyncio
import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function with the fixtures that it names."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the terminal of whoever runs the tests can do must not matter."""
    for name in ("TEXTUAL_COLOR_SYSTEM", "COLORTERM", "TEXTUAL_THEME", "TEXTUAL_FILTERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    # After each key textual looks in steps of this many seconds whether the app has come to rest; keys are what most tests here consist of.
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 1 / 200)
    monkeypatch.setattr("textual._wait.SLEEP_IDLE", 1 / 2000)
