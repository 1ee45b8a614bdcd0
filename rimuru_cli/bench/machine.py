"""Facts about this machine that need no measuring: versions, graphics card, memory, disks. Whatever cannot be told is None."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from rimuru_cli import __version__
from rimuru_cli.bench.link import usable_processors
from rimuru_cli.engine.memory.driver import Driver
from rimuru_cli.hub import paths

_NVIDIA_SMI_SECONDS = 10
_NO_LIMIT = 1 << 60  # control groups write "no limit" as a number near 2**63


def system_facts() -> dict[str, Any]:
    """Operating system, machine, number of processors."""
    return {"os": platform.platform(), "machine": platform.machine(), "processors": usable_processors()}


def versions() -> dict[str, str | None]:
    """Versions of rimuru, Python, torch, of the CUDA that torch was built with, and of triton."""
    return {
        "rimuru": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": _package_version("triton") or _package_version("triton-windows"),
    }


def gpu_facts() -> dict[str, Any] | None:
    """The CUDA device that torch sees first: name, compute capability, memory in bytes, driver, and whether a pool's
    memory can be given back (its virtual memory); None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    driver = Driver.load()
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": driver_version(),
        "vram_bytes": int(total),
        "vram_free_bytes": int(free),
        "virtual_memory": driver is not None and driver.supports_virtual_memory(torch.cuda.current_device()),
    }


def driver_version() -> str | None:
    """Version of the NVIDIA driver."""
    answer = ask_nvidia_smi("driver_version")
    if answer:
        return answer
    with contextlib.suppress(OSError):  # "NVRM version: NVIDIA UNIX … x86_64  580.65.06  …", on Linux
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0].split()
        return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)
    return None


def ask_nvidia_smi(query: str) -> str | None:
    """The answer for the first card, or None where the program is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def memory_facts() -> dict[str, Any]:
    """Main memory in bytes, in all and free, and how much a process may lock by itself (POSIX; None: as much as it likes)."""
    memory = psutil.virtual_memory()
    group = _control_group_bytes()
    total, free = int(memory.total), int(memory.available)
    if group is not None:
        total, free = min(total, group[0]), min(free, group[1])
    return {"ram_bytes": total, "ram_free_bytes": free, "lock_limit_bytes": _lock_limit()}


def disks() -> list[dict[str, Any]]:
    """Where models and rimuru's own files go, and the bytes free there."""
    from huggingface_hub import constants

    places = [("Hugging Face cache", Path(constants.HF_HUB_CACHE)), ("rimuru's data", paths.data_dir())]
    return [{"what": what, "path": str(path), "free_bytes": free_disk_bytes(path)} for what, path in places]


def free_disk_bytes(path: Path) -> int | None:
    """Bytes free where a folder is or would be made; None if that cannot be told."""
    path = Path(os.path.abspath(path))
    for folder in (path, *path.parents):
        try:
            return int(shutil.disk_usage(folder).free)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _lock_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _control_group_bytes(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Limit and remaining bytes of a container's control group (version 2, then 1); None without a limit.

    Beyond them the kernel ends the process, however much memory the machine has. File cache of the group can be given back, so it counts
    as free.
    """
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            limit = int((root / limit_name).read_text(encoding="ascii"))
            used = int((root / used_name).read_text(encoding="ascii"))
            lines = (root / used_name).with_name("memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):  # "max" is no number: no limit
            continue
        if limit >= _NO_LIMIT:
            continue
        cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return limit, max(0, limit - max(0, used - cache))
    return None
