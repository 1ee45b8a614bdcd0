"""A look at the machine before a model runs on it: what is here, how fast it is, what will be used, and what to do about problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rimuru_cli.bench import machine
from rimuru_cli.bench.link import run_link_bench
from rimuru_cli.bench.pinned import CudaLocker, measure_pinned_budget
from rimuru_cli.engine.config import DEFAULT_SHARE
from rimuru_cli.engine.device.plan import DEVICE_SHARE, pinned_budget
from rimuru_kernels.backend import select_backend

Progress = Callable[[str, int, int], None]

GIB = 1 << 30
# Below these a person would want to know. A PCIe 3 link of 8 lanes makes 6 GB/s; every link of a graphics card's full slot makes more.
_SLOW_LINK_GB_PER_S = 6.0
_LITTLE_RAM = 2 * GIB
_LITTLE_DISK = 5 * GIB
_BUSY_SHARE = 0.5


def examine(*, quick: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Everything `rimuru doctor` says. Never fails for want of a GPU.

    Args:
        quick: measure nothing; "link" and "pinned" are None.

    Returns:
        JSON-able, sizes in bytes, rates in GB/s: "system", "versions", "gpu" (None without one), "compute" (backend, device, reason),
        "memory", "link" (as `run_link_bench`), "pinned" (granted_bytes, asked_bytes, refused; None without a GPU), "disks", "problems"
        (each with "what" happened and a "hint" what to do), "therefore" (sentences: what rimuru will do with all this).
    """
    report = progress or (lambda stage, done, total: None)
    backend = select_backend()
    facts: dict[str, Any] = {
        "system": machine.system_facts(),
        "versions": machine.versions(),
        "gpu": machine.gpu_facts(),
        "compute": {"backend": backend.name, "device": "cuda" if backend.name == "triton" else "cpu", "reason": backend.reason},
        "memory": machine.memory_facts(),
        "link": None,
        "pinned": None,
        "disks": machine.disks(),
    }
    if not quick:
        facts["link"] = run_link_bench(quick=True, progress=report)
        if facts["gpu"] is not None:
            budget = measure_pinned_budget(
                facts["memory"]["ram_free_bytes"], CudaLocker(), lambda done, total: report("page-locked MiB", done >> 20, total >> 20)
            )
            facts["pinned"] = budget._asdict()
    facts["therefore"] = _therefore(facts)
    facts["problems"] = [{"what": what, "hint": hint} for what, hint in _problems(facts)]
    return facts


def _therefore(facts: Mapping[str, Any]) -> list[str]:
    """What rimuru will do on such a machine, as its parts decide when a model is loaded."""
    memory = facts["memory"]
    if facts["compute"]["backend"] != "triton":
        free = memory["ram_free_bytes"] / GIB
        return [
            "models run on the CPU; their experts stay mapped from the files, and the system's file cache keeps those that are used",
            f"without --memory a model gets up to {DEFAULT_SHARE * free:.1f} GiB, 70 % of the memory that is free",
            "precision: quantised experts stay as the files have them; all else, KV too, is float32, or KV 8 bits (--kv q8)",
        ]
    gpu, pinned, best = facts["gpu"], facts["pinned"], (facts["link"] or {}).get("best", {})
    lines = [
        f"models run on the GPU; without --vram a model gets up to {DEVICE_SHARE * gpu['vram_free_bytes'] / GIB:.1f} GiB of its memory"
    ]
    locked = f"up to {pinned_budget(memory['ram_free_bytes']) / GIB:.1f} GiB of experts are page-locked in main memory"
    if pinned is not None and pinned["refused"]:
        locked = f"about {pinned['granted_bytes'] / GIB:.1f} GiB of experts are page-locked in main memory, since the driver locks no more"
    rate = best.get("host_to_device")
    lines.append(locked + ("" if rate is None else f" and come over the link at {rate:.0f} GB/s") + "; the rest is read from disk")
    if gpu["virtual_memory"]:
        lines.append("a ceiling that is lowered while a model runs gives memory back to the driver")
    else:
        lines.append("a ceiling that is lowered while a model runs gives nothing back: this driver has no virtual memory")
    lines.append(
        "precision: experts and dense part stay as the files have them, quantised or not; so does KV, or it takes 8 bits (--kv q8)"
    )
    return lines


def _problems(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What stands in the way, each with what to do about it."""
    found = _gpu_problems(facts)
    if facts["memory"]["ram_free_bytes"] < _LITTLE_RAM:
        free = facts["memory"]["ram_free_bytes"] / GIB
        found.append((f"Only {free:.1f} GiB of memory are free.", "Close other programs, or give rimuru less with --memory."))
    for disk in facts["disks"]:
        if disk["free_bytes"] is not None and disk["free_bytes"] < _LITTLE_DISK:
            variable = "HF_HOME" if disk["what"].startswith("Hugging Face") else "RIMURU_HOME"
            what = f"Only {disk['free_bytes'] / GIB:.1f} GiB of disk are free in {disk['path']} ({disk['what']})."
            found.append((what, f"Free some space, or point {variable} at a larger disk."))
    return found


def _gpu_problems(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    gpu = facts["gpu"]
    if gpu is None:
        return _hidden_gpu(facts)
    found = []
    if facts["compute"]["backend"] != "triton":
        if facts["versions"]["triton"] is None:
            hint = "Run install.sh again; until then rimuru computes on the CPU."
        else:
            hint = "rimuru computes on the CPU; a newer card would be used."
        found.append((f"The GPU is not used: {facts['compute']['reason']}.", hint))
    if gpu["vram_free_bytes"] < _BUSY_SHARE * gpu["vram_bytes"]:
        used, total = (gpu["vram_bytes"] - gpu["vram_free_bytes"]) / GIB, gpu["vram_bytes"] / GIB
        what = f"{used:.1f} GiB of the GPU's {total:.1f} GiB are in use already."
        found.append((what, "Close other programs that use the GPU; nvidia-smi lists them."))
    rate = facts["link"]["best"]["host_to_device"] if facts["link"] else None
    if rate is not None and rate < _SLOW_LINK_GB_PER_S:
        what = f"The link to the GPU makes only {rate:.1f} GB/s, so experts that are not resident arrive slowly."
        found.append((what, "Put the card into a slot with 16 lanes, without a riser, and check that slot's speed in the firmware setup."))
    pinned = facts["pinned"]
    if pinned is not None and pinned["refused"]:
        granted, asked = pinned["granted_bytes"] / GIB, pinned["asked_bytes"] / GIB
        what = f"The driver page-locks no more than {granted:.1f} GiB (asked for: {asked:.1f} GiB)."
        found.append((what, "Close other programs. In WSL, raise memory= in .wslconfig; in a container, its memory and memlock limits."))
    return found


def _hidden_gpu(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A card that the driver sees and torch does not."""
    name = machine.ask_nvidia_smi("name")
    if name is None:
        return []  # no card is no problem
    if facts["versions"]["torch_cuda"] is None:
        return [
            (f"{name} is here, but this PyTorch was built without CUDA.", "Run install.sh again with the --torch-index of CUDA builds.")
        ]
    what = f"{name} is here, but PyTorch {facts['versions']['torch']} cannot use it (driver {machine.driver_version() or 'unknown'})."
    cuda = facts["versions"]["torch_cuda"]
    return [(what, f"Update the NVIDIA driver to one for CUDA {cuda}, and check that CUDA_VISIBLE_DEVICES hides no card.")]
