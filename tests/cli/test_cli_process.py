"""The command line in a process of its own: pipes, signals, a real terminal, what --help imports."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT / "fake_cli.py"
posix_only = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals and these signals exist on POSIX only")
LONG = "word " * 400


def command(options: dict[str, object], *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), json.dumps(options), *arguments]


def run(options: dict[str, object], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(options, *arguments), input=stdin, capture_output=True, timeout=60, check=False)


def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    done = run({"reply": "Zażółć \u2028 gęślą"}, "chat", stdin="Hé\n".encode())
    assert (done.returncode, done.stdout.decode("utf-8")) == (0, "Zażółć \u2028 gęślą\n")
    assert b"\x1b" not in done.stderr and b"fake-model" in done.stderr


def test_output_is_utf8_whatever_the_locale() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(command({"reply": "ü"}, "run", "m", "x"), capture_output=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "ü\n".encode())


@posix_only
def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        command({"reply": LONG, "step_seconds": 0.001}, "run", "m", "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(30) == 0
    assert b"Traceback" not in err and b"Broken" not in err


BROKEN_STREAMS = ["2>&-", "2>/dev/full", ">&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>/dev/full"]


@posix_only
@pytest.mark.parametrize("streams", BROKEN_STREAMS)
@pytest.mark.parametrize(
    "arguments", ["run m hi", "run m hi --json", "run m hi --json --stream", "config", "config --json", "--version", "run --json"]
)
def test_streams_that_are_closed_or_full_are_no_bugs(streams: str, arguments: str) -> None:
    if "/dev/full" in streams and not Path("/dev/full").exists():
        pytest.skip("this system has no full device")
    line = f"{shlex.join(command({}))} {arguments} {streams}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=False)
    full = ">/dev/full" in streams.replace("2>/dev/full", "")
    assert done.returncode == (2 if arguments == "run --json" else 5 if full else 0)
    assert all(word not in done.stderr for word in (b"Traceback", b"Exception ignored", b"bug"))
    if full and "2>" not in streams:
        assert b"error: " in done.stderr, "with a full stdout, --json errors are said on stderr"
    if streams.startswith("2>") and arguments == "run m hi":
        assert done.stdout == b"Hello there.\n"


@posix_only
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_what_was_said_and_the_right_code(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        command({"reply": LONG, "step_seconds": 0.02}, "run", "m", "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = process.stdout.read(4)
    process.send_signal(number)
    rest, err = process.communicate(timeout=30)
    text = (first + rest).decode()
    assert process.returncode == code and LONG.startswith(text.rstrip("\n")) and text.endswith("\n")
    assert b"Traceback" not in err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rimuru_cli.main import main; code = main(['--help']); "
        "heavy = {'torch', 'textual', 'huggingface_hub', 'transformers', 'tokenizers', 'numpy', 'prompt_toolkit'} & set(sys.modules); "
        "sys.stderr.write(','.join(sorted(heavy))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_python_m_and_completion() -> None:
    done = subprocess.run([sys.executable, "-m", "rimuru_cli", "--version"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith(b"rimuru ")
    environment = {**os.environ, "_RIMURU_COMPLETE": "complete_bash", "COMP_WORDS": "rimuru pro", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "rimuru_cli"], capture_output=True, timeout=60, env=environment, check=False)
    assert done.stdout.split() == [b"profile-hotset"]


class Screen:
    """rimuru chat on a pseudo-terminal."""

    def __init__(self, options: dict[str, object], home: Path) -> None:
        import pty

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"RIMURU_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "120", "LINES": "40"})
            os.execv(sys.executable, command(options, "chat"))
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 10.0) -> None:
        """Read until the text shows up after what was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            chunk = self._read() if ready else ""
            assert chunk, f"{text!r} did not show up; the screen has {self.seen[-2000:]!r}"
            self.seen += chunk
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def leave(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + 10.0
        while select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0] and (chunk := self._read()):
            self.seen += chunk
        assert time.monotonic() < deadline, f"it does not leave; the screen has {self.seen[-2000:]!r}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> str:
        try:
            return os.read(self.fd, 65536).decode("utf-8", "replace")
        except OSError:
            return ""

    def echoes(self) -> bool:
        """Whether the terminal echoes and reads lines, as a shell expects to find it."""
        import termios

        flags = termios.tcgetattr(self.fd)[3]
        return bool(flags & termios.ECHO) and bool(flags & termios.ICANON)


