"""The keys that do something here, in one line. Textual's own footer is a widget for each key, made anew whenever the focus moves."""

from __future__ import annotations

from rich.style import Style
from textual.events import Click
from textual.screen import Screen
from textual.strip import Strip

from rimuru_cli.tui.palette import WARM, colour_style
from rimuru_cli.tui.widgets.strips import StripWidget, text_line


class KeysLine(StripWidget):
    """Shows the bindings that are in force, those of the focused part first; a click on one is as good as the key."""

    DEFAULT_CSS = "KeysLine { height: 1; dock: bottom; }"

    def on_mount(self) -> None:
        """Follow the focus."""
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_updated)
        self.update_lines()

    def _bindings_updated(self, screen: Screen[object]) -> None:
        if screen is self.screen:
            self.update_lines()

    def lines(self, width: int, height: int) -> list[Strip]:
        """As many keys as fit."""
        key_style = Style(bold=True)
        if self.palette.colours:
            key_style += colour_style(self.palette.colour("expert", WARM))
        parts: list[tuple[str, Style | None]] = []
        left = width
        for key, description, _ in self._keys():
            needed = len(key) + len(description) + 3
            if needed > left + 2:
                break
            parts += [(key, key_style), (f" {description}  ", None)]
            left -= needed
        return [text_line(width, *parts)]

    def _keys(self) -> list[tuple[str, str, str]]:
        """(key as shown, what it does, key) of each binding that is shown; keys that do the same share a place."""
        found: dict[str, tuple[str, str, str]] = {}
        for key, active in self.screen.active_bindings.items():
            binding = active.binding
            if not binding.show or not active.enabled:
                continue
            name = binding.description
            shown = self.app.get_key_display(binding)
            if name not in found:
                found[name] = (shown, name, key)
            elif shown not in found[name][0].split():
                found[name] = (f"{found[name][0]} {shown}", name, found[name][2])
        return list(found.values())

    async def on_click(self, event: Click) -> None:
        """Press the key that was clicked."""
        at = 0
        for shown, description, key in self._keys():
            at += len(shown) + len(description) + 3
            if event.x < at:
                self.app.simulate_key(key)
                return
