"""What a person types after `rimuru fit`, read and put into the machine."""

from __future__ import annotations

import math

from rimuru_cli.fit.machine import Machine, imagined, this_machine
from rimuru_cli.settings import MemorySize, parse_size
from rimuru_models.errors import UsageError

_MOST_GB_PER_S = 10_000.0
_LEAST_BYTES = 1 << 20


def wished_machine(*, vram: str | None, ram: str | None, link: str | None, machine: Machine | None = None) -> Machine:
    """This machine (or `machine`) with what was asked for put in.

    Args:
        vram: most graphics memory: a size, or a share of the card's.
        ram: main memory in all: a size, or a share of what there is.
        link: rate of copies to the card in decimal GB per second, with or without the unit.

    Raises:
        UsageError: one of them cannot be read, or is of a card that is not there.
    """
    sizes = {flag: _size(flag, text) for flag, text in (("--vram", vram), ("--ram", ram)) if text is not None}
    rate = None if link is None else _rate(link)
    machine = machine or this_machine()
    vram_size, ram_size = sizes.get("--vram"), sizes.get("--ram")
    if vram_size is not None and vram_size.share is not None and machine.gpu is None:
        raise UsageError(f"--vram: {vram} of what? No card is used here ({machine.why_no_gpu}).", hint="Write it like 12GiB.")
    if rate is not None and machine.gpu is None and vram_size is None:
        raise UsageError(
            f"--link: there is no card to link to ({machine.why_no_gpu}).", hint="Add --vram to imagine one, as in --vram 12GiB --link 25."
        )
    total = machine.gpu.total_bytes if machine.gpu is not None else 0
    return imagined(
        machine,
        vram_bytes=None if vram_size is None else vram_size.of(total),
        ram_bytes=None if ram_size is None else ram_size.of(machine.ram_bytes),
        link_gb_per_s=rate,
    )


def _size(flag: str, text: str) -> MemorySize:
    try:
        size = parse_size(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error.what}", hint=error.hint) from error
    if size.num_bytes is not None and size.num_bytes < _LEAST_BYTES:
        raise UsageError(
            f"{flag}: {text.strip()} is {size.num_bytes} bytes, far too little.", hint=f"Did you forget the unit, as in {flag} 12GiB?"
        )
    return size


def _rate(text: str) -> float:
    try:
        rate = float(text.strip().lower().removesuffix("gb/s").strip())
    except ValueError:
        rate = math.nan
    if not 0 < rate <= _MOST_GB_PER_S:
        raise UsageError(f"--link: {text[:40]!r} is not a rate in GB/s.", hint="Write it like 25; PCIe 4.0 with 16 lanes makes about that.")
    return rate
