"""The dashboard and its source: engines that come and go, another ceiling, recordings, leaving."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tui_parts import HandPlayback, HandSource, entry_of, new_app, played, screen_text, show, small_engine, until

from rimuru_cli.engine.telemetry.frame import CeilingAnswer
from rimuru_cli.tui.messages import FrameArrived, SourceFailed, SourceStatus
from rimuru_cli.tui.screens.dialogs import EnginesScreen
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.status import DetailLine
from rimuru_models.errors import CheckpointError

FRAMES = played(small_engine(), ("prefill", 4), ("decode", 12))


async def test_another_engine_can_be_chosen() -> None:
    source = HandSource()
    source.listed = [entry_of(FRAMES[0]), entry_of(FRAMES[0], engine_id="f" * 16, pid=99, attached=False)]
    app = new_app(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: len(app.pool.engines) == 2)
        await pilot.press("e")
        await pilot.pause()
        source.listed = source.listed[:1]
        await pilot.press("down", "enter")
        await until(pilot, lambda: "f" * 16 in source.asked)
        await until(pilot, lambda: "has ended meanwhile" in screen_text(app))
    assert source.closed == 1


async def test_no_engine_to_choose() -> None:
    app = new_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("e")
        await pilot.pause()
        assert "None is running" in screen_text(app)
        await pilot.press("e")
        assert not isinstance(app.screen, EnginesScreen)


async def test_the_engine_ends_and_another_one_starts() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        await show(pilot, None, status=SourceStatus("waiting"))
        text = screen_text(app)
        assert "The engine has ended" in text and "engine ended, waiting" in text and "pool:" in text, "its last moment stays"
        await pilot.press("plus")
        await pilot.pause()
        assert "no running engine" in screen_text(app)
        other = played(small_engine(pages=900, layers=8, seed=5), ("decode", 3))
        await show(pilot, *other)
        text = screen_text(app)
        assert "The engine has ended" not in text and "pool: 901 huge pages" in text
        assert len(app.pool.events) == len(other[-1].events)


async def test_the_ceiling_is_asked_for_once_and_the_outcome_is_told() -> None:
    source = HandSource()
    app = new_app(source)
    now = [1000.0]
    app.pool.clock = lambda: now[0]
    frame = FRAMES[-1]
    step = 1 << ((frame.engine.ceiling_bytes // 16).bit_length() - 1)
    wanted = (-(-frame.engine.ceiling_bytes // step) - 2) * step
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        await pilot.press("minus", "minus")
        await pilot.pause()
        assert "ceiling" in screen_text(app) and source.asked == [], "another press may follow"
        now[0] += 1.0
        await show(pilot, None)
        await until(pilot, lambda: source.asked == [wanted], "the request")
        assert app._ceiling.wish is not None
        smaller = replace(frame.engine, ceiling_bytes=wanted, pool_bytes=frame.engine.pool_bytes)
        counters = replace(frame.counters, resident_experts=frame.counters.resident_experts - 7)
        other = CeilingAnswer(wanted + 1, True, "old", 0.0)
        await show(pilot, replace(frame, number=500, time=frame.time + 1, answer=other))
        assert app._ceiling.wish is not None, "an answer to somebody else is no answer"
        answer = CeilingAnswer(wanted, True, "Done.", 5.0)
        await show(pilot, replace(frame, number=501, time=frame.time + 2, engine=smaller, counters=counters, answer=answer))
        text = screen_text(app)
        assert "7 experts retired so far" in text and "Done." in text


async def test_a_ceiling_that_is_refused_or_goes_nowhere() -> None:
    source = HandSource()
    app = new_app(source)
    now = [1000.0]
    app.pool.clock = lambda: now[0]
    frame = FRAMES[-1]
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        await pilot.press("plus")
        now[0] += 1.0
        await show(pilot, None)
        await until(pilot, lambda: source.asked)
        answer = CeilingAnswer(int(source.asked[0]), False, "The machine has no more.", 5.0)  # type: ignore[call-overload]
        await show(pilot, replace(frame, number=500, time=frame.time + 1, answer=answer))
        assert "stays at" in screen_text(app) and "The machine has no more." in screen_text(app)
        app.tell("a long story " * 12)
        # On two lines; the second comes with the next layout.
        await until(pilot, lambda: " ".join(screen_text(app).split()).count("a long story") == 12)
        now[0] += 10.0
        await show(pilot, None)
        assert "a long story" not in screen_text(app) and app.screen.query_one(DetailLine).size.height == 1
        await pilot.press("plus")
        now[0] += 1.0
        await show(pilot, None)
        now[0] += 100.0
        await show(pilot, None)
        assert "not answered yet" in screen_text(app)
        source.delivers = False
        await pilot.press("plus")
        now[0] += 1.0
        await show(pilot, None)
        await until(pilot, lambda: "has ended, so its ceiling stays" in screen_text(app))
        least = replace(
            frame, number=600, time=frame.time + 2, engine=replace(frame.engine, least_ceiling_bytes=frame.engine.ceiling_bytes)
        )
        await show(pilot, least)
        await pilot.press("minus")
        await pilot.pause()
        assert "least that this model runs with" in screen_text(app)
        await show(pilot, None, status=SourceStatus("live", can_control=False))
        await pilot.press("plus")
        await pilot.pause()
        assert "cannot be changed from here" in screen_text(app)


async def test_a_live_picture_can_be_frozen() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES[:5])
        await pilot.press("p")
        await show(pilot, FRAMES[5])
        assert app.pool.frame is FRAMES[4] and "frozen" in screen_text(app)
        await pilot.press("p")
        await show(pilot, FRAMES[-1])
        assert app.pool.frame is FRAMES[-1] and "frozen" not in screen_text(app)


async def test_a_recording_is_paused_wound_and_played_faster() -> None:
    source = HandPlayback(control=False)
    app = new_app(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES, status=SourceStatus("live", False, 12.0, 60.0))
        assert "playing 0:12/1:00" in screen_text(app)
        await pilot.press("p")
        await until(pilot, lambda: ("speed", 0.0) in source.asked)
        await show(pilot, None, status=SourceStatus("paused", False, 12.0, 60.0))
        assert "paused 0:12/1:00" in screen_text(app)
        await pilot.press("p", "full_stop", "comma", "greater_than_sign", "less_than_sign")
        await until(pilot, lambda: len(source.asked) == 6)
        assert source.asked[1:] == [("speed", 1.0), ("seek", 17.0), ("seek", 7.0), ("speed", 2.0), ("speed", 1.0)]
        source.state = "ended"
        await show(pilot, None, status=SourceStatus("ended", False, 60.0, 60.0))
        await pilot.press("p")
        await until(pilot, lambda: source.asked[6:] == [("seek", 0.0), ("speed", 1.0)])


async def test_winding_a_live_engine_is_refused_in_words() -> None:
    app = new_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, *FRAMES)
        await pilot.press("comma")
        await pilot.pause()
        assert "only recordings can be wound" in screen_text(app)


@pytest.mark.parametrize(("keys", "code"), [(("q",), 0), (("ctrl+q",), 0), (("ctrl+c", "ctrl+c"), 130)])
async def test_leaving(keys: tuple[str, ...], code: int) -> None:
    source = HandSource()
    app = new_app(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await show(pilot, *FRAMES)
        for key in keys[:-1]:
            await pilot.press(key)
            await pilot.pause()
            assert "Ctrl-C again leaves" in screen_text(app)
        await pilot.press(keys[-1])
        await pilot.pause()
    assert (app.return_value or 0) == code and source.closed == 1


async def test_frames_that_arrive_while_leaving_are_no_fault() -> None:
    app = new_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await show(pilot, *FRAMES)
        await pilot.press("enter")
        await pilot.pause()
        await app.screen.query("*").remove()
        app.post_message(FrameArrived(FRAMES[-1], app.pool.status))
        await pilot.pause()
        app.pop_screen()
        await app.screen.query("TitleLine").remove()
        app.post_message(FrameArrived(FRAMES[-1], app.pool.status))
        await pilot.pause()
    assert app.failure is None


async def test_a_source_that_fails_ends_the_app_with_its_error() -> None:
    app = new_app()
    error = CheckpointError("The recording is damaged.")
    async with app.run_test(size=(100, 30)) as pilot:
        app.post_message(SourceFailed(error))
        await pilot.pause()
    assert app.failure is error and app.return_value == 1


async def test_what_is_wrong_shows_and_goes_away() -> None:
    app = new_app()
    frame = replace(FRAMES[-1], counters=replace(FRAMES[-1].counters, context_used=500, context_possible=1000))
    full = replace(frame, number=700, time=frame.time + 1, counters=replace(frame.counters, context_used=950))
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, frame)
        assert "!" not in screen_text(app).splitlines()[3]
        height = app.screen.query_one(PageMap).size.height
        await show(pilot, full)
        assert "close to its limit: 950 of 1,000" in screen_text(app)
        await show(pilot, replace(frame, number=701, time=frame.time + 2))
        assert "close to its limit" not in screen_text(app) and app.screen.query_one(PageMap).size.height == height
