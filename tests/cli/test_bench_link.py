"""Rates of copies and of memory, and the budget of page-locked memory: real copies on the CPU, a driver that is made up."""

from __future__ import annotations

import json

import pytest
import torch

from rimuru_cli.bench import link
from rimuru_cli.bench.pinned import FREE_SHARE, MOST_BYTES, measure_pinned_budget
from rimuru_cli.main import main

KIB = 1 << 10


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples so short that a test does not wait for them."""
    monkeypatch.setattr(link, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(link, "_READ_BYTES", 4 * link.MIB)
    monkeypatch.setattr(link, "_PIECE_BYTES", link.MIB)


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def test_copies_are_timed_both_ways_in_every_size(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        return real(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    rates, notices = link.copy_rates(torch.device("cpu"), (64 * KIB, 256 * KIB), silent)
    assert notices == []
    expected = [
        (what, how, size)
        for how in (link.PAGE_LOCKED, link.PAGEABLE)
        for what in (link.TO_DEVICE, link.TO_HOST)
        for size in (64 * KIB, 256 * KIB)
    ]
    assert [(r.what, r.how, r.num_bytes) for r in rates[:-1]] == expected
    assert (rates[-1].what, rates[-1].num_bytes) == (link.ON_DEVICE, 256 * KIB)
    assert all(r.gb_per_s > 0 for r in rates)


def test_a_refusal_of_page_locked_memory_is_a_notice(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return real(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    rates, notices = link.copy_rates(torch.device("cpu"), (64 * KIB,), silent)
    assert [r.how for r in rates if r.what != link.ON_DEVICE] == [link.PAGEABLE] * 2
    assert notices == ["page-locked memory was refused: CUDA error: out of memory"]


def test_the_rate_is_that_of_the_best_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each sample reads the clock twice. Warming up takes 9 s, the trial 12 ms (so four calls a sample), then samples of 5, 2 and 4 s.
    readings = iter([0.0, 9.0, 10.0, 10.012, 20.0, 25.0, 30.0, 32.0, 40.0, 44.0])
    monkeypatch.setattr(link.time, "perf_counter", lambda: next(readings))
    calls: list[int] = []
    waits: list[int] = []
    assert link._seconds(lambda: calls.append(1), lambda: waits.append(1)) == pytest.approx(2.0 / 4)
    assert len(waits) == 5 and len(calls) == 2 + 3 * 4


def test_reading_covers_all_memory_with_any_number_of_threads(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "usable_processors", lambda: 3)
    rates = link.read_rates(4 * link.MIB, silent)
    assert [(r.how, r.num_bytes) for r in rates] == [("1 thread", 4 * link.MIB), ("3 threads", 4 * link.MIB)]
    monkeypatch.setattr(link, "usable_processors", lambda: 1)
    assert [r.how for r in link.read_rates(link.MIB, silent)] == ["1 thread"]


def test_the_command_without_a_gpu(brief: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "link", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] is None and {row["what"] for row in report["rows"]} == {link.HOST_READ}
    assert report["best"]["host_to_device"] is None
    assert report["best"]["host_read"] == max(row["gb_per_s"] for row in report["rows"])
    assert main(["bench", "link"]) == 0
    captured = capsys.readouterr()
    assert "host memory read" in captured.out and "GB/s" in captured.out and "no CUDA device" in captured.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_every_rate_is_there() -> None:
    report = link.run_link_bench(quick=True)
    assert all(rate > 0 for rate in report["best"].values()) and report["notices"] == []
    assert report["best"]["copy_on_device"] > report["best"]["host_to_device"]


class Driver:
    """Grants page-locked memory up to a limit, and remembers what is locked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}
        self.most = 0

    def lock(self, address: int, num_bytes: int) -> bool:
        assert address not in self.locked and num_bytes > 0
        if sum(self.locked.values()) + num_bytes > self.limit:
            return False
        self.locked[address] = num_bytes
        self.most = max(self.most, sum(self.locked.values()))
        return True

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_a_generous_driver_grants_all_that_is_asked_for() -> None:
    driver = Driver(1 << 40)
    budget = measure_pinned_budget(1000 * KIB, driver, first_step=16 * KIB, last_step=4 * KIB)
    assert budget == (int(FREE_SHARE * 1000 * KIB), int(FREE_SHARE * 1000 * KIB), False)
    assert driver.most == budget.granted_bytes and driver.locked == {}


@pytest.mark.parametrize("limit", [0, 3 * KIB, 100 * KIB, 701 * KIB])
def test_a_refusal_is_closed_in_on(limit: int) -> None:
    driver = Driver(limit)
    seen: list[int] = []
    budget = measure_pinned_budget(1000 * KIB, driver, lambda done, total: seen.append(done), first_step=16 * KIB, last_step=4 * KIB)
    assert budget.refused and limit - 4 * KIB < budget.granted_bytes <= limit
    assert driver.locked == {} and seen == sorted(seen)


def test_what_is_locked_is_unlocked_when_interrupted() -> None:
    driver = Driver(1 << 40)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_pinned_budget(1000 * KIB, driver, interrupt, first_step=16 * KIB, last_step=4 * KIB)
    assert driver.most > 0 and driver.locked == {}


def test_no_more_than_the_most_is_asked_for() -> None:
    assert measure_pinned_budget(1 << 50, Driver(0)).asked_bytes == MOST_BYTES
