from __future__ import annotations

import threading

import pytest

from rimuru_cli.hub.patience import Cancelled, Patience, Temporary, UnreachableError


def patience(attempts: int = 4, budget: float = 60.0) -> tuple[Patience, list[float], list[str]]:
    waits: list[float] = []
    notices: list[str] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    return Patience(attempts, budget, threading.Event(), notices.append, wait), waits, notices


def test_waits_grow_and_end() -> None:
    subject, waits, notices = patience(9)
    error = Temporary("it broke off", hint="look at the cable")
    with pytest.raises(UnreachableError) as caught:
        for _ in range(20):
            subject.after(error)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert (caught.value.what, caught.value.hint, caught.value.exit_code) == ("it broke off.", "look at the cable", 1)
    assert notices[0] == "it broke off; trying again" and notices[-1] == "it broke off; trying again in 30 s"


def test_progress_starts_counting_anew() -> None:
    subject, waits, _ = patience(3)
    for _ in range(20):
        subject.after(Temporary("x"))
        subject.progress()
    assert waits == [0.5] * 20


def test_does_what_the_server_asks_until_that_is_too_much() -> None:
    subject, waits, _ = patience(9, budget=60)
    subject.after(Temporary("x", retry_after=0))
    subject.after(Temporary("x", retry_after=25))
    subject.after(Temporary("x", retry_after=25))
    with pytest.raises(UnreachableError):
        subject.after(Temporary("x", retry_after=25))
    assert waits == [0, 25, 25], "it gives up before a wait, not after"
    with pytest.raises(UnreachableError):
        patience()[0].after(Temporary("x", retry_after=3600))


def test_a_wait_can_be_cancelled() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        Patience(4, 60, cancelled).after(Temporary("x", retry_after=50))
