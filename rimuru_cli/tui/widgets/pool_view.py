"""Everything about one pool in one place; as much of it as the room allows, and one of five views of it."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.events import Resize

from rimuru_cli.tui.widgets.charts import CompositionChart, HitChart, LinkChart, SpeedChart
from rimuru_cli.tui.widgets.composition import CompositionBar
from rimuru_cli.tui.widgets.heat_map import HeatMap, expert_words
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.ribbon import EventRibbon
from rimuru_cli.tui.widgets.status import WAITING, AdvisorLine, DetailLine, TitleLine, WaitingPanel
from rimuru_cli.tui.widgets.strips import StripWidget
from rimuru_cli.tui.widgets.tiles import page_words
from rimuru_cli.tui.widgets.vitals import Vitals

VIEWS: Final = ("all", "pool", "experts", "history", "events")
HINT: Final = "Arrows move, Enter zooms, Tab goes on, 1-5 are views, ? explains everything."

_SLOW_SECONDS: Final = 0.5
_CHART_SECONDS: Final = 1.0


class PoolView(Container):
    """The dashboard of the newest frame.

    Args:
        waiting: what to say before the first frame.

    Attributes:
        view: which of `VIEWS` is shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view('{name}')", name.capitalize(), show=False) for number, name in enumerate(VIEWS, start=1)),
    ]
    DEFAULT_CSS = """
    PoolView { height: 1fr; width: 1fr; layout: vertical; }
    PoolView > TitleLine { height: 1; }
    PoolView > Vitals { height: 2; }
    PoolView > AdvisorLine { height: 1; }
    PoolView > CompositionBar { height: 2; }
    PoolView > WaitingPanel { height: 1fr; }
    PoolView > #middle { height: 5fr; }
    PoolView > #middle > PageMap { width: 1fr; }
    PoolView > #middle > HeatMap { margin-left: 2; }
    PoolView > #charts { height: 2fr; min-height: 5; max-height: 12; }
    PoolView > #charts > StripWidget { width: 1fr; margin-left: 2; }
    PoolView > #charts > CompositionChart { width: 2fr; margin-left: 0; }
    PoolView > EventRibbon { height: 3; }
    PoolView > DetailLine { height: 1; }
    PoolView.-low > EventRibbon { height: 2; }
    PoolView.-low > Vitals { height: 1; }
    PoolView.-small > #charts { display: none; }
    PoolView.-small #middle > HeatMap { display: none; }
    PoolView.-tiny > #middle, PoolView.-tiny > EventRibbon { display: none; }
    PoolView.-tiny > WaitingPanel { height: 3; }
    PoolView.-narrow > Vitals { height: 3; }

    PoolView.pool > #charts, PoolView.pool #middle > HeatMap { display: none; }
    PoolView.experts > #charts, PoolView.experts #middle > PageMap { display: none; }
    PoolView.experts #middle > HeatMap { display: block; margin-left: 0; }
    PoolView.history > #middle, PoolView.events > #middle { display: none; }
    PoolView.history > #charts { display: block; layout: grid; grid-size: 2; grid-gutter: 0 2; height: 1fr; max-height: 100%; }
    PoolView.history > #charts > StripWidget { width: 1fr; margin-left: 0; height: 100%; }
    PoolView.events > #charts { display: none; }
    PoolView.events > EventRibbon { height: 1fr; }

    PoolView.-waiting > WaitingPanel { display: block; }
    PoolView > WaitingPanel { display: none; }
    PoolView.-waiting > #middle, PoolView.-waiting > #charts, PoolView.-waiting > EventRibbon, PoolView.-waiting > CompositionBar,
    PoolView.-waiting > Vitals { display: none; }
    """

    def __init__(self, *, waiting: tuple[str, ...] = WAITING, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._waiting = waiting
        self.view = "all"
        self._slow_at = self._charts_at = -1.0
        self._cell: tuple[int, int] | None = None
        self.add_class("-waiting")

    def compose(self) -> ComposeResult:
        """All parts; styles decide which of them show."""
        yield TitleLine()
        yield Vitals()
        yield AdvisorLine()
        yield CompositionBar()
        yield WaitingPanel(self._waiting)
        with Horizontal(id="middle"):
            yield PageMap()
            yield HeatMap()
        with Horizontal(id="charts"):
            yield CompositionChart()
            yield HitChart()
            yield LinkChart()
            yield SpeedChart()
        yield EventRibbon()
        yield DetailLine(HINT)

    def on_resize(self, event: Resize) -> None:
        """Less room, fewer parts."""
        width, height = event.size
        self.set_class(height < 22, "-low")
        self.set_class(width < 100 or height < 30, "-small")
        self.set_class(height < 14, "-tiny")
        self.set_class(width < 60 and height >= 20, "-narrow")
        self._share_out()
        self.call_after_refresh(self._keep_focus)

    def _keep_focus(self) -> None:
        """A part that had the keyboard may have vanished for want of room; somebody must have it as soon as there is room again."""
        page_map = self.query_one(PageMap)
        if self.screen.focused is None and page_map.is_on_screen:
            page_map.focus()

    def _share_out(self) -> None:
        """The heat map takes what its table can use, up to two fifths; the map takes the rest."""
        heat = self.query_one(HeatMap)
        heat.styles.width = "1fr" if self.view == "experts" else heat.room_wanted(max(20, self.size.width * 2 // 5))

    def show_frame(self, *, everything: bool = False) -> None:
        """Draw the newest frame: the map at once, figures twice a second, charts once a second; all of it when asked."""
        if not self.is_attached or not self.children:  # not composed yet, or about to be taken away
            return
        state = self.query_one(TitleLine).pool
        waiting = state.frame is None
        if self.has_class("-waiting") != waiting:
            self.set_class(waiting, "-waiting")
            everything = True
            self._share_out()
        now = state.clock()
        page_map = self.query_one(PageMap)
        if page_map.display and not waiting:
            page_map.show_frame()
        if everything or now - self._slow_at >= _SLOW_SECONDS:
            self._slow_at = now
            self._update(TitleLine, Vitals, AdvisorLine, CompositionBar, HeatMap, EventRibbon)
            self._show_detail()
        if everything or now - self._charts_at >= _CHART_SECONDS:
            self._charts_at = now
            self._update(CompositionChart, HitChart, LinkChart, SpeedChart)

    def redraw(self) -> None:
        """Everything anew, after another theme or another engine."""
        for widget in self.query(StripWidget):
            widget.restyle()
        self.query_one(PageMap).update_lines()
        self.show_frame(everything=True)

    def tell(self, text: str, seconds: float = 8.0) -> None:
        """Say something in the line at the bottom."""
        self.query_one(DetailLine).tell(text, seconds)

    def action_view(self, view: str) -> None:
        """Another view of the same pool."""
        self.remove_class(*VIEWS)
        self.view = view
        self.add_class(view)
        self._share_out()
        self.call_after_refresh(self._entered)

    def _entered(self) -> None:
        """The part that a view is about gets the keyboard."""
        part = {"pool": PageMap, "experts": HeatMap, "events": EventRibbon}.get(self.view)
        if part is not None:
            self.query_one(part).focus()
        self.redraw()

    def on_page_map_looked(self, event: PageMap.Looked) -> None:
        """The cursor of the map moved."""
        self._cell = None
        self._show_detail()

    def on_heat_map_looked(self, event: HeatMap.Looked) -> None:
        """The cursor of the heat map moved."""
        self._cell = event.cell
        self._show_detail()

    def _show_detail(self) -> None:
        """Tell what is under the cursor, as it is now."""
        line = self.query_one(DetailLine)
        frame, huge = line.pool.frame, self.query_one(PageMap).cursor
        text = None
        if frame is not None and self._cell is not None:
            text = expert_words(frame, self._cell)
        elif frame is not None and huge is not None and len(frame.pages):
            page = frame.pages.at(huge * frame.engine.huge_page_bytes)
            text = f"huge page {huge:,}: {page_words(frame, page)}"
        line.detail(text)

    def _update(self, *kinds: type[StripWidget]) -> None:
        """Draw those that can be seen; a hidden advisor must look whether it should show."""
        for kind in kinds:
            widget = self.query_one(kind)
            if kind is AdvisorLine or (widget.display and widget.parent is not None and getattr(widget.parent, "display", True)):
                widget.update_lines()
