"""The dashboard through its keys: every key, every screen, every size, and a source that comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tui_parts import NONE, SIXTEEN, TRUECOLOR, entry_of, new_app, played, screen_text, show, small_engine, until

from rimuru_cli.engine.telemetry.frame import EXPERT, KV, Frame
from rimuru_cli.tui.app import THEMES, RimuruApp
from rimuru_cli.tui.messages import EnginesListed
from rimuru_cli.tui.screens.dialogs import EnginesScreen, HelpScreen, InfoScreen
from rimuru_cli.tui.screens.huge_page import HugePageScreen
from rimuru_cli.tui.widgets.charts import CompositionChart
from rimuru_cli.tui.widgets.heat_map import HeatMap
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.pool_view import PoolView
from rimuru_cli.tui.widgets.ribbon import EventRibbon
from rimuru_cli.tui.widgets.status import WAITING

FRAMES = played(small_engine(), ("prefill", 4), ("decode", 12))
STORM = played(small_engine(), ("shrink storm", 6))


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


async def test_it_waits_politely_and_shows_what_comes() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert all(line in screen_text(app) for line in WAITING)
        await pilot.press("plus", "enter", "i", "down", "k", "m", "3", "1", "p", "p")  # no key breaks anything
        await show(pilot, *FRAMES)
        text = screen_text(app)
    assert WAITING[0] not in text
    for wanted in (
        "synthetic/Slime-30B-A3B",
        "answer 20.0 tok/s",
        "hits",
        "link",
        "/25.0 GB/s",
        "TTFT 0.40 s",
        "context 2,072 of",
        "ceiling",
        "experts",
        "host",
        "pinned",
        "pool:",
        "huge pages",
        "layer x expert",
        "99.9",
        "adjuster:",
        "because sequences need pages",
        "? Help",
        "live, busy",
    ):
        assert wanted in text, wanted


SIZES = [(20, 8), (40, 12), (80, 24), (120, 40), (200, 60)]


@pytest.mark.parametrize(
    ("size", "environ"), [(size, TRUECOLOR) for size in SIZES] + [(size, other) for size in SIZES[2:4] for other in (SIXTEEN, NONE)]
)
async def test_it_works_at_any_size_and_depth(size: tuple[int, int], environ: dict[str, str]) -> None:
    app = new_app(environ=environ)
    async with app.run_test(size=size) as pilot:
        await show(pilot, *FRAMES)
        lines = app.screen._compositor.render_strips()
        assert len(lines) == size[1] and {line.cell_length for line in lines} == {size[0]}
        text = screen_text(app)
        assert "synthetic" in text or size[0] < 40
        if size == (80, 24):
            assert "pool: " in text and "context 2,072" in text and "adjuster" in text
            assert not app.screen.query_one(HeatMap).is_on_screen
        if size[1] >= 40:
            assert "layer x expert" in text and "hits" in text
        if environ is NONE:
            styles = [segment.style for line in lines for segment in line if segment.style]
            assert all(style.color is None or style.color.is_default for style in styles)
            assert all(style.bgcolor is None or style.bgcolor.is_default for style in styles)
            assert size[1] < 12 or ("▓" in text and "░" in text), "kinds are told apart by glyphs"
        if environ is SIXTEEN:
            numbers = {color.type.name for line in lines for s in line if s.style for color in (s.style.color, s.style.bgcolor) if color}
            assert numbers <= {"DEFAULT", "STANDARD"}


async def test_resizing_leaves_nothing_behind() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        before = screen_text(app)
        for size in ((80, 24), (33, 9), (161, 50), (120, 40)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
        await show(pilot)
        assert screen_text(app) == before


async def test_five_views() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        shown = {}
        for key in "12345":
            await pilot.press(key)
            await pilot.pause()
            parts = (PageMap, HeatMap, CompositionChart, EventRibbon)
            shown[key] = [part.__name__ for part in parts if app.screen.query_one(part).is_on_screen]
        focus = type(app.focused).__name__
    assert shown == {
        "1": ["PageMap", "HeatMap", "CompositionChart", "EventRibbon"],
        "2": ["PageMap", "EventRibbon"],
        "3": ["HeatMap", "EventRibbon"],
        "4": ["CompositionChart", "EventRibbon"],
        "5": ["EventRibbon"],
    }
    assert focus == "EventRibbon"


async def test_tab_goes_round_and_the_mark_shows_where() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        seen = []
        for _ in range(3):
            seen.append(type(app.focused).__name__)
            marked = [line for line in screen_text(app).splitlines() if "▶ " in line]
            assert len(marked) == 1
            await pilot.press("tab")
            await pilot.pause()
        assert seen == ["PageMap", "HeatMap", "EventRibbon"] and type(app.focused).__name__ == "PageMap"
        await pilot.press("shift+tab")
        assert type(app.focused).__name__ == "EventRibbon"


async def test_the_cursor_tells_what_it_is_on() -> None:
    app = new_app()
    frame = FRAMES[-1]
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        page_map = app.screen.query_one(PageMap)
        await pilot.press("down")
        assert page_map.cursor == 0 and "huge page 0: loading buffer" in screen_text(app)
        await pilot.press("right", "right", "left")
        assert page_map.cursor == 1
        await pilot.press("down", "up")
        assert page_map.cursor == 1
        await pilot.press("end")
        last = -(-frame.engine.pool_bytes // frame.engine.huge_page_bytes) - 1
        assert page_map.cursor == last
        await pilot.press("right")
        assert page_map.cursor == last, "the map ends there"
        await pilot.press("home", "escape")
        await pilot.pause()
        assert page_map.cursor is None and "Arrows move" in screen_text(app)


async def test_kinds_can_be_shown_alone() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        page_map = app.screen.query_one(PageMap)
        seen = []
        for _ in range(4):
            await pilot.press("k")
            seen.append(page_map.only)
            await pilot.pause()
        assert seen[:2] == [EXPERT, KV] and seen[-1] is None, "kinds that the model has not are left out"
        await pilot.press("k", "k")
        await pilot.pause()
        assert "KV cache only" in screen_text(app)


async def test_zoom_to_a_huge_page_and_inspect_what_is_in_it() -> None:
    app = new_app()
    frame = FRAMES[-1]
    split = next(int(page) for page in range(len(frame.pages)) if frame.pages.kind[page] == KV)
    huge = int(frame.pages.offset[split]) // frame.engine.huge_page_bytes
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        app.screen.query_one(PageMap).look_at(huge)
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, HugePageScreen)
        text = screen_text(app)
        assert f"huge page {huge:,}" in text and "split into" in text
        assert "owner" in text and "sequence 1 · layer" in text and "tokens" in text and "last use" in text
        await pilot.press("right", "down", "end", "home")
        await pilot.pause()
        assert str(int(frame.pages.size[split])) in screen_text(app).replace(",", "")
        await pilot.press("pagedown")
        await pilot.pause()
        assert f"huge page {huge + 1:,}" in screen_text(app)
        await pilot.press("pageup", "home")
        await show(pilot, *STORM)  # the pool changes under the eyes of the inspector
        assert f"huge page {huge:,}" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(app.screen, HugePageScreen) and app.screen.query_one(PageMap).cursor == huge


async def test_the_inspector_of_an_expert_page() -> None:
    app = new_app()
    frame = FRAMES[-1]
    page = next(int(page) for page in range(len(frame.pages)) if frame.pages.kind[page] == EXPERT)
    async with app.run_test(size=(80, 24)) as pilot:
        await show(pilot, *FRAMES)
        app.screen.query_one(PageMap).look_at(int(frame.pages.offset[page]) // frame.engine.huge_page_bytes)
        await pilot.press("enter")
        await pilot.pause()
        text = screen_text(app)
        layer, expert = frame.pages.layer[page], frame.pages.owner[page]
        assert f"layer {layer} · expert {expert} · gate" in text
        assert f"{frame.pages.rank[page] + 1} of 32 in its layer" in text and "score" in text


async def test_the_heat_map_changes_its_measure_and_inspects_experts() -> None:
    app = new_app()
    frame = FRAMES[-1]
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        await pilot.press("3")
        await until(pilot, lambda: "layer x expert: score" in screen_text(app))
        await pilot.press("m")
        assert "layer x expert: hits" in screen_text(app)
        await pilot.press("m")
        assert "layer x expert: resident" in screen_text(app)
        await pilot.press("down", "down", "right", "right", "left")
        await pilot.pause()
        heat = app.screen.query_one(HeatMap)
        assert heat.cursor == (1, 1) and "layer 1 · expert 1 · " in screen_text(app)
        device = replace(frame, experts=replace(frame.experts, hits=None))
        heat.measure = "hits"
        await show(pilot, replace(device, number=999, time=frame.time + 1))
        assert "not counted one by one on a device" in screen_text(app)
        await pilot.press("escape")
        assert heat.cursor is None


async def test_decisions_are_told_when_they_are_selected() -> None:
    app = new_app()
    events = STORM[-1].events
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *STORM)
        await pilot.press("5")
        await pilot.pause()
        text = screen_text(app)
        assert f"{len(app.pool.events)} decisions" in text and "▼" in text
        await pilot.press("left", "left")
        ribbon = app.screen.query_one(EventRibbon)
        assert ribbon.selected == events[-2].number
        await pilot.press("home")
        await pilot.pause()
        first = app.pool.events[0]
        assert ribbon.selected == first.number
        wanted = f"step {first.step}: retired {first.shrunk} experts, because sequences need pages"
        assert wanted in screen_text(app) and f"(R_b {first.required_blocks:,}, F_b {first.free_blocks:,})" in screen_text(app)
        await pilot.press("end", "right", "escape")
        assert ribbon.selected is None


async def test_charts_of_more_or_less_time() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *[replace(FRAMES[-1], number=1000 + i, time=FRAMES[-1].time + 5 * i) for i in range(1, 80)])
        seen = []
        for _ in range(4):
            await pilot.press("w")
            seen.append(app.pool.window_seconds)
            await pilot.pause()
        assert seen == [300.0, 600.0, 60.0, 120.0]
        assert "pool, 2 min" in screen_text(app)


async def test_help_info_and_engines() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        for key in ("question_mark", "f1"):
            await pilot.press(key)
            await pilot.pause()
            assert isinstance(app.screen, HelpScreen) and "Ctrl-Q" in screen_text(app)
            await pilot.press(key)
            assert not isinstance(app.screen, HelpScreen), "the same key closes it"
        await pilot.press("i")
        await pilot.pause()
        text = screen_text(app)
        assert isinstance(app.screen, InfoScreen) and "This engine is made up." in text and "at least" in text and "workspace" in text
        await pilot.press("escape")
        app.post_message(EnginesListed((entry_of(FRAMES[0]), entry_of(FRAMES[0], engine_id="f" * 16, pid=99, attached=False))))
        await pilot.press("e")
        await pilot.pause()
        assert isinstance(app.screen, EnginesScreen) and "process 99" in screen_text(app)
        await pilot.press("escape")
        assert not isinstance(app.screen, EnginesScreen)


async def test_themes_go_round_and_recolour_everything() -> None:
    app = new_app()
    async with app.run_test(size=(100, 32)) as pilot:
        await show(pilot, *FRAMES)
        grounds, names = set(), []
        for _ in THEMES:
            names.append(app.theme)
            strips = app.screen.query_one(PageMap)._lines
            grounds.add(str(strips[0]._segments[0].style))
            assert app.palette.dark == app.current_theme.dark
            (below,) = {s.style.bgcolor.name for s in app.screen._compositor.render_strips()[-1] if s.style and s.style.bgcolor}
            assert below == app.palette.background.lower(), "the line of keys, too"
            await pilot.press("t")
            await pilot.pause()
        assert tuple(names) == THEMES and app.theme == THEMES[0] and len(grounds) == len(THEMES)


async def test_a_picture_is_saved_or_the_reason_told(tmp_path: Path) -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        await pilot.press("s")
        await pilot.pause()
        (file,) = tmp_path.glob("rimuru-*.svg")
        assert "<svg" in file.read_text(encoding="utf-8") and "Saved" in screen_text(app)


async def test_the_mouse_works_too() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        page_map = app.screen.query_one(PageMap)
        await pilot.click(PageMap, offset=(3, 4))
        await pilot.pause()
        assert page_map.cursor is not None and "huge page" in screen_text(app)
        await pilot.click(PageMap, offset=(0, 0))  # the heading
        await pilot.click(PageMap, offset=(3, 4))
        await pilot.pause()
        assert isinstance(app.screen, HugePageScreen), "the same place again looks closer"
        await pilot.click("PageTiles", offset=(1, 1))
        await pilot.pause()
        assert isinstance(app.screen, HugePageScreen)


async def test_only_rows_that_changed_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        page_map = app.screen.query_one(PageMap)
        refreshed: list[int] = []
        monkeypatch.setattr(page_map, "refresh", lambda *regions: refreshed.append(len(regions)))
        page_map.show_frame()
        assert refreshed == [], "nothing changed"
        page_map.look_at(0)
        assert refreshed and max(refreshed) <= 2


async def test_hidden_and_covered_parts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    app = new_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await show(pilot, *FRAMES)
        heat, chart = app.screen.query_one(HeatMap), app.screen.query_one(CompositionChart)
        for widget in (heat, chart):
            monkeypatch.setattr(widget, "lines", lambda width, height: pytest.fail("it cannot be seen"))
        await show(pilot, *STORM[:1])
        assert isinstance(app.screen.query_one(PoolView), PoolView)


def test_frames_of_any_engine_can_be_drawn() -> None:
    """Engines of odd shapes: no recurrent states, tiny pools, one layer, hundreds of experts."""
    import asyncio

    engines = [
        small_engine(pages=8, layers=1, experts=4, top_k=1),
        small_engine(hybrid=True, tiles=2, layers=9),
        small_engine(pages=2000, layers=2, experts=300),
    ]

    async def draw(frames: list[Frame]) -> str:
        app: RimuruApp = new_app()
        async with app.run_test(size=(100, 32)) as pilot:
            await show(pilot, *frames)
            await pilot.press("3", "down", "5", "left", "4", "2", "down", "enter", "end", "escape", "1")
            await show(pilot, frames[-1])
            return screen_text(app)

    for engine in engines:
        frames = played(engine, ("idle", 1), ("prefill", 2), ("shrink storm", 1), ("decode", 2), ("recovery", 1))
        assert "pool:" in asyncio.run(draw(frames))


async def test_a_recording_may_claim_anything_and_is_still_shown() -> None:
    frame = FRAMES[-1]
    odd = replace(frame.engine, started=4.6e18, link_ceiling=1e-320, ceiling_bytes=-(1 << 61), least_ceiling_bytes=(1 << 62) - 1)
    events = (replace(frame.events[-1], time=-4.6e18, shrunk=1 << 61),)
    counters = replace(frame.counters, context_used=-5, expert_hits=frame.counters.expert_hits << 40, decode_rate=4e18, ttft=-1.0)
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, replace(frame, engine=odd, events=events, counters=counters))
        await pilot.press("5", "4", "1", "minus", "i")
        await until(pilot, lambda: isinstance(app.screen, InfoScreen))
        assert "--:--:--" in screen_text(app)
    assert app.failure is None
