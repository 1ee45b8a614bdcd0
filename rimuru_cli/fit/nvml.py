"""Graphics cards as NVIDIA's driver describes them, asked through its management library (NVML) with ctypes: milliseconds, and no torch.

Function names and struct layouts: NVIDIA's NVML API reference; `nvmlDeviceGetMemoryInfo` (version 1) fills total, free, used as unsigned
64-bit integers. Whatever a driver does not answer stays None; without a driver there are no cards.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass

_NAME_BYTES = 96
_MEMORY_CLOCK, _SM_CLOCK = 2, 1
_WINDOWS_PLACES = (r"System32\nvml.dll",)
_LINUX_PLACES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")


@dataclass(frozen=True)
class DriverCard:
    """One card.

    Attributes:
        total_bytes, used_bytes: of its memory, now.
        capability: compute capability, as (8, 9).
        link_generation, link_lanes: the fastest PCIe link that card and system can make together.
        memory_gb_per_s: peak bandwidth of its memory from clock and bus width: both edges of the clock carry data.
        float32_tflops: from the number of its cores and their highest clock, two operations a core and cycle.
    """

    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int] | None
    link_generation: int | None
    link_lanes: int | None
    memory_gb_per_s: float | None
    float32_tflops: float | None


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


def list_cards(library: ctypes.CDLL | None = None) -> list[DriverCard]:
    """All cards in the driver's order; empty without a driver or with one that does not answer.

    Args:
        library: for tests; the driver's own by default.
    """
    library = library or _open()
    try:
        if library is None or library.nvmlInit_v2() != 0:
            return []
        try:
            count = c_uint(0)
            if library.nvmlDeviceGetCount_v2(byref(count)) != 0:
                return []
            return [card for index in range(count.value) if (card := _card(library, index)) is not None]
        finally:
            library.nvmlShutdown()
    except AttributeError:  # not the library that its name promises
        return []


def _open() -> ctypes.CDLL | None:
    places = _LINUX_PLACES
    if sys.platform == "win32":
        places = tuple(os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), place) for place in _WINDOWS_PLACES)
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def _card(library: ctypes.CDLL, index: int) -> DriverCard | None:
    handle = c_void_p()
    memory = _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) != 0:
        return None
    memory_mhz, bus_bits = _number(library, "nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK), _bus_bits(library, handle)
    cores_mhz, cores = (
        _number(library, "nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
        _number(library, "nvmlDeviceGetNumGpuCores", handle),
    )
    return DriverCard(
        name=_text(library, "nvmlDeviceGetName", handle) or "NVIDIA GPU",
        uuid=_text(library, "nvmlDeviceGetUUID", handle) or "",
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        capability=_capability(library, handle),
        link_generation=_number(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        link_lanes=_number(library, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        memory_gb_per_s=2 * memory_mhz * bus_bits / 8 / 1000 if memory_mhz and bus_bits else None,
        float32_tflops=2 * cores * cores_mhz / 1e6 if cores and cores_mhz else None,
    )


def _bus_bits(library: ctypes.CDLL, handle: c_void_p) -> int | None:
    return _number(library, "nvmlDeviceGetMemoryBusWidth", handle)


def _number(library: ctypes.CDLL, function: str, handle: c_void_p, *kind: int) -> int | None:
    """What a function of (handle, kind…, &unsigned) answers; None when the driver is too old for it or refuses."""
    value = c_uint(0)
    try:
        status = getattr(library, function)(handle, *(c_int(one) for one in kind), byref(value))
    except AttributeError:
        return None
    return int(value.value) if status == 0 and value.value else None


def _text(library: ctypes.CDLL, function: str, handle: c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    try:
        status = getattr(library, function)(handle, ctypes.cast(buffer, c_char_p), c_uint(_NAME_BYTES))
    except AttributeError:
        return None
    return buffer.value.decode("utf-8", "replace").strip() if status == 0 else None


def _capability(library: ctypes.CDLL, handle: c_void_p) -> tuple[int, int] | None:
    major, minor = c_int(0), c_int(0)
    try:
        status = library.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor))
    except AttributeError:
        return None
    return (major.value, minor.value) if status == 0 else None


def visible_card(cards: list[DriverCard], visible: str | None) -> DriverCard | None:
    """The card that a CUDA program would use first.

    Args:
        cards: in the driver's order.
        visible: CUDA_VISIBLE_DEVICES: numbers or beginnings of UUIDs, separated by commas, read up to the first that names no card; None:
            not set. Without it CUDA counts the fastest card as the first; the one with most memory is taken to be that.
    """
    if visible is None:
        return max(cards, key=lambda card: card.total_bytes, default=None)
    first = visible.split(",")[0].strip()
    if first.isdecimal():
        return cards[int(first)] if int(first) < len(cards) else None
    return next((card for card in cards if first and card.uuid.lower().startswith(first.lower())), None)
