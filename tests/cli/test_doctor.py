"""`rimuru doctor` on machines that are made up: what it shows, and what it calls a problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rimuru_cli.bench import doctor, machine
from rimuru_cli.bench.pinned import PinnedBudget
from rimuru_cli.main import main
from rimuru_kernels.backend import Backend

GIB = 1 << 30
GPU = {
    "name": "NVIDIA Fictional 5090",
    "count": 1,
    "compute_capability": "12.0",
    "driver": "580.65.06",
    "vram_bytes": 32 * GIB,
    "vram_free_bytes": 31 * GIB,
    "virtual_memory": True,
}
VERSIONS = {"rimuru": "0.1.0", "python": "3.12.1", "torch": "2.13.0", "torch_cuda": "13.0", "triton": "3.9.0"}
BEST = {"host_to_device": 54.0, "device_to_host": 53.0, "host_to_device_pageable": 6.5, "copy_on_device": 1500.0, "host_read": 74.0}


class Machine:
    """A machine whose facts a test sets before it looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu: dict[str, Any] | None = dict(GPU)
        self.backend = Backend("triton", "NVIDIA Fictional 5090, compute capability 12.0")
        self.versions: dict[str, str | None] = dict(VERSIONS)
        self.memory = {"ram_bytes": 64 * GIB, "ram_free_bytes": 60 * GIB, "lock_limit_bytes": 8 << 20}
        self.best: dict[str, float | None] = dict(BEST)
        self.budget = PinnedBudget(16 * GIB, 16 * GIB, False)
        self.smi: str | None = None
        self.disk_bytes: int | None = 500 * GIB
        self.measured: list[str] = []
        monkeypatch.setattr(machine, "gpu_facts", lambda: self.gpu)
        monkeypatch.setattr(machine, "versions", lambda: self.versions)
        monkeypatch.setattr(machine, "memory_facts", lambda: self.memory)
        monkeypatch.setattr(machine, "driver_version", lambda: "470.1")
        monkeypatch.setattr(machine, "ask_nvidia_smi", lambda query: self.smi)
        monkeypatch.setattr(machine, "free_disk_bytes", lambda path: self.disk_bytes)
        monkeypatch.setattr(doctor, "select_backend", lambda: self.backend)
        monkeypatch.setattr(doctor, "CudaLocker", lambda: None)
        monkeypatch.setattr(doctor, "run_link_bench", self.link)
        monkeypatch.setattr(doctor, "measure_pinned_budget", self.pinned)

    def link(self, *, quick: bool, progress: object) -> dict[str, Any]:
        assert quick
        self.measured.append("link")
        return {"device": self.gpu and self.gpu["name"], "rows": [], "best": self.best, "notices": []}

    def pinned(self, free_bytes: int, locker: object, progress: object) -> PinnedBudget:
        assert free_bytes == self.memory["ram_free_bytes"]
        self.measured.append("pinned")
        return self.budget

    def without_gpu(self) -> None:
        self.gpu, self.backend = None, Backend("torch", "no CUDA device found")
        self.best = {name: rate if name == "host_read" else None for name, rate in BEST.items()}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_healthy_machine(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    for words in (
        ("versions", "torch 2.13.0 (CUDA 13.0)", "triton 3.9.0"),
        ("GPU", "NVIDIA Fictional 5090", "compute capability 12.0", "driver 580.65.06"),
        ("VRAM", "32.0 GiB, 31.0 GiB free"),
        ("computes on", "the GPU, with Triton kernels", "compute capability 12.0"),
        ("RAM", "64.0 GiB, 60.0 GiB free"),
        ("link", "54.0 GB/s to the GPU, 53.0 GB/s back", "6.5 GB/s"),
        ("RAM rate", "74.0 GB/s"),
        ("page-locked", "16.0 GiB of 16.0 GiB", "ulimit -l 8.0 MiB"),
        ("therefore", "models run on the GPU", "up to 28.5 GiB of its memory"),
        ("therefore", "up to 51.0 GiB of experts are page-locked", "at 54 GB/s", "the rest is read from disk"),
        ("therefore", "gives memory back to the driver"),
        ("disk", "500.0 GiB free", "Hugging Face cache"),
        ("disk", "500.0 GiB free", "rimuru's data"),
    ):
        assert any(line.startswith(f"{words[0]}  ") and all(word in line for word in words) for line in lines), words
    # All texts begin in one column.
    starts = {len(line) - len(line[13:].lstrip()) for line in lines if line.startswith(("system", "computes on", "RAM  ", "disk"))}
    assert starts == {13}
    assert lines[-1] == "No problems found." and captured.err == ""


def test_json_has_integers_in_bytes(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gpu"]["vram_bytes"] == 32 * GIB and facts["memory"]["ram_bytes"] == 64 * GIB
    assert facts["pinned"] == {"granted_bytes": 16 * GIB, "asked_bytes": 16 * GIB, "refused": False}
    assert facts["compute"] == {"backend": "triton", "device": "cuda", "reason": here.backend.reason}
    assert facts["link"]["best"] == BEST and facts["problems"] == []
    assert [disk["free_bytes"] for disk in facts["disks"]] == [500 * GIB] * 2


def test_without_a_gpu_there_is_no_problem(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    here.without_gpu()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "the CPU, with PyTorch (no CUDA device found)" in out and "74.0 GB/s" in out and "No problems found." in out
    assert "page-locked" not in out and here.measured == ["link"]


def test_quick_measures_nothing(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    assert "not measured (--quick)" in capsys.readouterr().out and here.measured == []


def problems(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """The problems of --json; every one has a hint, and people are shown the same words."""
    assert main(["doctor", "--json"]) == 0
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["problems"]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(problem["what"] in out and problem["hint"] and problem["hint"] in out for problem in found)
    assert ("No problems" in out) == (not found)
    return found


def test_a_refusing_driver(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    here.budget = PinnedBudget(3 * GIB, 16 * GIB, True)
    (problem,) = problems(capsys)
    assert "no more than 3.0 GiB" in problem["what"] and ".wslconfig" in problem["hint"]


def test_a_slow_link_and_a_busy_card(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    here.best["host_to_device"] = 3.2
    here.gpu = {**GPU, "vram_free_bytes": 10 * GIB}
    busy, slow = problems(capsys)
    assert "22.0 GiB of the GPU's 32.0 GiB" in busy["what"] and "3.2 GB/s" in slow["what"] and "16 lanes" in slow["hint"]


@pytest.mark.parametrize(("triton", "word"), [(None, "install.sh"), ("3.9.0", "newer card")])
def test_a_gpu_that_is_not_used(here: Machine, triton: str | None, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    here.backend, here.versions["triton"] = Backend("torch", "some reason"), triton
    (problem,) = problems(capsys)
    assert "some reason" in problem["what"] and word in problem["hint"]


@pytest.mark.parametrize(("cuda", "words"), [(None, "built without CUDA"), ("13.0", "driver 470.1")])
def test_a_gpu_that_torch_does_not_see(here: Machine, cuda: str | None, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    here.without_gpu()
    here.smi, here.versions["torch_cuda"] = "NVIDIA Fictional 5090", cuda
    (problem,) = problems(capsys)
    assert "Fictional 5090 is here" in problem["what"] and words in problem["what"]


def test_little_memory_and_little_disk(here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    here.memory["ram_free_bytes"] = GIB
    here.disk_bytes = GIB
    memory, cache, data = problems(capsys)
    assert "1.0 GiB of memory" in memory["what"]
    assert "HF_HOME" in cache["hint"] and "RIMURU_HOME" in data["hint"]
    here.disk_bytes = None
    assert len(problems(capsys)) == 1


def test_disk_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = machine.free_disk_bytes(tmp_path / "a" / "b")
    assert free is not None and free == pytest.approx(machine.free_disk_bytes(tmp_path), rel=0.05)


def test_memory_of_a_container_counts(tmp_path: Path) -> None:
    assert machine._control_group_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n", encoding="ascii")
    assert machine._control_group_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n", encoding="ascii")
    assert machine._control_group_bytes(tmp_path) == (8 * GIB, 6 * GIB)


def test_nvidia_smi_may_be_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.ask_nvidia_smi("name") is None
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(tmp_path / "gone"))
    assert machine.ask_nvidia_smi("name") is None


def test_the_facts_of_this_machine_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["system"]["processors"] >= 1
    assert 0 < facts["memory"]["ram_free_bytes"] <= facts["memory"]["ram_bytes"]
    assert (facts["gpu"] is None) <= (facts["compute"]["backend"] == "torch")


def test_what_follows_is_said_for_every_kind_of_machine(here: Machine) -> None:
    here.budget = PinnedBudget(4 * GIB, 16 * GIB, True)
    assert here.gpu is not None
    here.gpu["virtual_memory"] = False
    said = doctor.examine()["therefore"]
    assert any("about 4.0 GiB of experts" in line and "the driver locks no more" in line for line in said)
    assert any("gives nothing back" in line for line in said)
    assert any("experts and dense part stay as the files have them" in line and "--kv q8" in line for line in said)
    quick = doctor.examine(quick=True)["therefore"]
    assert any("up to 51.0 GiB of experts" in line and "GB/s" not in line for line in quick)
    here.without_gpu()
    said = doctor.examine()["therefore"]
    assert any("run on the CPU" in line for line in said) and any("up to 42.0 GiB" in line for line in said)
    assert any("quantised experts stay" in line and "float32" in line and "--kv q8" in line for line in said)
