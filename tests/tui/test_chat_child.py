"""The engine's process behind a window, as a process: what it says, and that it never outlives its window."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from rimuru_cli.chat import protocol

SCRIPT = Path(__file__).parents[1] / "support" / "fake_child.py"
T = TypeVar("T")


class Talk:
    """A child and the line to it."""

    def __init__(self, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.heard: list[object] = []

    def say(self, message: protocol.ToEngine) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(protocol.encode(message))
        self.process.stdin.flush()

    def hear(self, kind: type[T]) -> T:
        """Read up to the next message of a kind."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"it ended before it said {kind.__name__}; it said {self.heard[-5:]}"
            message = protocol.decode(line)
            self.heard.append(message)
            if isinstance(message, kind):
                return message

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(15)


@pytest.fixture
def talk(request: pytest.FixtureRequest) -> Iterator[Talk]:
    talk = Talk(**getattr(request, "param", {}))
    # Nobody waits for ever: a process that is killed has said its last word.
    watchdog = threading.Timer(60.0, talk.process.kill)
    watchdog.start()
    yield talk
    watchdog.cancel()
    talk.process.kill()
    talk.process.wait()
    for stream in (talk.process.stdin, talk.process.stdout, talk.process.stderr):
        assert stream is not None
        stream.close()


def begin(talk: Talk, **flags: object) -> protocol.Ready:
    talk.say(protocol.Start(dict(flags)))
    ready = talk.hear(protocol.Ready)
    talk.hear(protocol.Idle)
    return ready


@pytest.mark.parametrize("talk", [{"reply": "word " * 200, "step_seconds": 0.01}], indirect=True)
def test_a_stop_right_behind_the_question_is_not_lost(talk: Talk) -> None:
    begin(talk)
    assert talk.process.stdin is not None
    for _ in range(3):
        talk.process.stdin.write(protocol.encode(protocol.Say("go")) + protocol.encode(protocol.Stop()))
        talk.process.stdin.flush()
        assert talk.hear(protocol.Answered).finish_reason == "cancelled"
        talk.hear(protocol.Idle)


def test_a_whole_talk(talk: Talk) -> None:
    ready = begin(talk, temperature="0.5", system="be brief")
    assert ready.pid == talk.process.pid and ready.model == "fake-model" and "/set" in ready.commands
    talk.say(protocol.Say("hi"))
    assert talk.hear(protocol.Begun).question == "hi"
    answered = talk.hear(protocol.Answered)
    assert answered.finish_reason == "stop" and "TTFT" in answered.notes[-1]
    assert talk.hear(protocol.Idle).used_tokens > 0
    assert "".join(m.text for m in talk.heard if isinstance(m, protocol.Piece)) == "Hello there."
    for command, said in (("/set temperature", "value is missing"), ("/nonsense", "no command")):
        talk.say(protocol.Say(command))
        failed = talk.hear(protocol.Failed)
        assert said in failed.message and not failed.fatal
    talk.say(protocol.Say("/ctx"))
    talk.hear(protocol.Idle)
    assert "context [" in talk.hear(protocol.Note).text
    talk.hear(protocol.Idle)
    talk.say(protocol.Say("/regen"))
    assert talk.hear(protocol.Begun).question == "hi"
    talk.hear(protocol.Idle)
    talk.say(protocol.Say("/clear"))
    assert talk.hear(protocol.Spoken).messages == ()
    talk.say(protocol.Say("//slash"))
    assert talk.hear(protocol.Begun).question == "/slash"
    talk.hear(protocol.Idle)
    talk.say(protocol.Say("/exit"))
    talk.hear(protocol.Left)
    assert talk.process.wait(15) == 0


@pytest.mark.parametrize("talk", [{"reply": "word " * 500, "step_seconds": 0.01}], indirect=True)
def test_an_answer_can_be_stopped_and_the_next_one_is_whole(talk: Talk) -> None:
    begin(talk)
    talk.say(protocol.Say("long"))
    talk.hear(protocol.Piece)
    talk.say(protocol.Stop())
    answered = talk.hear(protocol.Answered)
    assert answered.finish_reason == "cancelled" and "stopped" in answered.notes[0]
    talk.hear(protocol.Idle)
    talk.say(protocol.Stop())  # late, when there is nothing to stop
    talk.say(protocol.Say("/set max_tokens 3"))
    talk.hear(protocol.Idle)
    talk.say(protocol.Say("again"))
    assert talk.hear(protocol.Answered).finish_reason == "length"


def test_what_cannot_be_loaded_is_said_and_ends_it(talk: Talk) -> None:
    talk.say(protocol.Start({"memory": "nonsense"}))
    failed = talk.hear(protocol.Failed)
    assert failed.fatal and failed.exit_code == 2 and "nonsense" in failed.message
    assert talk.process.wait(15) == 2


@pytest.mark.parametrize("talk", [{"fail_at": 3}], indirect=True)
def test_an_engine_that_breaks_ends_it_with_words(talk: Talk) -> None:
    begin(talk)
    talk.say(protocol.Say("hi"))
    failed = talk.hear(protocol.Failed)
    assert failed.fatal and "the fake engine broke" in failed.message
    assert talk.process.wait(15) == 1


@pytest.mark.parametrize("talk", [{"reply": "word " * 5000, "step_seconds": 0.01}], indirect=True)
def test_a_window_that_vanishes_takes_it_along(talk: Talk) -> None:
    begin(talk)
    talk.say(protocol.Say("long"))
    talk.hear(protocol.Piece)
    began = time.monotonic()
    assert talk.end() == 0
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("talk", [{"step_seconds": 60.0, "grace": 0.5}], indirect=True)
def test_also_in_the_middle_of_a_step_that_does_not_end(talk: Talk) -> None:
    begin(talk)
    talk.say(protocol.Say("hi"))
    talk.hear(protocol.Begun)
    assert talk.end() == 0


@pytest.mark.skipif(os.name != "posix", reason="these signals exist on POSIX only")
def test_ctrl_c_in_the_terminal_is_none_of_its_business(talk: Talk) -> None:
    begin(talk)
    talk.process.send_signal(signal.SIGINT)
    talk.say(protocol.Say("hi"))
    assert talk.hear(protocol.Answered).finish_reason == "stop"
    assert talk.end() == 0


def test_what_libraries_print_does_not_get_between_the_messages() -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]);\n"
        "from fake_cli import fake_loader; from fake_engine import FakeEngine; from rimuru_cli.chat import child, loading\n"
        "def noisy(*args, **kwargs):\n"
        "    print('printed'); os.write(1, b'written\\n'); return fake_loader(FakeEngine())(*args, **kwargs)\n"
        "loading.load_model = noisy\n"
        "os._exit(child.main())"
    )
    start = protocol.encode(protocol.Start({})) + protocol.encode(protocol.Say("/exit"))
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT.parent)], input=start, capture_output=True, timeout=60, check=False)
    messages = [protocol.decode(line) for line in done.stdout.splitlines(keepends=True)]
    assert isinstance(messages[-1], protocol.Left) and done.returncode == 0
    assert b"printed" in done.stderr and b"written" in done.stderr
