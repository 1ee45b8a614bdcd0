"""What a machine has and how fast it is, as far as that is known without torch; every guess is put into words."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from rimuru_cli.fit import cards, nvml
from rimuru_cli.fit.measured import MeasuredRates, load_rates
from rimuru_kernels.backend import OLDEST_CAPABILITY

# A copy counts bytes read and written; what kernels reach when they only read is a little less. Of the published peak they reach less
# still. Both as on an H200: 4.3 TB/s copied, 4.8 published, 4.0 read by the kernels (docs/results).
_READ_OF_COPY = 0.93
_READ_OF_PEAK = 0.83
_GUESSED_RAM_GB_PER_S = 15.0
# A GeForce or workstation card makes twice its float32 rate in bfloat16 products with sums in float32.
_BFLOAT16_OF_FLOAT32 = 2.0
# Main memory of a machine that is only imagined: what its system and other programs leave.
_FREE_OF_IMAGINED_RAM = 0.9
_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*=\s*(?P<value>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A card that rimuru computes on.

    Attributes:
        name: its name, or "a card with so much memory" when it is only imagined.
        total_bytes: its memory; used_bytes: what others hold of it now.
        memory_gb_per_s: what kernels reach reading its memory.
        tflops: dense bfloat16 products, at the peak.
        link_gb_per_s: what large copies of page-locked memory reach.
        cap_bytes: ceiling that was asked for; None: as the engine chooses.
    """

    name: str
    total_bytes: int
    used_bytes: int
    memory_gb_per_s: float
    tflops: float
    link_gb_per_s: float
    cap_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """Where a model is to run. Sizes in bytes, rates in decimal GB per second.

    Attributes:
        gpu: the card, or None to compute on the CPU.
        why_no_gpu: why there is none, or why it is not used; None with a card.
        ram_bytes, ram_free_bytes: main memory, and what a new program can have of it.
        ram_gb_per_s: reading main memory with all processors.
        processors: how many there are.
        assumptions: what was guessed and from what, a sentence each without a final full stop.
    """

    gpu: Gpu | None
    why_no_gpu: str | None
    ram_bytes: int
    ram_free_bytes: int
    ram_gb_per_s: float
    processors: int
    assumptions: tuple[str, ...] = ()


def this_machine() -> Machine:
    """The machine this runs on."""
    memory = psutil.virtual_memory()
    rates = load_rates()
    gpu, why, assumptions = _find_gpu(rates)
    ram_rate = rates.ram_gb_per_s if rates else None
    if ram_rate is None and gpu is None:
        assumptions.append(
            f"main memory is read at {_GUESSED_RAM_GB_PER_S:g} GB/s, as slow ones are; `rimuru doctor` measures yours and keeps the figure"
        )
    return Machine(
        gpu=gpu,
        why_no_gpu=why,
        ram_bytes=int(memory.total),
        ram_free_bytes=int(memory.available),
        ram_gb_per_s=ram_rate or _GUESSED_RAM_GB_PER_S,
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        assumptions=tuple(assumptions),
    )


def imagined(machine: Machine, *, vram_bytes: int | None, ram_bytes: int | None, link_gb_per_s: float | None) -> Machine:
    """A machine with other figures put in; None leaves one as it is.

    Args:
        vram_bytes: ceiling for the card's memory. Where there is no card, one with this much memory is imagined.
        ram_bytes: main memory in all.
        link_gb_per_s: rate of large copies to the card.
    """
    assumptions = list(machine.assumptions)
    gpu, why = machine.gpu, machine.why_no_gpu
    if vram_bytes is not None and gpu is None:
        read = cards.UNKNOWN.memory_gb_per_s * _READ_OF_PEAK
        name = f"a card with {_size(vram_bytes)}"
        gpu = Gpu(name, vram_bytes, 0, read, cards.UNKNOWN.tflops, cards.USUAL_LINK_GB_PER_S, vram_bytes)
        # What was said about computing without a card no longer matters.
        assumptions, why = [f"{name} is imagined ({why})", _slow_card(name)], None
        if link_gb_per_s is None:
            assumptions.append(f"the link to the card makes {cards.USUAL_LINK_GB_PER_S:.0f} GB/s, as PCIe 4.0 with 16 lanes does")
    elif vram_bytes is not None and gpu is not None:
        gpu = replace(gpu, cap_bytes=vram_bytes)
        if vram_bytes > gpu.total_bytes:
            assumptions.append(f"{gpu.name} is taken to have {_size(vram_bytes)} instead of {_size(gpu.total_bytes)}, all else as it is")
            gpu = replace(gpu, total_bytes=vram_bytes)
    if link_gb_per_s is not None and gpu is not None:
        gpu = replace(gpu, link_gb_per_s=link_gb_per_s)
        assumptions = [line for line in assumptions if not line.startswith("the link ")]
    machine = replace(machine, gpu=gpu, why_no_gpu=why)
    if ram_bytes is not None:
        free = int(ram_bytes * _FREE_OF_IMAGINED_RAM)
        assumptions.append(f"{_size(free)} of the {_size(ram_bytes)} of main memory are free")
        machine = replace(machine, ram_bytes=ram_bytes, ram_free_bytes=free)
    return replace(machine, assumptions=tuple(assumptions))


