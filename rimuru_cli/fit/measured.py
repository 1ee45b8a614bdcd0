"""Rates that `rimuru doctor` measured on this machine, kept so that `rimuru fit` need not guess them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rimuru_cli.hub.paths import data_dir

FORMAT = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class MeasuredRates:
    """Decimal GB per second; None where something was not measured.

    Attributes:
        device: name of the card that the first two belong to; None without one.
        link_gb_per_s: copies of page-locked memory to the card.
        copy_gb_per_s: copies within the card's memory, bytes read and bytes written both counted.
        ram_gb_per_s: reading main memory.
        measured_at: ISO time.
    """

    device: str | None
    link_gb_per_s: float | None
    copy_gb_per_s: float | None
    ram_gb_per_s: float | None
    measured_at: str


def rates_file() -> Path:
    """Where the rates are kept."""
    return data_dir() / "measured.json"


def rates_of(link: dict[str, Any]) -> MeasuredRates:
    """The rates in a report of `bench.link.run_link_bench`, as of now."""
    best = link["best"]
    return MeasuredRates(
        device=link["device"],
        link_gb_per_s=best["host_to_device"],
        copy_gb_per_s=best["copy_on_device"],
        ram_gb_per_s=best["host_read"],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def save_rates(rates: MeasuredRates) -> bool:
    """Keep them, replacing older ones in one step. False where nothing can be written; a measurement is still worth showing then."""
    file = rates_file()
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"format": FORMAT, **asdict(rates)}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        return False
    return True


def load_rates() -> MeasuredRates | None:
    """What was measured last; None when nothing was, or the file cannot be understood."""
    file = rates_file()
    try:
        if file.stat().st_size > _MOST_BYTES:
            return None
        value = json.loads(file.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            return None
        device = value["device"]
        return MeasuredRates(
            device=None if device is None else str(device),
            link_gb_per_s=_rate(value["link_gb_per_s"]),
            copy_gb_per_s=_rate(value["copy_gb_per_s"]),
            ram_gb_per_s=_rate(value["ram_gb_per_s"]),
            measured_at=str(value["measured_at"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _rate(value: object) -> float | None:
    """A rate as it can be; None for one that cannot."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        return None
    return float(value)
