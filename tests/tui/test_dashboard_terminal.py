"""The dashboard and the chat window on a real terminal: what the screen shows, and that it is clean afterwards however they end.

In tmux, which knows what a screen shows; where there is none, on a pseudo-terminal, where only what was written can be looked at.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no pseudo-terminals outside POSIX")
if os.name == "posix":
    from pty_screen import PtyScreen, TmuxScreen

SUPPORT = Path(__file__).parents[1] / "support"
DASHBOARD = [sys.executable, "-m", "rimuru_cli", "dashboard"]
RESTORED = ("\x1b[?1049l", "\x1b[?25h", "\x1b[?1000l", "\x1b[?1003l", "\x1b[?2004l", "\x1b[?1004l")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "RIMURU_HOME": str(tmp_path / "home"),
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }


def publisher(environ: dict[str, str], **options: object) -> subprocess.Popen[bytes]:
    """A made-up engine that publishes as a real one does."""
    command = [
        sys.executable,
        str(SUPPORT / "synthetic_publisher.py"),
        f"{environ['RIMURU_HOME']}/run",
        json.dumps({"pages": 300, "layers": 6, **options}),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def end(engine: subprocess.Popen[bytes]) -> None:
    assert engine.stdin is not None
    engine.stdin.close()
    engine.wait(20)


@pytest.fixture
def screens(environ: dict[str, str]) -> Iterator[list[TmuxScreen]]:
    opened: list[TmuxScreen] = []
    yield opened
    for screen in opened:
        screen.close()


def on_tmux(screens: list[TmuxScreen], command: list[str], environ: dict[str, str], size: tuple[int, int] = (120, 40)) -> TmuxScreen:
    try:
        screens.append(TmuxScreen(command, size=size, environ=environ))
    except FileNotFoundError:
        pytest.skip("there is no tmux here; the tests on a plain pseudo-terminal ran")
    return screens[-1]


def test_in_tmux_through_an_engines_whole_life(screens: list[TmuxScreen], environ: dict[str, str]) -> None:
    screen = on_tmux(screens, DASHBOARD, environ)
    screen.wait_for("No engine is running.")
    engine = publisher(environ)
    for wanted in ("pool: 301 huge pages", "synthetic/Slime-30B-A3B", "experts", "KV", "99.9", "adjuster", "layer x expert"):
        screen.wait_for(wanted)
    screen.press("?")
    assert "from part to part" in screen.wait_for("Esc closes")
    screen.press("Escape")
    screen.wait_for(lambda text: "Esc closes" not in text)
    screen.press("Down", "Right", "Enter")
    screen.wait_for("huge page 1 of")
    screen.press("Escape")
    screen.wait_for("adjuster")  # Esc and a key right behind it would be one key
    screen.press("-")
    screen.wait_for("The ceiling is")
    screen.resize((80, 24))
    text = screen.wait_for(lambda text: max(len(line.rstrip()) for line in text.splitlines()) <= 80 and "layer x expert" not in text)
    assert "pool: 301 huge pages" in text and text.count("pool: ") == 1, "nothing of the larger picture is left"
    end(engine)
    screen.wait_for("The engine has ended")
    engine = publisher(environ, pages=400, seed=3)
    screen.wait_for("pool: 401 huge pages")
    screen.press("q")
    text = screen.wait_for("left with 0")
    end(engine)
    assert "pool:" not in text, "the screen from before is back"
    text = screen.wait_for("echo")
    assert "-icanon" not in text and "-echo" not in text, "the terminal reads and echoes lines again"


def test_in_tmux_without_colours(screens: list[TmuxScreen], environ: dict[str, str]) -> None:
    engine = publisher(environ)
    screen = on_tmux(screens, DASHBOARD, {**environ, "NO_COLOR": "1"}, (80, 24))
    text = screen.wait_for("pool: 301 huge pages")
    assert "▓" in text and "░" in text and "▀" not in text
    coloured = screen._run("capture-pane", "-p", "-e")
    codes = {code for part in coloured.split("\x1b[")[1:] for code in part.split("m")[0].split(";")}
    assert codes <= {"", "0", "1", "2", "7", "22", "27", "39", "49"}, "weight and reverse, no colour"
    screen.press("C-c")
    screen.wait_for("Ctrl-C again leaves")
    screen.press("C-c")
    screen.wait_for("left with 130")
    end(engine)


def test_in_tmux_the_chat_window(screens: list[TmuxScreen], environ: dict[str, str]) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rimuru_cli.tui import chat_app; from functools import partial\n"
        "command = [sys.executable, sys.argv[1] + '/fake_child.py', '{\"reply\": \"Canberra is the capital.\"}']\n"
        "chat_app.ChatApp.__init__.__kwdefaults__['command'] = command\n"
        "from rimuru_cli.main import main; sys.exit(main(['chat', '--tui']))"
    )
    screen = on_tmux(screens, [sys.executable, "-c", code, str(SUPPORT)], environ)
    screen.wait_for("of 4,096 tokens")
    screen.press("What is it?", "Enter")
    text = screen.wait_for("TTFT")
    assert "> What is it?" in text and "Canberra is the capital." in text
    screen.press("/exit", "Enter")
    screen.wait_for("left with 0")


@pytest.mark.parametrize(("how", "code"), [("q", 0), ("\x03\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_put_back(environ: dict[str, str], how: str | signal.Signals, code: int) -> None:
    engine = publisher(environ)
    screen = PtyScreen(DASHBOARD, size=(100, 30), environ=environ)
    screen.wait_for("pool: 301 huge pages")
    if isinstance(how, str):
        for key in how:
            screen.press(key)
            screen.read(0.3)
    else:
        os.kill(screen.pid, how)
    assert screen.leave() == code
    end(engine)
    written = screen.written.decode("utf-8", "replace")
    for sequence in RESTORED:
        assert written.rfind(sequence) > written.rfind("pool: "), f"{sequence!r} comes after the last picture"
    assert "Traceback" not in written


def test_bytes_that_are_no_characters_do_not_end_it(environ: dict[str, str]) -> None:
    screen = PtyScreen([*DASHBOARD, "--demo"], size=(100, 30), environ=environ)
    screen.wait_for("pool: ")
    screen.press("\udce4")  # an umlaut from a terminal that is set to Latin-1
    screen.press("?")
    screen.wait_for("Esc closes")
    screen.press("q")
    screen.read(0.5)
    screen.press("\udcff\udcffq")
    assert screen.leave() == 0
    assert "Traceback" not in screen.text and "Error" not in screen.text


def test_a_fault_in_reading_keys_is_told_in_words(environ: dict[str, str]) -> None:
    code = (
        "import sys; from textual._xterm_parser import XTermParser\n"
        "def fail(self, *rest): raise ValueError('the test broke it')\n"
        "XTermParser.feed = fail\n"
        "from rimuru_cli.main import main; sys.exit(main(['dashboard', '--demo']))"
    )
    screen = PtyScreen([sys.executable, "-c", code], size=(100, 30), environ=environ)
    screen.wait_for("pool: ")
    screen.press("x")
    assert screen.leave(30.0) == 1
    assert "error: Unexpected ValueError: the test broke it" in screen.text and "Traceback" not in screen.text


@pytest.mark.parametrize("broken", ["FrameBridge._loop", "PageMap.show_frame"])
def test_a_fault_puts_the_terminal_back_and_is_told_in_words(environ: dict[str, str], broken: str) -> None:
    code = (
        "import sys; from rimuru_cli.tui.bridge import FrameBridge; from rimuru_cli.tui.widgets.page_map import PageMap\n"
        "def fail(self, *rest): raise ValueError('the test broke it')\n"
        f"{broken} = fail\n"
        "from rimuru_cli.main import main; sys.exit(main(['dashboard']))"
    )
    engine = publisher(environ)
    screen = PtyScreen([sys.executable, "-c", code], size=(100, 30), environ=environ)
    assert screen.leave(30.0) == 1
    end(engine)
    written = screen.written.decode("utf-8", "replace")
    assert "error: Unexpected ValueError: the test broke it" in written and "Traceback" not in written
    assert written.rfind("\x1b[?1049l") > written.rfind("\x1b[?1049h") and written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


def test_sixteen_colours_are_the_terminals_own(environ: dict[str, str]) -> None:
    engine = publisher(environ)
    screen = PtyScreen(DASHBOARD, size=(100, 30), environ={**environ, "TERM": "xterm", "COLORTERM": ""})
    screen.wait_for("pool: 301 huge pages")
    screen.press("q")
    assert screen.leave() == 0
    end(engine)
    written = screen.written.decode("utf-8", "replace")
    assert "38;2;" not in written and "48;2;" not in written and "38;5;" not in written and "\x1b[33;" in written


def test_the_chat_window_leaves_no_process_behind(environ: dict[str, str]) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rimuru_cli.tui import chat_app\n"
        'command = [sys.executable, sys.argv[1] + \'/fake_child.py\', \'{"reply": "word word", "step_seconds": 0.2}\']\n'
        "chat_app.ChatApp.__init__.__kwdefaults__['command'] = command\n"
        "from rimuru_cli.main import main; sys.exit(main(['chat', '--tui']))"
    )
    screen = PtyScreen([sys.executable, "-c", code, str(SUPPORT)], size=(110, 30), environ=environ)
    screen.wait_for("of 4,096 tokens")
    children = [
        int(pid) for pid in subprocess.run(["ps", "-o", "pid=", "--ppid", str(screen.pid)], capture_output=True, check=False).stdout.split()
    ]
    assert children
    screen.press("hi\r")
    screen.wait_for("answering")
    os.kill(screen.pid, signal.SIGKILL)
    assert screen.leave() == -signal.SIGKILL
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children), "the engine's process went with its window"
