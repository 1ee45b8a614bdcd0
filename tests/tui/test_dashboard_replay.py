"""Recordings through the real app: one made here, and the demonstration that comes with rimuru."""

from __future__ import annotations

from pathlib import Path

from synthetic_engine import Scenario
from tui_parts import TRUECOLOR, screen_text, small_engine, until

from rimuru_cli.engine.telemetry.record import Recorder
from rimuru_cli.engine.telemetry.recording import load_recording
from rimuru_cli.engine.telemetry.replay import ReplaySource, demo_source
from rimuru_cli.tui.app import RimuruApp
from rimuru_cli.tui.widgets.page_map import PageMap

PLAN: list[tuple[Scenario, int]] = [("prefill", 4), ("decode", 20), ("shrink storm", 4), ("recovery", 12)]


def recorded(file: Path) -> Path:
    engine = small_engine()
    recorder = Recorder(file, hz=1e6)
    for scenario, count in PLAN:
        for _ in range(count):
            engine.next(scenario)
            recorder(engine.head(True, 0.5), engine.tables())
    recorder.close()
    return file


async def test_a_recording_plays_pauses_winds_and_ends(tmp_path: Path) -> None:
    now = [0.0]
    source = ReplaySource(load_recording(recorded(tmp_path / "run.rimurec")), clock=lambda: now[0])
    app = RimuruApp(source, environ=TRUECOLOR)
    app.pool.clock = lambda: now[0]
    duration = source.duration
    async with app.run_test(size=(110, 36)) as pilot:
        await until(pilot, lambda: "playing 0:00" in screen_text(app) and "pool:" in screen_text(app))
        now[0] += 5.0
        await until(pilot, lambda: "playing 0:05" in screen_text(app))
        early = app.pool.frame
        assert early is not None
        await pilot.press("p")
        await until(pilot, lambda: "paused 0:05" in screen_text(app))
        now[0] += 5.0
        await pilot.pause(0.3)
        assert app.pool.frame is early, "paused"
        await pilot.press("full_stop")

        def wound_on() -> bool:
            now[0] += 0.6  # words are drawn twice a second, and a paused recording does not mind
            return "paused 0:10" in screen_text(app)

        await until(pilot, wound_on)
        await until(pilot, lambda: app.pool.frame is not early)
        later = app.pool.frame
        await pilot.press("comma")
        await until(pilot, lambda: app.pool.frame is not later)
        assert app.pool.frame is not None and app.pool.frame.number == early.number
        assert app.pool.history.length < 1.0, "the past of a moment that was wound back to is not known"
        await pilot.press("p")
        now[0] += 10_000.0
        await until(pilot, lambda: "at its end" in screen_text(app))
        assert app.pool.frame.number == sum(count for _, count in PLAN) * 2, "every second frame of the engine was recorded"
        assert "▼" in screen_text(app) or "▲" in screen_text(app)
        now[0] += 1.0
        await pilot.press("p")
        await until(pilot, lambda: "playing 0:00" in screen_text(app), "beginning anew")
        await pilot.press("minus")
        await until(pilot, lambda: "cannot be changed from here" in screen_text(app))
    assert duration > 15


async def test_the_demonstration_plays() -> None:
    now = [0.0]
    source = demo_source()
    source._clock = lambda: now[0]
    source.seek(0.0)
    app = RimuruApp(source, environ=TRUECOLOR)
    app.pool.clock = lambda: now[0]
    seen: set[str] = set()
    async with app.run_test(size=(120, 40)) as pilot:
        numbers = set()
        for part in range(8):
            now[0] = (part + 0.5) * source.duration / 8
            await until(pilot, lambda: app.pool.status.position == now[0] and app.pool.frame is not None)
            assert app.pool.frame is not None
            numbers.add(app.pool.frame.number)
            seen |= {kind for kind, num_bytes in app.pool.frame.pages.bytes_by_kind().items() if num_bytes}
        assert len(numbers) >= 7
        assert "rimuru-demo" in screen_text(app) and "playing" in screen_text(app)
        assert {"expert", "kv"} <= seen
        assert app.screen.query_one(PageMap)._codes.size and app.pool.events
        await pilot.press("down", "enter")
        await until(pilot, lambda: "huge page 0" in screen_text(app))
