"""The last minutes as charts: composition, hit rate, link, speed."""

from __future__ import annotations

from typing import Final

import numpy as np
from textual.strip import Strip

from rimuru_cli.engine.telemetry.frame import KINDS
from rimuru_cli.tui import words
from rimuru_cli.tui.palette import Palette
from rimuru_cli.tui.plots import Floats, Scale, headroom_scale, linear_scale, series, stacked_area
from rimuru_cli.tui.widgets.strips import StripWidget, heading

_LABEL: Final = 5
_STACK: Final = ("expert", "buffer", "kv", "ssm", "conv", "tail", "free")


class CompositionChart(StripWidget):
    """What the pool was made of: stacked areas over time."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading and chart."""
        frame = self.pool.frame
        if frame is None or height < 2:
            return []
        columns = self.pool.history.columns(self.pool.shown_seconds, width)
        order = [KINDS.index(name) for name in _STACK]
        # The pool may have had another size before, under another ceiling.
        shares = columns.composition[order] / max(1.0, float(np.nanmax(columns.composition.sum(axis=0), initial=1.0)))
        title = f"pool, {span(self.pool.shown_seconds)}"
        body = stacked_area(shares, _STACK, height - 1, self.palette)
        return [heading(title, width, self.palette), *(strip.adjust_cell_length(width) for strip in body)]


class HitChart(StripWidget):
    """Hits among the experts' selections, on an axis that tells 99 from 99.9 %."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading and chart."""
        if self.pool.frame is None or height < 2:
            return []
        columns = self.pool.history.columns(self.pool.shown_seconds, max(1, width - _LABEL))
        title = f"hits {words.percent(self.pool.hit_rate)}"
        return chart(title, columns.hit_rate, headroom_scale(), width, height, self.palette, "expert")


class LinkChart(StripWidget):
    """Bytes a second from the host tier, against what the link was measured to give."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading and chart."""
        frame = self.pool.frame
        if frame is None or height < 2:
            return []
        columns = self.pool.history.columns(self.pool.shown_seconds, max(1, width - _LABEL))
        values = columns.link_rate / 1e9
        limit = frame.engine.link_ceiling
        rate = words.rate(frame.counters.link_rate)
        if limit is not None and limit >= 1.0:  # a recording may claim anything
            title = f"link {rate} of {words.rate(limit)} GB/s"
            scale = Scale(lambda value: value / (limit / 1e9), ((limit / 1e9, f"{limit / 1e9:.3g}"), (limit / 2e9, f"{limit / 2e9:.3g}")))
        else:
            title = f"link {rate} GB/s"
            scale = linear_scale(float(np.nanmax(values, initial=0.0)))
        return chart(title, values, scale, width, height, self.palette, "buffer")


class SpeedChart(StripWidget):
    """Tokens a second: of the answer, or of the prompt while one is read."""

    def lines(self, width: int, height: int) -> list[Strip]:
        """Heading and chart."""
        frame = self.pool.frame
        if frame is None or height < 2:
            return []
        columns = self.pool.history.columns(self.pool.shown_seconds, max(1, width - _LABEL))
        now = frame.counters
        reading = now.prefill_rate > 0 and now.decode_rate <= 0
        values = columns.prefill_rate if reading else columns.decode_rate
        title = f"{'prompt' if reading else 'answer'} {words.tokens_rate(now.prefill_rate if reading else now.decode_rate)} tok/s"
        scale = linear_scale(float(np.nanmax(values, initial=0.0)))
        return chart(title, values, scale, width, height, self.palette, "conv" if reading else "kv")


def chart(title: str, values: Floats, scale: Scale, width: int, height: int, palette: Palette, kind: str) -> list[Strip]:
    """A heading over a series that ends at the right edge."""
    body = series(values, scale, height - 1, palette, kind=kind, label_width=_LABEL)
    return [heading(title, width, palette), *(strip.adjust_cell_length(width) for strip in body)]


def span(seconds: float) -> str:
    """A length of time in a heading."""
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
