"""Words for what the dashboard shows: owners of pages, amounts, times. Everything here returns text."""

from __future__ import annotations

import math
import time

from rich.cells import cell_len, set_cell_size

from rimuru_cli.engine.telemetry.frame import BUFFER, CONV, EXPERT, FREE, KV, NOBODY, PROJECTIONS, SSM, TAIL, EngineIdentity, Frame
from rimuru_cli.output import CONTROLS, format_bytes

KIND_WORDS = {
    FREE: "free",
    EXPERT: "expert",
    BUFFER: "loading buffer",
    KV: "KV cache",
    SSM: "SSM state",
    CONV: "convolution row",
    TAIL: "page tail",
}
_LEVELS = {1: "huge page", 2: "page", 3: "small page"}
# Text from a model or a checkpoint must not reach the terminal as escape codes.
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_CLEAN = {**CONTROLS, 0x09: "    ", **_SURROGATES}


def clean(text: str) -> str:
    """Text that may go to a terminal: no control characters but line breaks, no halves of surrogate pairs."""
    return text.translate(_CLEAN)


def owner(frame: Frame, page: int) -> str:
    """Who owns a page: "layer 12 · expert 87 · gate", "sequence 3 · layer 5 · tokens 64–79", or what else it is."""
    pages, engine = frame.pages, frame.engine
    kind, layer, number, part = int(pages.kind[page]), int(pages.layer[page]), int(pages.owner[page]), int(pages.part[page])
    where = f"layer {layer}" if layer != NOBODY else "no layer"
    if kind == EXPERT:
        return f"{where} · expert {number} · {projection(engine, layer, part)}"
    if kind == KV:
        tokens = f"tokens {part:,}–{part + engine.block_tokens - 1:,}" if part >= 0 else "tokens unknown"
        who = "kept for reuse" if number == NOBODY else f"sequence {number}"
        return f"{who} · {where} · {tokens}"
    if kind == SSM:
        return f"{_sequence(number)} · {where} · recurrent state"
    if kind == CONV:
        return f"{_sequence(number)} · {where} · convolution row {part}"
    return {FREE: "nobody", BUFFER: "experts on their way", TAIL: "nobody: too small for another page"}[kind]


def short_owner(frame: Frame, page: int, width: int) -> str:
    """As much of the owner as fits into a tile of a map."""
    pages = frame.pages
    kind, layer, number, part = int(pages.kind[page]), int(pages.layer[page]), int(pages.owner[page]), int(pages.part[page])
    if kind == EXPERT:
        name = projection(frame.engine, layer, part)
        choices = [f"layer {layer} · expert {number} · {name}", f"L{layer} E{number} {name}", f"L{layer} E{number}", f"{number}"]
    elif kind == KV:
        who = "reuse" if number == NOBODY else f"seq {number}"
        choices = [
            f"{who} · layer {layer} · tokens {part}–{part + frame.engine.block_tokens - 1}",
            f"{who} L{layer} @{part}",
            f"L{layer} @{part}",
        ]
        choices += [f"@{part}", f"L{layer}"]
    elif kind in (SSM, CONV):
        choices = [f"seq {number} · layer {layer} · {'state' if kind == SSM else f'row {part}'}", f"s{number} L{layer}", f"L{layer}"]
    else:
        choices = [KIND_WORDS[kind], KIND_WORDS[kind][:4]]
    return next((choice for choice in choices if len(choice) <= width), "")


def projection(engine: EngineIdentity, layer: int, part: int) -> str:
    """ "gate", "up" or "down" of a model layer's expert, with the tile where projections are cut into tiles."""
    row = engine.moe_layers.index(layer) if layer in engine.moe_layers else 0
    wide, down = engine.tiles_of(row)
    for name, tiles in zip(PROJECTIONS, (wide, wide, down), strict=True):
        if 0 <= part < tiles:
            return name if tiles == 1 else f"{name}, tile {part + 1} of {tiles}"
        part -= tiles
    return "part unknown"


def expert_pages(engine: EngineIdentity) -> str:
    """How many pages an expert has."""
    counts = {2 * wide + down for wide, down in map(engine.tiles_of, range(engine.num_moe_layers))}
    return " or ".join(f"{count}" for count in sorted(counts))


def level(number: int) -> str:
    """The name of a page's level."""
    return f"L{number} {_LEVELS.get(number, 'remainder')}"


def steps_ago(step: int, now: int) -> str:
    """When a step was, seen from now."""
    if step < 0:
        return "not known"
    gone = max(0, now - step)
    return "in this step" if gone == 0 else f"{gone:,} step{'s' if gone != 1 else ''} ago (step {step:,})"


def rate(num_bytes: float | None) -> str:
    """A speed of copies in decimal gigabytes a second, as links are sold."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return "-"
    if num_bytes == 0:
        return "0"
    giga = num_bytes / 1e9
    return f"{giga:.0f}" if giga >= 100 else f"{giga:.1f}" if giga >= 1 else f"{giga:.2f}"


def percent(share: float | None) -> str:
    """A share, with more digits near the top, and never 100 % unless it is: 0.512 -> 51 %, 0.9312 -> 93.1 %, 0.99962 -> 99.96 %."""
    if share is None or not math.isfinite(share):
        return "-"
    value = share * 100
    if value >= 100:
        return "100 %"
    digits = 2 if value >= 99 else 1 if value >= 90 else 0
    shown = math.floor(value * 10**digits) / 10**digits
    return f"{shown:.{digits}f} %"


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds_clock(value: float) -> str:
    """A position in a recording: minutes and seconds."""
    minutes, rest = divmod(int(max(0.0, value)), 60)
    return f"{minutes}:{rest:02d}"


def clock(moment: float) -> str:
    """The time of day of a moment, in seconds since 1970."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(moment))
    except (OSError, OverflowError, ValueError):  # a recording may name a moment that no calendar has
        return "--:--:--"


def tokens_rate(value: float | None) -> str:
    """Tokens a second."""
    if value is None or not math.isfinite(value) or value <= 0:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def size(num_bytes: float) -> str:
    """An amount of memory."""
    return format_bytes(num_bytes)


def fit(text: str, width: int) -> str:
    """Text cut to a width in columns, with a mark where something is missing."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


def _sequence(number: int) -> str:
    return "no sequence" if number == NOBODY else f"sequence {number}"
