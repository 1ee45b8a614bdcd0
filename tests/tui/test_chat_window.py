"""The chat window with a real child process behind it, and a fake engine in that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tui_parts import TRUECOLOR, HandSource, played, screen_text, small_engine, until

from rimuru_cli.chat import protocol
from rimuru_cli.tui.chat_app import ChatApp, EngineFailed, run_chat
from rimuru_cli.tui.chat_history import TypedHistory
from rimuru_cli.tui.chat_link import ChatLink, EngineEnded, OwnEngine
from rimuru_cli.tui.screens.dialogs import HelpScreen
from rimuru_cli.tui.widgets.chat_panel import ChatInput
from rimuru_cli.tui.widgets.page_map import PageMap
from rimuru_cli.tui.widgets.pool_view import PoolView
from rimuru_cli.tui.widgets.transcript import Transcript
from rimuru_models.errors import UsageError

SCRIPT = Path(__file__).parents[1] / "support" / "fake_child.py"
FRAMES = played(small_engine(), ("decode", 3))


def new_chat(history: TypedHistory | None = None, source: HandSource | None = None, **options: object) -> ChatApp:
    pool = source or HandSource()
    engine = OwnEngine(lambda pid: pool)
    command = [sys.executable, str(SCRIPT), json.dumps(options)]
    return ChatApp(protocol.Start({}), engine, history or TypedHistory(None), command=command, environ=TRUECOLOR)


def talk_of(app: ChatApp) -> str:
    return app.screen_stack[0].query_one(Transcript).text() if len(app.screen_stack) == 1 else app._talk.text()


async def ready(app: ChatApp, pilot: object) -> None:
    await until(pilot, lambda: app._loaded and not app._answering, "loading")  # type: ignore[arg-type]


async def test_asking_and_answering_beside_the_pool() -> None:
    app = new_chat(source=HandSource(*FRAMES))
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "TTFT" in talk_of(app))
        await until(pilot, lambda: "pool:" in screen_text(app))
        text = screen_text(app)
        assert "> hi" in text and "Hello there." in text and "context" in text and "fake-model" in text
        assert app.screen.query_one(ChatInput).text == "" and app.screen.query_one(PoolView).is_on_screen
        await pilot.press(*"/exit", "enter")
        await until(pilot, lambda: app._leaving)
    app.let_go()
    assert (app.return_value, app.failure, app._link._process.returncode) == (0, None, 0)  # type: ignore[union-attr]


async def test_a_message_typed_while_the_model_loads_is_asked_afterwards() -> None:
    app = new_chat()
    async with app.run_test(size=(130, 40)) as pilot:
        await pilot.press(*"early", "enter")
        assert app._queued == "early" or app._loaded
        await until(pilot, lambda: "> early" in talk_of(app) and "Hello there." in talk_of(app))


async def test_esc_stops_the_answer_and_then_goes_over_to_the_pool() -> None:
    app = new_chat(source=HandSource(*FRAMES), reply="word " * 500, step_seconds=0.01)
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"go", "enter")
        await until(pilot, lambda: "word" in talk_of(app))
        await pilot.press(*"wait", "enter")  # it stays in the line
        await pilot.press("escape")
        await until(pilot, lambda: "(stopped; what it said so far stays" in talk_of(app))
        await until(pilot, lambda: not app._answering)
        assert app.screen.query_one(ChatInput).text == "wait"
        await until(pilot, lambda: app.pool.frame is not None)
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.focused, PageMap)
        await pilot.press("c")
        assert isinstance(app.focused, ChatInput)


async def test_slash_commands_are_the_same_as_in_the_terminal(tmp_path: Path) -> None:
    app = new_chat()
    file = tmp_path / "talk.json"
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"one", "enter")
        await until(pilot, lambda: "TTFT" in talk_of(app))
        for command, said in (
            ("/set temperature 0.25", "0.25"),
            (f"/save {file}", "Saved 2 messages"),
            ("/nonsense", "There is no command /nonsense"),
            ("/pool", "loading buffers"),
            ("/help", "list the commands"),
        ):
            app.screen.query_one(ChatInput).insert(command)
            await pilot.press("enter")
            await until(pilot, lambda said=said: said in talk_of(app) and not app._answering, command)  # type: ignore[misc]
        app.screen.query_one(ChatInput).insert("/clear")
        await pilot.press("enter")
        await until(pilot, lambda: "> one" not in talk_of(app))
        app.screen.query_one(ChatInput).insert(f"/load {file}")
        await pilot.press("enter")
        await until(pilot, lambda: "> one" in talk_of(app) and "Loaded 2 messages" in talk_of(app))


async def test_the_line_has_several_lines_history_and_completion(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("\n# 2026-01-01\n+older\n\n# 2026-01-02\n+two\n+lines\n", encoding="utf-8")
    app = new_chat(TypedHistory(history))
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        line = app.screen.query_one(ChatInput)
        await pilot.press("up")
        assert line.text == "two\nlines"
        await pilot.press("up", "up")
        assert line.text == "older"
        await pilot.press("down", "down", "down")
        assert line.text == ""
        await pilot.press(*"a\\", "enter", *"b", "alt+enter", *"c", "ctrl+j", *"d")
        assert line.text == "a\nb\nc\nd"
        await pilot.press("enter")
        await until(pilot, lambda: "> a\n  b\n  c\n  d" in talk_of(app))
        await until(pilot, lambda: not app._answering)
        await pilot.press(*"/exi", "tab")
        assert line.text == "/exit "
        line.clear()
        await pilot.press(*"/set t", "tab")
        assert line.text == "/set t" or line.text.startswith("/set te"), "as far as it is certain"
        line.clear()
        await pilot.press("tab")
        await pilot.pause()
        assert app.focused is not line, "nothing to complete: on to the next part"
    assert history.read_text(encoding="utf-8").endswith("+a\n+b\n+c\n+d\n")


async def test_keys_that_can_be_typed_are_typed() -> None:
    app = new_chat(source=HandSource(*FRAMES))
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("question_mark", "plus", "minus", "q", "1", "t", "p")
        assert app.screen.query_one(ChatInput).text == "?+-q1tp" and app._ceiling.wish is None
        await pilot.press("f1")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen) and "Alt-Enter" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.focused, ChatInput)


async def test_layouts_for_wide_and_narrow_windows() -> None:
    app = new_chat(source=HandSource(*FRAMES))
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        await until(pilot, lambda: app.pool.frame is not None)
        view, talk = app.screen.query_one(PoolView), app.screen.query_one(Transcript)
        assert view.region.x > talk.region.x and view.region.y == talk.region.y
        seen = []
        for _ in range(3):
            await pilot.press("f2")
            await pilot.pause()
            seen.append((talk.is_on_screen, view.is_on_screen))
        assert seen == [(True, False), (False, True), (True, True)]
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: view.region.y > talk.region.y and view.region.height == 5 and view.region.width == 80, "below")
        await until(pilot, lambda: "experts" in screen_text(app))


async def test_long_answers_are_followed_and_can_be_scrolled() -> None:
    text = "\n".join(f"line {number}" for number in range(60))
    app = new_chat(reply=text)
    async with app.run_test(size=(110, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "TTFT" in talk_of(app))
        await until(pilot, lambda: "line 59" in screen_text(app) and "line 5\n" not in screen_text(app), "following")
        await pilot.press("pageup", "pageup")
        await until(pilot, lambda: "line 59" not in screen_text(app), "scrolling away")
        await pilot.press("pagedown", "pagedown", "pagedown")
        await until(pilot, lambda: "line 59" in screen_text(app), "scrolling back")
        await pilot.resize_terminal(90, 24)
        await until(pilot, lambda: "line 59" in screen_text(app), "following in another size")


async def test_reasoning_and_control_characters() -> None:
    app = new_chat(reply="<think>hm\x07</think>\n\nYes\x1b[2J!")
    async with app.run_test(size=(110, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "TTFT" in talk_of(app))
        text = talk_of(app)
        assert "| hm\ufffd" in text and "Yes\ufffd[2J!" in text and "\x1b" not in text and "\x07" not in text


async def test_ctrl_c_stops_then_clears_then_leaves() -> None:
    app = new_chat(reply="word " * 500, step_seconds=0.01)
    async with app.run_test(size=(110, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"typed", "ctrl+c")
        assert app.screen.query_one(ChatInput).text == "" and app._interrupted_at < 0
        await pilot.press(*"go", "enter")
        await until(pilot, lambda: "word" in talk_of(app))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "(stopped" in talk_of(app))
        assert "Ctrl-C again leaves" in screen_text(app)
        await pilot.press("ctrl+c")
        await pilot.pause()
    app.let_go()
    assert app.return_value == 130 and app._link._process.returncode == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(("options", "said"), [({"die": 7}, "code 7"), ({"notices": 5}, "bug in rimuru")])
async def test_an_engine_that_never_begins_closes_the_window_with_the_reason(options: dict[str, object], said: str) -> None:
    app = new_chat(**options)
    async with app.run_test(size=(110, 30)) as pilot:
        await until(pilot, lambda: app.failure is not None and app._exit, "the end")
    assert isinstance(app.failure, EngineFailed) and (app.return_value, app.failure.exit_code) == (1, 1)
    assert said in f"{app.failure.what} {app.failure.hint}"


async def test_an_engine_that_ends_in_the_middle_leaves_the_talk_to_be_read() -> None:
    app = new_chat(source=HandSource(*FRAMES), fail_at=15)
    async with app.run_test(size=(130, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "TTFT" in talk_of(app) and not app._answering)
        await pilot.press(*"again", "enter")
        await until(pilot, lambda: "the fake engine broke" in talk_of(app) and "The engine has ended" in screen_text(app))
        assert "> hi" in talk_of(app) and "Hello there." in talk_of(app)
        await pilot.press(*"x", "enter")
        await until(pilot, lambda: "nobody answers" in screen_text(app))
        await pilot.press("ctrl+q")
        await pilot.pause()
    assert isinstance(app.failure, EngineFailed), "and the failure is told below the window"


def test_the_window_needs_a_terminal_and_the_dashboard() -> None:
    done = subprocess.run([sys.executable, "-m", "rimuru_cli", "chat", "--tui"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 2 and b"--tui needs a terminal" in done.stderr and b"Traceback" not in done.stderr
    with pytest.raises(UsageError, match="no-dashboard"):
        run_chat({"dashboard": False})


def test_a_child_that_speaks_nonsense_is_ended() -> None:
    ended: list[EngineEnded] = []
    link = ChatLink(lambda message: ended.append(message) or True, [sys.executable, "-c", "print('hello'); import time; time.sleep(60)"])  # type: ignore[arg-type,func-returns-value]
    link.start(protocol.Start({}))
    link._threads[0].join(10)
    assert ended and "unreadable" in ended[-1].last_words
    link.stop()


def test_a_child_that_does_not_listen_is_ended_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rimuru_cli.tui.chat_link._LEAVE_SECONDS", 0.2)
    monkeypatch.setattr("rimuru_cli.tui.chat_link._TERMINATE_SECONDS", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    link = ChatLink(lambda message: True, [sys.executable, "-c", code])
    link.start(protocol.Start({}))
    link.stop()
    link.stop()
    assert link._process is not None and link._process.returncode is not None


def test_own_engine_shows_its_process_and_no_other() -> None:
    source = HandSource(*FRAMES)
    asked: list[int] = []
    own = OwnEngine(lambda pid: asked.append(pid) or source)  # type: ignore[func-returns-value]
    assert own.poll() is None and own.state == "waiting" and own.engines() == [] and not own.can_control
    assert not own.request_ceiling(5) and not own.attach("x")
    own.begin(42)
    own.begin(43)
    assert asked == [42] and own.poll() is FRAMES[0] and own.can_control
    source.state = "waiting"
    assert own.poll() is None and len(source.frames) == len(FRAMES) - 1, "it would attach to somebody else's engine"
    own.close()
    assert source.closed == 1


def test_typed_history(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "history"
    history = TypedHistory(file)
    assert history.earlier("draft") is None and history.later() is None
    for text in ("one", "two\n\nlines", "two\n\nlines", "ünï\ud800"):
        history.add(text)
    again = TypedHistory(file)
    assert [again.earlier("draft") for _ in range(4)] == ["ünï?", "two\n\nlines", "one", None]
    assert [again.later() for _ in range(4)] == ["two\n\nlines", "ünï?", "draft", None]
    blocked = TypedHistory(tmp_path)
    blocked.add("kept here at least")
    assert blocked.earlier("") == "kept here at least"
