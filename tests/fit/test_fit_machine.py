from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rimuru_cli.fit import machine as machines
from rimuru_cli.fit import measured, nvml
from rimuru_cli.fit.cards import UNKNOWN, known_rates, link_gb_per_s
from rimuru_cli.fit.machine import Machine, imagined, this_machine
from rimuru_cli.fit.measured import MeasuredRates, load_rates, rates_file, rates_of, save_rates
from rimuru_cli.fit.nvml import DriverCard, list_cards, visible_card
from rimuru_cli.fit.wishes import wished_machine
from rimuru_models.errors import UsageError

GIB = 1 << 30


class FakeDriver:
    """Answers like NVML. `cards`: dicts of what is known; a missing key is refused, as an old driver refuses."""

    def __init__(self, cards: list[dict[str, Any]], *, start: int = 0) -> None:
        self.cards, self.start, self.ended = cards, start, 0

    def nvmlInit_v2(self) -> int:
        return self.start

    def nvmlShutdown(self) -> int:
        self.ended += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 15 if self.cards[index.value].get("lost") else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        card = self.cards[handle.value - 1]
        memory._obj.total, memory._obj.used = card["total"], card.get("used", 0)
        return 0

    def _text(self, handle: Any, buffer: Any, length: Any, key: str) -> int:
        value = self.cards[handle.value - 1].get(key)
        if value is None:
            return 3
        data = value.encode()[: length.value - 1] + b"\0"
        ctypes.memmove(buffer, data, len(data))
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        return self._text(handle, buffer, length, "name")

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        return self._text(handle, buffer, length, "uuid")

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        capability = self.cards[handle.value - 1].get("capability")
        if capability is None:
            return 3
        major._obj.value, minor._obj.value = capability
        return 0

    def _number(self, handle: Any, value: Any, key: str) -> int:
        known = self.cards[handle.value - 1].get(key)
        value._obj.value = known or 0
        return 0 if known is not None else 3

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, value: Any) -> int:
        return self._number(handle, value, "generation")

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, value: Any) -> int:
        return self._number(handle, value, "lanes")

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, value: Any) -> int:
        return self._number(handle, value, "bus")

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, value: Any) -> int:
        return self._number(handle, value, {1: "sm_mhz", 2: "memory_mhz"}[kind.value])


RTX_4090 = {
    "name": "NVIDIA GeForce RTX 4090",
    "uuid": "GPU-1111",
    "total": 24564 << 20,
    "used": 800 << 20,
    "capability": (8, 9),
    "generation": 4,
    "lanes": 16,
    "bus": 384,
    "memory_mhz": 10501,
    "sm_mhz": 3105,
}


def cards_of(*cards: dict[str, Any]) -> list[DriverCard]:
    return list_cards(FakeDriver(list(cards)))  # type: ignore[arg-type]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts cards into this machine, with a torch that could use them."""

    def put(*cards: dict[str, Any]) -> None:
        monkeypatch.setattr(nvml, "list_cards", lambda: cards_of(*cards))
        monkeypatch.setattr(machines, "_torch_is_for_cpus", lambda: False)
        monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: object())

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def test_a_card_as_the_driver_describes_it() -> None:
    (card,) = cards_of(RTX_4090)
    assert (card.name, card.uuid, card.capability) == ("NVIDIA GeForce RTX 4090", "GPU-1111", (8, 9))
    assert (card.total_bytes, card.used_bytes) == (24564 << 20, 800 << 20)
    assert (card.link_generation, card.link_lanes) == (4, 16)
    assert card.memory_gb_per_s == pytest.approx(1008, rel=0.001), "as published"
    assert card.float32_tflops is None, "this driver is too old to name the cores"


def test_a_driver_that_refuses_everything_but_memory() -> None:
    (card,) = cards_of({"total": GIB})
    assert card == DriverCard("NVIDIA GPU", "", GIB, 0, None, None, None, None, None)