@pytest.fixture
def screens(tmp_path: Path) -> Iterator[type[Screen]]:
    opened: list[Screen] = []

    class Kept(Screen):
        def __init__(self, options: dict[str, object], home: Path = tmp_path / "home") -> None:
            super().__init__(options, home)
            opened.append(self)

    yield Kept
    for screen in opened:
        try:
            os.kill(screen.pid, signal.SIGKILL)
            os.waitpid(screen.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(screen.fd)


@posix_only
def test_a_talk_on_a_terminal(screens: type[Screen], tmp_path: Path) -> None:
    screen = screens({"reply": "<think>hm</think>Fine\x1b[31m!"})  # type: ignore[call-arg]
    screen.wait_for(">>>")
    screen.type("how are\\\r")
    screen.wait_for("...")
    screen.type("you\r")
    screen.wait_for("\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m\r\n")  # reasoning is dimmed
    screen.wait_for("Fine\ufffd[31m!")  # and a model cannot colour the screen
    screen.wait_for("TTFT")
    screen.wait_for(">>>")
    screen.type("\x1b[200~two\nlines\x1b[201~\r")
    screen.wait_for("Fine")
    screen.wait_for(">>>")
    screen.type("/show last prompt\r")
    screen.wait_for("<user>two")
    screen.wait_for("lines")
    screen.wait_for(">>>")
    screen.type("/e\t")
    screen.wait_for("/exit")
    screen.type("\r")
    assert screen.leave() == 0 and screen.echoes()
    history = (tmp_path / "home" / "data" / "history").read_text(encoding="utf-8")
    assert "+how are\\" in history and "+/exit" in history


@posix_only
def test_ctrl_d_leaves_with_0(screens: type[Screen]) -> None:
    screen = screens({})  # type: ignore[call-arg]
    screen.wait_for(">>>")
    screen.type("\x04")
    assert screen.leave() == 0 and screen.echoes()


@posix_only
def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(screens: type[Screen]) -> None:
    screen = screens({"reply": LONG, "step_seconds": 0.02})  # type: ignore[call-arg]
    screen.wait_for(">>>")
    screen.type("go\r")
    screen.wait_for("word word")
    screen.type("\x03")
    screen.wait_for("stays in the conversation")
    screen.wait_for(">>>")
    screen.type("/ctx\r")
    screen.wait_for("of 4,096 tokens")
    screen.wait_for(">>>")
    screen.type("half a line\x03")
    screen.wait_for("Ctrl-C again")
    screen.wait_for(">>>")
    screen.type("\x03")
    assert screen.leave() == 130 and screen.echoes()


@posix_only
def test_a_second_ctrl_c_after_a_stopped_answer_leaves_with_130(screens: type[Screen]) -> None:
    screen = screens({"reply": LONG, "step_seconds": 0.02})  # type: ignore[call-arg]
    screen.wait_for(">>>")
    screen.type("go\r")
    screen.wait_for("word")
    screen.type("\x03")
    screen.wait_for(">>>")
    screen.type("\x03")
    assert screen.leave() == 130 and screen.echoes()


@posix_only
@pytest.mark.parametrize("typed", ["half a line", "one\\\r", '"""one\r'])
def test_ctrl_c_while_typing_drops_what_was_typed_and_never_leaves(typed: str, screens: type[Screen]) -> None:
    screen = screens({"reply": LONG, "step_seconds": 0.02})  # type: ignore[call-arg]
    screen.wait_for(">>>")
    screen.type("go\r")
    screen.wait_for("word")
    screen.type("\x03")
    screen.wait_for("Ctrl-C again leaves")
    for _ in range(2):
        screen.wait_for(">>>")
        screen.type(typed)
        screen.wait_for("..." if typed.endswith("\r") else typed)
        screen.type("\x03")
        screen.wait_for("(Ctrl-C again")
    screen.wait_for(">>>")
    screen.type("\x03")
    assert screen.leave() == 130 and screen.echoes()


@posix_only
def test_termination_restores_the_terminal(screens: type[Screen]) -> None:
    screen = screens({})  # type: ignore[call-arg]
    screen.wait_for(">>>")
    os.kill(screen.pid, signal.SIGTERM)
    assert screen.leave() == 143 and screen.echoes()


def test_a_variable_of_huggingface_hub_that_cannot_be_read_is_no_bug_of_ours() -> None:
    env = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "soon"}
    done = subprocess.run([sys.executable, "-m", "rimuru_cli", "list"], env=env, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "") and "'soon'" in done.stderr and "HF_HUB_DOWNLOAD_TIMEOUT" in done.stderr
