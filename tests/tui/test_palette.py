"""Colours: kinds stay apart for everybody, on every terminal, and without any colour at all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rich.cells import cell_len
from rich.color import Color, ColorSystem

from rimuru_cli.engine.telemetry.frame import KINDS
from rimuru_cli.tui.palette import BASE, DARK_GROUND, FRESH, HEAT_GLYPHS, LIGHT_GROUND, LOOKS, PART, WARM, Palette, mix, rgb, terminal_depth
from rimuru_cli.tui.widgets.page_map import colours_of_codes, glyphs_of_codes

# Severity 1.0 of Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009).
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
DARK, LIGHT = Palette("truecolor", True, DARK_GROUND), Palette("truecolor", False, LIGHT_GROUND)
ALL = ("expert", "kv", "ssm", "conv", "buffer", "dense", "free")
# Shades that are really drawn: only pages of the third level share a cell with free ones, and a buffer is always in use.
SHADED = [(kind, BASE) for kind in ALL] + [(kind, FRESH) for kind in ("expert", "kv", "ssm", "conv")] + [("kv", PART), ("conv", PART)]


def lab(colour: str, vision: str) -> np.ndarray:
    """CIELAB (D65) of a colour as somebody with this vision sees it."""
    srgb = np.array(rgb(colour)) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """CIEDE2000; 1 is a just noticeable difference."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean_c = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean_c**7 / (mean_c**7 + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2(b1, a1)) % 360, np.degrees(np.arctan2(b2, a2)) % 360
    dh = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    d_l, d_c, d_h = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(dh / 2))
    m_l, m_c, m_h = (l1 + l2) / 2, (c1 + c2) / 2, (h1 + dh / 2) % 360 if c1 * c2 else h1 + h2
    t = (
        1
        - 0.17 * np.cos(np.radians(m_h - 30))
        + 0.24 * np.cos(np.radians(2 * m_h))
        + 0.32 * np.cos(np.radians(3 * m_h + 6))
        - 0.20 * np.cos(np.radians(4 * m_h - 63))
    )
    s_l = 1 + 0.015 * (m_l - 50) ** 2 / np.sqrt(20 + (m_l - 50) ** 2)
    s_c, s_h = 1 + 0.045 * m_c, 1 + 0.015 * m_c * t
    turn = -2 * np.sqrt(m_c**7 / (m_c**7 + 25**7)) * np.sin(np.radians(60 * np.exp(-(((m_h - 275) / 25) ** 2))))
    return float(np.sqrt((d_l / s_l) ** 2 + (d_c / s_c) ** 2 + (d_h / s_h) ** 2 + turn * d_c / s_c * d_h / s_h))


def test_the_distance_is_the_published_one() -> None:
    """Pairs 1, 7, 17 and 24 of the test data of Sharma, Wu and Dalal (2005)."""
    pairs = [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((50.0, 2.5, 0.0), (50.0, 3.2592, 0.3350), 1.0),
    ]
    for first, second, expected in pairs:
        assert distance(np.array(first), np.array(second)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_kinds_at_rest_are_far_apart(palette: Palette, vision: str) -> None:
    colours = {kind: lab(palette.colour(kind, BASE), vision) for kind in ALL}
    for first, second in itertools.combinations(ALL, 2):
        assert distance(colours[first], colours[second]) > 11, (first, second)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_no_shade_of_one_kind_looks_like_another_kind(palette: Palette, vision: str) -> None:
    colours = {look: lab(palette.colour(*look), vision) for look in SHADED}
    for first, second in itertools.combinations(SHADED, 2):
        needed = 8 if first[0] != second[0] else 9  # a page that was just loaded must stand out from its own kind, too
        assert distance(colours[first], colours[second]) > needed, (first, second)


def test_fresher_is_further_from_the_ground() -> None:
    for palette, ground in ((DARK, DARK_GROUND), (LIGHT, LIGHT_GROUND)):
        for kind in ("expert", "kv", "ssm", "conv", "buffer"):
            away = [abs(lab(palette.colour(kind, shade), "normal")[0] - lab(ground, "normal")[0]) for shade in (PART, BASE, WARM, FRESH)]
            assert away == sorted(away) and len(set(away)) == 4, kind


def test_heat_rises_in_lightness_for_everybody() -> None:
    for palette, rising in ((DARK, True), (LIGHT, False)):
        for vision in VISION:
            lightness = [lab(colour, vision)[0] for colour in palette.heat]
            assert lightness == sorted(lightness, reverse=not rising), vision


def test_256_colours_keep_kinds_apart() -> None:
    def downgraded(kind: str, shade: int) -> int | None:
        return Color.parse(DARK.colour(kind, shade)).downgrade(ColorSystem.EIGHT_BIT).number

    for shade in (BASE, FRESH):
        numbers = [downgraded(kind, shade) for kind in ALL]
        assert len(set(numbers)) == len(ALL)


def test_sixteen_colours_are_the_terminals_own_and_differ() -> None:
    palette = Palette("16")
    for kind in ALL:
        Color.parse(palette.colour(kind, BASE))
        assert not palette.colour(kind, BASE).startswith("#")
    assert len({palette.colour(kind, BASE) for kind in ALL}) == len(ALL)
    assert all(palette.colour(kind, FRESH) == f"bright_{palette.colour(kind, BASE)}" for kind in ("expert", "kv", "ssm", "conv", "buffer"))


def test_without_colours_every_kind_has_a_glyph_of_its_own() -> None:
    assert len({look.glyph for look in LOOKS.values()}) == len(LOOKS)
    glyphs = glyphs_of_codes()
    owners: dict[str, set[int]] = {}
    for code, (glyph, _) in enumerate(glyphs):
        assert cell_len(glyph) == 1
        owners.setdefault(glyph, set()).add(code // 4 if code < len(KINDS) * 4 else code)
    assert all(len(kinds) == 1 for kinds in owners.values()), "a glyph stands for one thing only"
    assert all(glyph.encode("cp437") for glyph, _ in glyphs), "every font of a terminal has these"
    assert len(set(HEAT_GLYPHS)) == 9


def test_every_code_of_the_map_has_a_colour() -> None:
    for palette in (DARK, LIGHT, Palette("16"), Palette("256")):
        for colour in colours_of_codes(palette):
            Color.parse(colour)
    assert len(colours_of_codes(DARK)) == len(glyphs_of_codes())


@pytest.mark.parametrize(
    ("environ", "depth"),
    [
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm"}, "16"),
        ({"TERM": "screen"}, "16"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "truecolor"),
        ({"TERM": "xterm", "COLORTERM": "24bit"}, "truecolor"),
        ({"TERM": "dumb"}, "none"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1", "COLORTERM": "truecolor"}, "none"),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, "256"),
        ({"TERM": "xterm-256color", "TEXTUAL_COLOR_SYSTEM": "standard"}, "16"),
        ({"TERM": "xterm-256color", "TEXTUAL_COLOR_SYSTEM": "nonsense"}, "256"),
    ],
)
def test_what_a_terminal_shows(environ: dict[str, str], depth: str) -> None:
    assert terminal_depth(environ) == depth


def test_mixing() -> None:
    assert mix("#000000", "#ffffff", 0.5) == "#808080"
    assert (mix("#123456", "#ffffff", 0.0), mix("#123456", "#abcdef", 1.0)) == ("#123456", "#abcdef")