def test_no_driver_no_cards() -> None:
    assert list_cards(FakeDriver([RTX_4090], start=9)) == []  # type: ignore[arg-type]
    assert list_cards(SimpleNamespace()) == []  # type: ignore[arg-type]
    assert list_cards(SimpleNamespace(nvmlInit_v2=lambda: 0)) == []  # type: ignore[arg-type]
    assert cards_of({"lost": True, "total": 1}, RTX_4090)[0].name == "NVIDIA GeForce RTX 4090"
    ended = FakeDriver([])
    assert list_cards(ended) == [] and ended.ended == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "big"),
        ("0", "small"),
        ("1", "big"),
        ("1,0", "big"),
        ("GPU-b", "big"),
        ("gpu-a,1", "small"),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_which_card_a_program_would_use(visible: str | None, expected: str | None) -> None:
    found = visible_card(
        cards_of({"name": "small", "uuid": "GPU-a", "total": GIB}, {"name": "big", "uuid": "GPU-b", "total": 2 * GIB}), visible
    )
    assert (found.name if found else None) == expected
    assert visible_card([], None) is None


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 576),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 336),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", 288),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H200", 4800),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("rtx 5090", 1792),
    ],
)
def test_known_cards(name: str, bandwidth: float) -> None:
    rates = known_rates(name)
    assert rates is not None and rates.memory_gb_per_s == bandwidth


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 9999", "Voodoo 2", "NVIDIA GeForce RTX 4090 Max-Q"])
def test_unknown_cards(name: str) -> None:
    assert known_rates(name) is None


def test_links() -> None:
    assert link_gb_per_s(5, 16) == pytest.approx(54.4)
    assert link_gb_per_s(4, 16) == pytest.approx(25, abs=1)
    assert link_gb_per_s(4, 8) == pytest.approx(12.5, abs=0.5)
    assert link_gb_per_s(9, 16) is None and link_gb_per_s(4, 0) is None


def test_this_machine_with_a_known_card(driver: Callable[..., None]) -> None:
    driver(RTX_4090)
    gpu = this_machine().gpu
    assert gpu is not None
    assert (gpu.name, gpu.total_bytes, gpu.used_bytes, gpu.cap_bytes) == ("NVIDIA GeForce RTX 4090", 24564 << 20, 800 << 20, None)
    assert gpu.memory_gb_per_s == pytest.approx(1008 * 0.83)
    assert gpu.tflops == 165
    assert gpu.link_gb_per_s == pytest.approx(24.8)
    assert any("PCIe 4.0 with 16 lanes" in line for line in this_machine().assumptions)


def test_an_unknown_card_goes_by_its_clock_and_else_counts_as_slow(driver: Callable[..., None]) -> None:
    driver(RTX_4090 | {"name": "NVIDIA GeForce RTX 7090", "bus": 512, "memory_mhz": 14000})
    here = this_machine()
    assert here.gpu is not None and here.gpu.memory_gb_per_s == pytest.approx(1792 * 0.83)
    assert any("by the clock that the driver names" in line for line in here.assumptions)
    driver({"name": "NVIDIA Mystery", "total": 8 * GIB, "capability": (8, 6)})
    here = this_machine()
    assert here.gpu is not None and here.gpu.memory_gb_per_s == pytest.approx(UNKNOWN.memory_gb_per_s * 0.83)
    assert here.gpu.tflops == UNKNOWN.tflops
    assert any("taken to be slow" in line for line in here.assumptions) and any("PCIe 4.0" in line for line in here.assumptions)


def test_why_a_card_is_not_used(driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    driver(RTX_4090 | {"capability": (7, 5)})
    assert this_machine().gpu is None
    assert "compute capability 7.5, and the kernels need 8.0" in (this_machine().why_no_gpu or "")
    driver(RTX_4090)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().why_no_gpu == "CUDA_VISIBLE_DEVICES hides every card"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machines, "_torch_is_for_cpus", lambda: True)
    assert "built without CUDA" in (this_machine().why_no_gpu or "")
    monkeypatch.setattr(machines, "_torch_is_for_cpus", lambda: False)
    monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in (this_machine().why_no_gpu or "")
    driver()
    assert this_machine().why_no_gpu == "no NVIDIA driver answers here"


def test_what_torch_was_built_for_is_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    assert machines._torch_is_for_cpus() == (torch.version.cuda is None)


def test_rates_of_doctor_replace_guesses(driver: Callable[..., None]) -> None:
    driver(RTX_4090)
    best = {"host_to_device": 23.0, "device_to_host": 20.0, "host_to_device_pageable": 5.0, "copy_on_device": 900.0, "host_read": 41.5}
    assert save_rates(rates_of({"device": "NVIDIA GeForce RTX 4090", "best": best}))
    here = this_machine()
    assert here.gpu is not None
    assert (here.gpu.link_gb_per_s, here.gpu.memory_gb_per_s, here.ram_gb_per_s) == (23.0, pytest.approx(900 * 0.93), 41.5)
    assert here.assumptions == ()


