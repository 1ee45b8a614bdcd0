"""Line charts as SVG: a few curves over a common axis, readable in black and white too (dashes differ)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, distinguishable with the common colour vision deficiencies; black is left for the axes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 300, 64, 16, 34, 44


@dataclass(frozen=True)
class Line:
    """One curve; `x` and `y` of one length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One chart; the y axis starts at 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def render_svg(panels: Sequence[Panel]) -> str:
    """A standalone SVG with the panels below one another."""
    height = len(panels) * _HEIGHT
    body = "".join(_panel(panel, index * _HEIGHT) for index, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>{body}</svg>\n'
    )


def ticks(high: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 up to at least `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > 0:
        return [0.0, 1.0]
    step, base = 0.0, 10.0**-12
    while step == 0.0:
        step = next((base * m for m in (1, 2, 5) if base * m * wanted >= high * (1 - 1e-9)), 0.0)
        base *= 10
    count = 0
    while count * step < high * (1 - 1e-9):
        count += 1
    return [i * step for i in range(count + 1)]


def _panel(panel: Panel, top: int) -> str:
    xs = ticks(max((max(line.x, default=0.0) for line in panel.lines), default=0.0), 8)
    ys = ticks(max((max(line.y, default=0.0) for line in panel.lines), default=0.0))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / xs[-1] * width, top + _TOP + height - y / ys[-1] * height

    parts = [f'<text x="{_LEFT}" y="{top + 16}" font-weight="bold">{escape(panel.title)}</text>']
    for y in ys:
        left, level = at(0, y)
        parts.append(f'<line x1="{left:.1f}" y1="{level:.1f}" x2="{left + width:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{level + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in xs:
        place, bottom = at(x, 0)
        parts.append(f'<text x="{place:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{_number(x)}</text>')
    middle, bottom = at(xs[-1] / 2, 0)
    parts.append(f'<text x="{middle:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.append(
        f'<text x="14" y="{top + _TOP + height / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {top + _TOP + height / 2:.1f})">{escape(panel.y_label)}</text>'
    )
    legend = float(_LEFT + 8 * len(panel.title) + 24)
    for index, line in enumerate(panel.lines):
        style = f'stroke="{_COLOURS[index % 6]}" stroke-dasharray="{_DASHES[index % 6]}"'
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in zip(line.x, line.y, strict=True)))
        parts.append(f'<polyline points="{points}" fill="none" stroke-width="1.8" {style}/>')
        parts.append(f'<line x1="{legend:.1f}" y1="{top + 12}" x2="{legend + 22:.1f}" y2="{top + 12}" stroke-width="2.5" {style}/>')
        parts.append(f'<text x="{legend + 27:.1f}" y="{top + 16}">{escape(line.name)}</text>')
        legend += 44 + 7 * len(line.name)
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"
