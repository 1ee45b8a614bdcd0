"""The app: it owns the state, the bridge to the source, and the keys that work everywhere. `run_dashboard` is the way in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final

from textual.app import App
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.filter import ANSIToTruecolor, NoColor
from textual.screen import Screen

from rimuru_cli.engine.telemetry.sources import FrameSource
from rimuru_cli.tui import words
from rimuru_cli.tui.bridge import FPS, FrameBridge
from rimuru_cli.tui.ceiling import CeilingDesk
from rimuru_cli.tui.keys_thread import patient
from rimuru_cli.tui.messages import CeilingAsked, EnginesListed, FrameArrived, SourceFailed
from rimuru_cli.tui.palette import Palette, terminal_depth
from rimuru_cli.tui.screens.dashboard import DashboardScreen
from rimuru_cli.tui.screens.dialogs import EnginesScreen, HelpScreen, InfoScreen
from rimuru_cli.tui.screens.huge_page import HugePageScreen
from rimuru_cli.tui.state import PoolState
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.pool_view import PoolView
from rimuru_cli.tui.widgets.strips import StripWidget

THEMES: Final = (
    "textual-dark",
    "nord",
    "gruvbox",
    "dracula",
    "tokyo-night",
    "catppuccin-mocha",
    "solarized-dark",
    "textual-light",
    "solarized-light",
)
ANSI_THEMES: Final = ("ansi-dark", "ansi-light")
WINDOWS: Final = (60.0, 120.0, 300.0, 600.0)
_SPEEDS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SEEK_SECONDS: Final = 5.0
INTERRUPT_SECONDS: Final = 3.0


class RimuruApp(App[int]):
    """The dashboard; subclasses add a chat.

    Args:
        source: where frames come from; the app closes it.
        fps: frames a second at most.
        theme: name of a theme to begin with.
        environ: the environment, for the terminal's colours; the process's when None.

    Attributes:
        pool: what is shown.
        palette: how it looks here.
        frozen: whether the person stopped a live picture.
        failure: what went wrong, if that ended the app.
    """

    TITLE = "rimuru"
    ENABLE_COMMAND_PALETTE = False
    AWAITS_ENGINES = True
    """Whether another engine will be shown when this one has ended."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("f1", "help", "Help", show=False),
        Binding("plus,equals_sign", "ceiling(1)", "Ceiling", key_display="+"),
        Binding("minus", "ceiling(-1)", "Ceiling", key_display="-"),
        Binding("p", "pause", "Pause"),
        Binding("w", "window", "Minutes"),
        Binding("e", "engines", "Engines"),
        Binding("i", "info", "Info"),
        Binding("t", "theme", "Theme"),
        Binding("s", "picture", "Picture", show=False),
        Binding("comma", "seek(-1)", "Back", show=False),
        Binding("full_stop", "seek(1)", "On", show=False),
        Binding("less_than_sign", "speed(-1)", "Slower", show=False),
        Binding("greater_than_sign", "speed(1)", "Faster", show=False),
        Binding("ctrl+c", "interrupt", "Leave", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
    ]

    def __init__(
        self, source: FrameSource, *, fps: float = FPS, theme: str | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        depth = terminal_depth(os.environ if environ is None else environ)
        # Sixteen colours, or none, are the terminal's own: textual must not turn them into others.
        own_colours = depth in ("16", "none")
        super().__init__(ansi_color=True if own_colours else None)
        # An empty NO_COLOR means nothing, and a full one means no colours at all, not shades of grey.
        self.no_color = depth == "none"
        self._filters = [*(each for each in self._filters if isinstance(each, ANSIToTruecolor)), *([NoColor()] if self.no_color else [])]
        self.pool = PoolState()
        self.palette = Palette(depth)
        self.frozen = False
        self.failure: Exception | None = None
        self._themes = ANSI_THEMES if own_colours else THEMES
        self._wanted_theme = theme if theme in self.available_themes and not own_colours else self._themes[0]
        self._bridge = FrameBridge(source, self.post_message, fps)
        self._ceiling = CeilingDesk(self.pool, self.tell, self._ask_for_ceiling)
        self._interrupted_at = -INTERRUPT_SECONDS
        self._speed = 1.0

    def on_mount(self) -> None:
        """Colours first, then the screen, then frames."""
        self.theme_changed_signal.subscribe(self, lambda theme: self._theme_changed())
        self.theme = self._wanted_theme
        self._theme_changed()
        self.push_screen(self.first_screen())
        self._bridge.start()

    def on_unmount(self) -> None:
        """No more frames."""
        self._bridge.stop()

    def let_go(self) -> None:
        """Close everything that is not the terminal's. May be called twice, also if the app never ran."""
        self._bridge.stop()

    def get_driver_class(self) -> type[Driver]:
        """What reads keys and draws."""
        return patient(super().get_driver_class())

    @property
    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the running app."""
        return self._loop

    def _handle_exception(self, error: Exception) -> None:
        """End the app; whoever runs it reports the failure in rimuru's own words instead of a traceback."""
        self._return_code = 1
        if self._exception is None:
            self._exception = error
            self._exception_event.set()
        self.failure = self.failure or error
        self._close_messages_no_wait()

    def first_screen(self) -> Screen[Any]:
        """What is shown at the beginning."""
        return DashboardScreen()

    # Frames

    def on_frame_arrived(self, event: FrameArrived) -> None:
        """Take a frame in and draw it."""
        try:
            changed = event.status.state != self.pool.status.state
            self.pool.status = event.status
            if event.frame is not None and not self.frozen:
                self.pool.add(event.frame)
            self._ceiling.settle()
            self._draw(everything=changed)
        finally:
            self._bridge.taken()

    def on_engines_listed(self, event: EnginesListed) -> None:
        """Another list of engines."""
        self.pool.engines = event.engines

    def on_source_failed(self, event: SourceFailed) -> None:
        """Without frames there is nothing to show: leave, and say why on the way out."""
        self.failure = event.error
        self.exit(1)

    def _draw(self, *, everything: bool = False) -> None:
        if not self.screen_stack:  # leaving
            return
        screen = self.screen
        # A screen that is just being taken away has lost some of its parts already.
        with contextlib.suppress(NoMatches):
            if isinstance(screen, HugePageScreen):
                screen.show_frame(everything=everything)
                return
            for view in screen.query(PoolView):
                view.show_frame(everything=everything)

    def tell(self, text: str, seconds: float = 8.0) -> None:
        """Say something in the line at the bottom, or in a corner where there is none."""
        views = self.screen.query(PoolView)
        if views:
            self.clear_notifications()  # what was said in the corner is older
            views.first().tell(text, seconds)
        else:
            self.notify(words.clean(text), markup=False, timeout=seconds)

    # Keys

    async def action_quit(self) -> None:
        """Leave."""
        self.exit(0)

    def action_interrupt(self) -> None:
        """Ctrl-C: twice leaves, as everywhere in rimuru."""
        now = time.monotonic()
        if now - self._interrupted_at < INTERRUPT_SECONDS:
            self.exit(130)
            return
        self._interrupted_at = now
        self.tell("Ctrl-C again leaves.", INTERRUPT_SECONDS)

    def action_help(self) -> None:
        """Keys and how to read the picture."""
        self.push_screen(HelpScreen(self.palette, chat=False))

    def action_info(self) -> None:
        """All about the engine."""
        if self.pool.frame is None:
            self.tell("There is no engine to tell about yet.")
        else:
            self.push_screen(InfoScreen(self.pool.frame))

    def action_engines(self) -> None:
        """Choose another engine."""

        def chosen(engine_id: str | None) -> None:
            if engine_id is not None:
                self._bridge.ask(lambda source: self._attach_to(source, engine_id))

        self.push_screen(EnginesScreen(self.pool.engines), chosen)

    def _attach_to(self, source: FrameSource, engine_id: str) -> None:
        """On the bridge's thread."""
        if not source.attach(engine_id):
            self.call_from_thread(self.tell, "That engine has ended meanwhile.")

    def action_pause(self) -> None:
        """Stand still, or go on. A recording pauses; a live engine is merely not looked at."""
        status = self.pool.status
        if status.position is None:
            self.frozen = not self.frozen
            self._draw(everything=True)
            return
        playing = status.state == "live"
        ended = status.state == "ended"
        speed = 0.0 if playing else self._speed

        def turn(source: FrameSource) -> None:
            if ended:
                source.seek(0.0)  # type: ignore[attr-defined]  # it has a position, so it is a Playback
            source.set_speed(speed)  # type: ignore[attr-defined]

        self._bridge.ask(turn)

    def action_seek(self, direction: int) -> None:
        """Wind a recording."""
        if self._playback():
            self._bridge.ask(lambda source: source.seek(source.position + direction * _SEEK_SECONDS))  # type: ignore[attr-defined]

    def action_speed(self, direction: int) -> None:
        """Play slower or faster."""
        if self._playback():
            at = min(max(0, _SPEEDS.index(self._speed) + direction), len(_SPEEDS) - 1)
            speed = self._speed = _SPEEDS[at]
            self._bridge.ask(lambda source: source.set_speed(speed))  # type: ignore[attr-defined]
            self.tell(f"Playing {speed:g} times as fast as it was.", 3.0)

    def _playback(self) -> bool:
        if self.pool.status.position is None:
            self.tell("This is a running engine; only recordings can be wound.", 3.0)
            return False
        return True

    def action_window(self) -> None:
        """Another length of the past in the charts."""
        self.pool.window_seconds = WINDOWS[(WINDOWS.index(self.pool.window_seconds) + 1) % len(WINDOWS)]
        self._draw(everything=True)
        self.tell(f"Charts show the last {self.pool.window_seconds / 60:g} min.", 3.0)

    def action_theme(self) -> None:
        """The next theme."""
        at = self._themes.index(self.theme) if self.theme in self._themes else -1
        self.theme = self._themes[(at + 1) % len(self._themes)]
        self.tell(f"Theme: {self.theme}", 3.0)

    def action_picture(self) -> None:
        """Save what is on the screen as SVG in the working folder."""
        file = Path(f"rimuru-{datetime.now():%Y%m%d-%H%M%S}.svg")
        try:
            file.write_text(self.export_screenshot(), encoding="utf-8")
        except OSError as error:
            self.tell(f"The picture could not be saved: {error.strerror}.")
        else:
            self.tell(f"Saved {file.resolve()}")

    def _theme_changed(self) -> None:
        theme = self.current_theme
        background, foreground = (self.theme_variables.get(name, "")[:7] for name in ("background", "foreground"))
        if self.palette.depth in ("16", "none") or not (background.startswith("#") and foreground.startswith("#")):
            self.palette = Palette(self.palette.depth, theme.dark)
        else:
            self.palette = Palette(self.palette.depth, theme.dark, background, foreground)
        for screen in self.screen_stack:
            for widget in screen.query(StripWidget):
                widget.restyle()
                widget.update_lines()
        self._draw(everything=True)

    # The ceiling and the zoom

    def action_ceiling(self, direction: int) -> None:
        """Ask for a higher or lower ceiling."""
        self._ceiling.press(direction)

    def _ask_for_ceiling(self, num_bytes: int) -> None:
        self._bridge.ask(lambda source: self._bridge.post(CeilingAsked(num_bytes, source.request_ceiling(num_bytes))))

    def on_ceiling_asked(self, event: CeilingAsked) -> None:
        """Nobody there?"""
        if not event.delivered:
            self._ceiling.not_delivered()

    def on_page_map_zoomed(self, event: PageMap.Zoomed) -> None:
        """Look at a huge page from near."""
        self.push_screen(HugePageScreen(event.huge))


def run_dashboard(source: FrameSource, *, fps: float = FPS, theme: str | None = None) -> int:
    """Show a source until the person leaves; return the exit code. The source is closed at the end.

    Raises:
        Exception: whatever went wrong in the app or the source, after the terminal was put back.
    """
    from rimuru_cli.tui.terminal import run_app

    return run_app(RimuruApp(source, fps=fps, theme=theme))