def test_rates_of_another_card_are_not_this_ones(driver: Callable[..., None]) -> None:
    driver(RTX_4090)
    save_rates(MeasuredRates("NVIDIA GeForce RTX 3060", 11.0, 300.0, 41.5, "2026-01-01T00:00:00+00:00"))
    here = this_machine()
    assert here.gpu is not None and here.gpu.link_gb_per_s == pytest.approx(24.8)
    assert here.ram_gb_per_s == 41.5, "main memory is the same whatever the card"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"format": 2}', '{"format": 1, "device": null}', "[" * 10_000, '{"format": 1, "device": null, "link_gb_per_s": "x"}'],
)
def test_damaged_rates_are_none(text: str) -> None:
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(text, encoding="utf-8")
    assert load_rates() is None


@pytest.mark.parametrize("rate", [-1, 0, True, "7", None, float("inf"), 1e300])
def test_impossible_rates_are_not_believed(rate: object) -> None:
    values = {"format": 1, "device": "x", "link_gb_per_s": rate, "copy_gb_per_s": 1, "ram_gb_per_s": 2.5, "measured_at": "now"}
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(json.dumps(values), encoding="utf-8")
    assert load_rates() == MeasuredRates("x", None, 1.0, 2.5, "now")


def test_rates_that_cannot_be_kept_are_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    monkeypatch.setenv("RIMURU_HOME", str(tmp_path / "file"))
    assert not save_rates(MeasuredRates(None, None, None, 1.0, "now"))
    assert load_rates() is None


def test_nothing_half_written_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(old: object, new: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measured.os, "replace", fail)
    assert not save_rates(MeasuredRates(None, None, None, 1.0, "now"))
    assert os.listdir(rates_file().parent) == []


BARE = Machine(None, "no NVIDIA driver answers here", 32 * GIB, 20 * GIB, 15.0, 8, ("main memory is slow",))


def wished(machine: Machine = BARE, **flags: str | None) -> Machine:
    return wished_machine(**{"vram": None, "ram": None, "link": None, **flags}, machine=machine)


def test_a_card_can_be_imagined() -> None:
    here = wished(vram="12GiB")
    assert here.gpu is not None
    assert (here.gpu.name, here.gpu.total_bytes, here.gpu.cap_bytes) == ("a card with 12 GiB", 12 * GIB, 12 * GIB)
    assert here.why_no_gpu is None
    assert any("is imagined (no NVIDIA driver answers here)" in line for line in here.assumptions)
    assert any("PCIe 4.0" in line for line in here.assumptions)
    fast = wished(vram="12GiB", link="50 GB/s")
    assert fast.gpu is not None and fast.gpu.link_gb_per_s == 50
    assert not any("PCIe" in line for line in fast.assumptions)


def test_a_ceiling_for_the_card_that_is_there(driver: Callable[..., None]) -> None:
    driver(RTX_4090)
    here = wished(this_machine(), vram="50%")
    assert here.gpu is not None
    assert (here.gpu.cap_bytes, here.gpu.total_bytes, here.gpu.used_bytes) == (12282 << 20, 24564 << 20, 800 << 20)
    more = wished(this_machine(), vram="32GiB")
    assert more.gpu is not None and more.gpu.total_bytes == 32 * GIB
    assert any("is taken to have 32 GiB" in line for line in more.assumptions)
    linked = wished(this_machine(), link="11.5")
    assert linked.gpu is not None and linked.gpu.link_gb_per_s == 11.5 and linked.gpu.cap_bytes is None


def test_main_memory_can_be_imagined() -> None:
    here = wished(ram="64GiB")
    assert here.ram_bytes == 64 * GIB and 0.8 * 64 * GIB < here.ram_free_bytes < 64 * GIB
    assert wished(ram="50%").ram_bytes == 16 * GIB
    assert imagined(BARE, vram_bytes=None, ram_bytes=None, link_gb_per_s=None) == BARE


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"vram": "much"}, "--vram"),
        ({"vram": "0"}, "--vram"),
        ({"vram": "12"}, "--vram: 12 .*bytes"),
        ({"ram": "64"}, "--ram: 64 .*bytes"),
        ({"vram": "50%"}, "--vram"),
        ({"ram": "-1GiB"}, "--ram"),
        ({"link": "25"}, "--link"),
        ({"link": "fast", "vram": "8GiB"}, "--link"),
        ({"link": "0", "vram": "8GiB"}, "--link"),
        ({"link": "nan", "vram": "8GiB"}, "--link"),
        ({"link": "inf", "vram": "8GiB"}, "--link"),
        ({"link": "-3", "vram": "8GiB"}, "--link"),
        ({"link": "", "vram": "8GiB"}, "--link"),
    ],
)
def test_wishes_that_cannot_be_read(flags: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        wished(**flags)
    assert caught.value.hint or "at least 1 byte" in caught.value.what
