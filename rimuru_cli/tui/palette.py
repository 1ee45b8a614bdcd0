"""What each kind of page looks like: colours for truecolor, 256 and 16 colour terminals, glyphs for none; and shades for age.

The hues are those of Okabe and Ito, "Color Universal Design: how to make figures and presentations that are friendly to colorblind
people" (2008), chosen to stay apart under protanopia and deuteranopia. Shades are mixes with the background (older, partly filled) or
with white or, on a light background, black (just loaded). The tests measure the distances (CIEDE2000) under simulated colour blindness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

Depth = Literal["truecolor", "256", "16", "none"]

SHADES: Final = 4
PART, BASE, WARM, FRESH = range(SHADES)
"""Shades of a kind: partly filled, at rest, loaded lately, just loaded."""


@dataclass(frozen=True)
class Look:
    """How one kind is drawn.

    Attributes:
        name: the kind's short name, as in JSON.
        label: its name on the screen.
        rgb: colour on a dark background at full strength, "#rrggbb".
        light: the same on a light background.
        ansi: colour of a 16-colour terminal; `fresh` is the one for a page that was just loaded.
        glyph: sign where there are no colours, and `fresh_glyph` for a page that was just loaded: the same with more ink where there is
            such a sign. All are in code page 437, so every font has them.
    """

    name: str
    label: str
    rgb: str
    light: str
    ansi: str
    fresh: str
    glyph: str
    fresh_glyph: str


LOOKS: Final[Mapping[str, Look]] = {
    look.name: look
    for look in (
        Look("free", "free", "#262a33", "#e6e8ec", "black", "black", "·", "·"),
        Look("expert", "experts", "#E69F00", "#E69F00", "yellow", "bright_yellow", "▓", "█"),
        Look("kv", "KV cache", "#56B4E9", "#56B4E9", "cyan", "bright_cyan", "░", "▒"),
        Look("ssm", "SSM states", "#CC79A7", "#CC79A7", "magenta", "bright_magenta", "≡", "≡"),
        Look("conv", "conv rows", "#009E73", "#009E73", "green", "bright_green", "┼", "┼"),
        Look("buffer", "buffers", "#D55E00", "#D55E00", "red", "bright_red", "╬", "╬"),
        Look("dense", "dense", "#d8d4c4", "#3a3d44", "white", "bright_white", "#", "#"),
        Look("tail", "tails", "#3b4048", "#cfd2d8", "bright_black", "bright_black", "-", "-"),
        Look("workspace", "workspace", "#8a8678", "#8a8d94", "bright_black", "bright_black", "~", "~"),
    )
}
_PLAIN = frozenset({"free", "dense", "tail", "workspace"})  # no page of these is ever "just loaded"

# How far a shade is mixed: towards the background where positive, away from it where negative.
_DARK_MIX: Final = {PART: 0.55, BASE: 0.2, WARM: 0.0, FRESH: -0.3}
_LIGHT_MIX: Final = {PART: 0.55, BASE: 0.1, WARM: -0.15, FRESH: -0.4}
DARK_GROUND, LIGHT_GROUND = "#15171c", "#fafafa"


def rgb(colour: str) -> tuple[int, int, int]:
    """The three bytes of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(colour: str, other: str, share: float) -> str:
    """A colour, `share` (0 to 1) of the way to another one, in sRGB."""
    parts = (round(a + (b - a) * share) for a, b in zip(rgb(colour), rgb(other), strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


@dataclass(frozen=True)
class Palette:
    """Colours for one terminal and one theme; `background` and `foreground` are the theme's, "#rrggbb".

    `depth` "none" means glyphs instead of colours.
    """

    depth: Depth = "truecolor"
    dark: bool = True
    background: str = DARK_GROUND
    foreground: str = "#e0e0e0"

    @property
    def colours(self) -> bool:
        """Whether kinds are told apart by colour."""
        return self.depth != "none"

    @property
    def ground(self) -> str:
        """What lies behind the map."""
        return self.background if self.depth in ("truecolor", "256") else "default"

    @property
    def ink(self) -> str:
        """The colour of a cursor or a flash: the strongest contrast to the ground."""
        if self.depth == "16":
            return "bright_white" if self.dark else "black"
        return "#ffffff" if self.dark else "#000000"

    @cached_property
    def text(self) -> Style:
        """How words are written."""
        if self.depth in ("16", "none"):
            return Style()
        return Style(color=self.foreground, bgcolor=self.background)

    @property
    def soft(self) -> str:
        """The colour of axes and other small print."""
        return "bright_black" if self.depth == "16" else "#7d828c" if self.dark else "#6b6f77"

    def colour(self, kind: str, shade: int = WARM) -> str:
        """The colour of a kind, as a name that rich understands. Meaningless where `colours` is false."""
        return _colour(self, kind, shade)

    def style(self, kind: str, shade: int = WARM, ground: str | None = None) -> Style:
        """The kind as ink on the ground (or on a colour of its own); plain where there are no colours."""
        if not self.colours:
            return Style(bold=shade >= FRESH)
        return colour_style(self.colour(kind, shade), ground or self.ground)

    @cached_property
    def heat(self) -> tuple[str, ...]:
        """Nine colours of a resident expert, from hardly wanted to most wanted: the experts' own hue, from near the ground past its full
        strength. They differ in lightness, so no kind of colour blindness reorders them. Sixteen colours have only some steps."""
        if self.depth == "16":
            return ("red", "red", "red", "yellow", "yellow", "yellow", "bright_yellow", "bright_yellow", "bright_white")
        hue = LOOKS["expert"].rgb if self.dark else LOOKS["expert"].light
        rising = [mix(self.ground, hue, 0.35 + 0.65 * step / 5) for step in range(6)]
        return tuple(rising + [mix(hue, self.ink, 0.22 * step) for step in range(1, 4)])


@lru_cache(maxsize=1024)
def _colour(palette: Palette, kind: str, shade: int) -> str:
    look = LOOKS[kind]
    if palette.depth == "16":
        return look.fresh if shade >= FRESH and kind not in _PLAIN else look.ansi
    if kind in ("free", "tail"):
        return mix(palette.ground, palette.ink, 0.09 if kind == "free" else 0.2)
    hue = look.rgb if palette.dark else look.light
    if kind in _PLAIN:
        return hue
    share = (_DARK_MIX if palette.dark else _LIGHT_MIX)[shade]
    return mix(hue, palette.ground, share) if share >= 0 else mix(hue, palette.ink, -share)


HEAT_GLYPHS: Final = " .:-=+*#@"
"""The nine heats where there are no colours."""


@lru_cache(maxsize=8192)
def colour_style(ink: str, ground: str | None = None) -> Style:
    """A style from two colour names; each pair is made once, because making one is slow."""
    return Style(color=ink, bgcolor=ground)


def terminal_depth(environ: Mapping[str, str]) -> Depth:
    """How many colours the terminal shows. NO_COLOR (not empty) means none; so does TERM=dumb.

    TEXTUAL_COLOR_SYSTEM overrides what TERM and COLORTERM say, as it does for textual itself.
    """
    if environ.get("NO_COLOR"):
        return "none"
    wish = environ.get("TEXTUAL_COLOR_SYSTEM", "auto")
    known: dict[str, Depth] = {"truecolor": "truecolor", "256": "256", "standard": "16"}
    if wish in known:
        return known[wish]
    console = Console(force_terminal=True, legacy_windows=False, _environ=dict(environ))
    systems: dict[object, Depth] = {
        ColorSystem.TRUECOLOR: "truecolor",
        ColorSystem.EIGHT_BIT: "256",
        ColorSystem.STANDARD: "16",
        ColorSystem.WINDOWS: "16",
    }
    return systems.get(console._color_system, "none")
