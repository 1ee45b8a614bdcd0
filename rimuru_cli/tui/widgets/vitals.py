"""The figures: speed, first token, hits, link, context, experts, host tier. One line of them on a small screen, two on a larger one."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from rimuru_cli.tui import words
from rimuru_cli.tui.palette import Palette, colour_style
from rimuru_cli.tui.state import PoolState
from rimuru_cli.tui.widgets.strips import StripWidget


@dataclass(frozen=True)
class Figure:
    """A name, a value, and the room that they always take, so that nothing moves when a number grows."""

    name: str
    value: str
    unit: str
    room: int


class Vitals(StripWidget):
    """Lays figures out in places that stay; what does not fit is left out, from the end."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """As many figures as fit, the most important ones first."""
        lines: list[list[Figure]] = [[]]
        left = width
        for figure in figures_of(self.pool):
            if figure.room > left + 2:  # the space at its end may be cut
                if len(lines) == height:
                    break
                lines.append([])
                left = width
            lines[-1].append(figure)
            left -= figure.room
        return [_line(line, width, self.palette) for line in lines if line]


def _line(figures: list[Figure], width: int, palette: Palette) -> Strip:
    soft = colour_style(palette.soft) if palette.colours else Style(dim=True)
    segments = []
    for figure in figures:
        name = figure.name + " "
        value = words.fit(figure.value, figure.room - len(name) - 1)
        unit = f" {figure.unit}" if figure.unit and len(name) + len(figure.value) + len(figure.unit) + 2 <= figure.room else ""
        segments += [Segment(name, soft), Segment(value, Style(bold=True)), Segment(unit, soft)]
        segments.append(Segment(" " * (figure.room - len(name) - cell_len(value) - len(unit))))
    return Strip(segments).adjust_cell_length(width)


def figures_of(pool: PoolState) -> list[Figure]:
    """All figures of the newest frame, in the order of the screen."""
    frame = pool.frame
    if frame is None:
        return []
    now, engine = frame.counters, frame.engine
    prefilling = now.prefill_rate > 0 and now.decode_rate <= 0
    rate = now.prefill_rate if prefilling else now.decode_rate
    ceiling = f"/{words.rate(engine.link_ceiling)}" if engine.link_ceiling else ""
    share = now.resident_experts / now.total_experts if now.total_experts else None
    host = words.size(engine.host_bytes)
    mapped = engine.host_bytes - engine.host_pinned_bytes
    tier = "pinned" if mapped <= 0 else "mapped" if engine.host_pinned_bytes <= 0 else f"{words.size(mapped)} of it mapped"
    return [
        Figure("prompt" if prefilling else "answer", words.tokens_rate(rate), "tok/s", 21),
        Figure("hits", words.percent(pool.hit_rate), "", 14),
        Figure("link", f"{words.rate(now.link_rate)}{ceiling}", "GB/s", 22),
        Figure("context", f"{now.context_used:,} of {now.context_possible:,}", "", 29),
        Figure("TTFT", words.seconds(now.ttft), "", 13),
        *([Figure("not kept", f"{now.states_not_kept:,}", "states", 23)] if now.states_not_kept else []),
        Figure("ceiling", words.size(engine.ceiling_bytes), "", 19),
        Figure("experts", f"{now.resident_experts:,} of {now.total_experts:,}", words.percent(share), 30),
        Figure("host", host, tier, 37 if mapped and engine.host_pinned_bytes else 23),
        Figure("sequences", f"{now.running} run", f"{now.waiting} wait" if now.waiting else "", 25),
        Figure("swaps", f"{now.swaps:,}", "", 14),
        Figure("for reuse", f"{now.cached_tokens:,}", "tok", 23),
        Figure("splits", f"{now.splits:,}", f"{now.merges:,} merged", 30),
    ]