def _find_gpu(rates: MeasuredRates | None) -> tuple[Gpu | None, str | None, list[str]]:
    """The card that rimuru would use, or why it would use none, and what had to be assumed."""
    found = nvml.list_cards()
    if not found:
        return None, "no NVIDIA driver answers here", []
    card = nvml.visible_card(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if card is None:
        return None, "CUDA_VISIBLE_DEVICES hides every card", []
    why = _unusable(card)
    if why is not None:
        return None, why, []
    notes: list[str] = []
    measured = rates if rates is not None and rates.device == card.name else None
    gpu = Gpu(
        name=card.name,
        total_bytes=card.total_bytes,
        used_bytes=card.used_bytes,
        memory_gb_per_s=_memory_rate(card, measured, notes),
        tflops=_tflops(card),
        link_gb_per_s=_link_rate(card, measured, notes),
    )
    return gpu, None, notes


def _memory_rate(card: nvml.DriverCard, measured: MeasuredRates | None, notes: list[str]) -> float:
    if measured is not None and measured.copy_gb_per_s is not None:
        return measured.copy_gb_per_s * _READ_OF_COPY
    known = cards.known_rates(card.name)
    if known is not None:
        return known.memory_gb_per_s * _READ_OF_PEAK
    if card.memory_gb_per_s is not None:
        notes.append(f"the memory of {card.name} makes {card.memory_gb_per_s:.0f} GB/s at its peak, by the clock that the driver names")
        return card.memory_gb_per_s * _READ_OF_PEAK
    notes.append(_slow_card(card.name))
    return cards.UNKNOWN.memory_gb_per_s * _READ_OF_PEAK


def _tflops(card: nvml.DriverCard) -> float:
    known = cards.known_rates(card.name)
    if known is not None:
        return known.tflops
    return _BFLOAT16_OF_FLOAT32 * card.float32_tflops if card.float32_tflops else cards.UNKNOWN.tflops


def _link_rate(card: nvml.DriverCard, measured: MeasuredRates | None, notes: list[str]) -> float:
    if measured is not None and measured.link_gb_per_s is not None:
        return measured.link_gb_per_s
    if card.link_generation and card.link_lanes:
        rate = cards.link_gb_per_s(card.link_generation, card.link_lanes)
        if rate is not None:
            notes.append(
                f"the link makes {rate:.0f} GB/s, as PCIe {card.link_generation}.0 with {card.link_lanes} lanes does; "
                "`rimuru doctor` measures it and keeps the figure"
            )
            return rate
    notes.append(f"the link to the card makes {cards.USUAL_LINK_GB_PER_S:.0f} GB/s, as PCIe 4.0 with 16 lanes does")
    return cards.USUAL_LINK_GB_PER_S


def _slow_card(name: str) -> str:
    return f"{name} is taken to be slow: {cards.UNKNOWN.memory_gb_per_s:.0f} GB/s of memory, {cards.UNKNOWN.tflops:.0f} TFLOP/s in bfloat16"


def _unusable(card: nvml.DriverCard) -> str | None:
    """Why rimuru would leave a card alone, as `rimuru_kernels.backend` would find; None when it would not."""
    if card.capability is not None and card.capability < OLDEST_CAPABILITY:
        has, needs = (".".join(map(str, capability)) for capability in (card.capability, OLDEST_CAPABILITY))
        return f"{card.name} has compute capability {has}, and the kernels need {needs}"
    if _torch_is_for_cpus():
        return f"{card.name} is here, but this PyTorch was built without CUDA (run install.sh again)"
    if importlib.util.find_spec("triton") is None:
        return f"{card.name} is here, but the package triton is not installed"
    return None


def _torch_is_for_cpus() -> bool:
    """Whether the installed torch was built without CUDA: read from its version.py, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return True
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    match = _CUDA_VERSION.search(text)
    return match is not None and match["value"].strip() == "None"


def _size(num_bytes: int) -> str:
    """A size as people type it: 12 GiB, 1.5 GiB, 100 MiB, 8 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
