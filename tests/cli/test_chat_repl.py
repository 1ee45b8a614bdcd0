"""The talk on a terminal, with a scripted person: slash commands, multi-line input, leaving."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import FakeChange, FakeEngine, FakeSpeech

from rimuru_cli.chat import slash
from rimuru_cli.chat.interrupt import InterruptFlag
from rimuru_cli.chat.line_input import PromptReader, complete_words, read_message
from rimuru_cli.chat.repl import Repl
from rimuru_cli.chat.session import ChatSession
from rimuru_cli.output import Output

CTRL_C, CTRL_D = KeyboardInterrupt(), EOFError()


class Person:
    """Types prepared lines; an exception stands for the key that raises it."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines: Iterator[str | BaseException] = iter(lines)
        self.prompts: list[str] = []

    def read_line(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self.lines, CTRL_D)
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str, ChatSession]]:
    def run(
        *lines: str | BaseException, engine: FakeEngine | None = None, speech: FakeSpeech | None = None
    ) -> tuple[int, str, str, ChatSession]:
        session = ChatSession(engine or FakeEngine(), speech or FakeSpeech())
        code = Repl(session, Person(*lines), Output()).run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err, session

    return run


Talk = Callable[..., tuple[int, str, str, ChatSession]]


def test_an_answer_streams_to_stdout_and_timings_to_stderr(talk: Talk) -> None:
    code, out, err, _ = talk("hello")
    assert (code, out) == (0, "Hello there.\n")
    for words in ("prompt 23 tok at 46.0 tok/s", "answer 12 tok", "TTFT 0.50 s", "hits 75 %", "experts 70 %", "KV 10 %", "free 20 %"):
        assert words in err


def test_cached_tokens_are_named(talk: Talk) -> None:
    class Caching(FakeEngine):
        def submit(self, prompt_ids, params):  # type: ignore[no-untyped-def]
            request = super().submit(prompt_ids, params)
            # what an answer takes is computed as well, and none of the prompt
            request.timings.cached_tokens, request.timings.computed_tokens = 20, 3 + 400
            return request

    assert "(20 cached) at 6.0 tok/s" in talk("hello", engine=Caching())[2]


def test_reasoning_never_reaches_stdout(talk: Talk) -> None:
    _, out, err, _ = talk("x", engine=FakeEngine(reply=lambda p: "<think>secret thoughts</think>Done"))
    assert out == "Done\n" and "secret thoughts\n" in err


def test_several_lines(talk: Talk) -> None:
    for lines in (["one\\", "two"], ['"""one', 'two"""'], ['"""', "one", "two", '"""'], ["one\ntwo"]):
        *_, session = talk(*lines)
        assert session.conversation.messages[0].content == "one\ntwo", lines


def test_continuation_lines_have_their_own_prompt() -> None:
    person = Person("a\\", "b\\", "c")
    assert read_message(person) == "a\nb\nc"
    assert person.prompts == [">>> ", "... ", "... "]


def test_ctrl_d_leaves_also_in_the_middle_of_a_message(talk: Talk) -> None:
    assert talk(CTRL_D)[0] == 0
    code, out, _, session = talk('"""never finished', CTRL_D)
    assert (code, out, session.conversation.messages) == (0, "", [])


def test_ctrl_c_at_the_prompt_explains_itself_and_the_second_leaves(talk: Talk) -> None:
    code, _, err, _ = talk(CTRL_C, CTRL_C, "never read")
    assert code == 130 and "Ctrl-C again" in err


def test_anything_typed_between_two_ctrl_c_disarms(talk: Talk) -> None:
    assert talk(CTRL_C, "hello", CTRL_C, "", CTRL_C, CTRL_D)[0] == 0


class PressingEngine(FakeEngine):
    """Ctrl-C comes in the middle of step 6, as many times as `presses` says."""

    presses = 1

    def step(self):  # type: ignore[no-untyped-def]
        if self.steps == 5:
            self.in_step = True
            for _ in range(self.presses):
                signal.raise_signal(signal.SIGINT)
            self.in_step = False
        return super().step()


def test_ctrl_c_in_the_middle_of_a_step_ends_the_answer_after_it(talk: Talk) -> None:
    engine = PressingEngine()
    code, out, err, session = talk("x", "/show params", engine=engine)
    assert (code, out) == (0, "Hello \n") and "stopped" in err
    assert session.conversation.messages[-1].stopped and not engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_after_a_stopped_answer_leaves(talk: Talk) -> None:
    assert talk("x", CTRL_C, "never read", engine=PressingEngine())[0] == 130


def test_ctrl_c_twice_during_an_answer_leaves(talk: Talk) -> None:
    engine = PressingEngine()
    engine.presses = 2
    code, out, _, session = talk("x", "never read", engine=engine)
    assert (code, out) == (130, "Hello \n") and len(session.conversation.messages) == 2


def test_the_third_ctrl_c_leaves_even_out_of_a_step(talk: Talk) -> None:
    engine = PressingEngine()
    engine.presses = 3
    with pytest.raises(SystemExit) as caught:
        talk("x", engine=engine)
    assert caught.value.code == 130 and engine.cancelled == [], "a torn engine is not touched again"


def test_the_flag_restores_the_handler_and_counts() -> None:
    with InterruptFlag() as flag:
        assert not flag
        signal.raise_signal(signal.SIGINT)
        assert flag and flag.count == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_errors_do_not_end_the_talk(talk: Talk) -> None:
    code, out, err, session = talk("x" * 100, "ok", engine=FakeEngine(context_limit=90))
    assert (code, out) == (0, "Hello there.\n")
    assert "error: The prompt has" in err and "/clear" in err
    assert len(session.conversation.messages) == 2


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, "~nobody-of-this-name/talk.json", "a\nb/c"])
@pytest.mark.parametrize("command", ["/save", "/save!", "/load"])
def test_a_file_name_that_cannot_be_does_not_end_the_talk(command: str, name: str, talk: Talk) -> None:
    code, out, err, session = talk("x", f"{command} {name}", "y")
    assert (code, out) == (0, "Hello there.\nHello there.\n") and len(session.conversation.messages) == 4
    assert err.count("error: ") == 1 and "bug" not in err


def test_a_prompt_that_was_stopped_claims_no_times(talk: Talk) -> None:
    class Prefilling(FakeEngine):
        def step(self):  # type: ignore[no-untyped-def]
            signal.raise_signal(signal.SIGINT)
            return []

    _, _, err, _ = talk("x", engine=Prefilling())
    assert "taken back" in err and "tok/s" not in err and "TTFT" not in err


def test_an_answer_that_is_cut_says_why(talk: Talk) -> None:
    assert "context of 30 tokens is full" in talk("hello", engine=FakeEngine(context_limit=30))[2]
    _, out, err, _ = talk("/set max_tokens 3", "hello")
    assert out == "Hel\n" and "max-tokens" in err


def test_unknown_commands_suggest(talk: Talk) -> None:
    _, out, err, session = talk("/hepl", "/usr/bin is a folder", "//usr/bin is a folder")
    assert "There is no command /hepl" in err and "/help?" in err
    assert session.conversation.messages[0].content == "/usr/bin is a folder" and out == "Hello there.\n"
    assert len(session.conversation.messages) == 2


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye", "/EXIT"])
def test_leaving(word: str, talk: Talk) -> None:
    assert talk(word, CTRL_C, CTRL_C)[0] == 0


def test_help_lists_every_command(talk: Talk) -> None:
    err = talk("/help")[2]
    for name in ("/help", "/exit", "/clear", "/regen", "/system", "/set", "/show", "/save", "/load", "/think", "/pool", "/memory", "/ctx"):
        assert f"  {name}" in err


def test_clear_keeps_the_system_prompt(talk: Talk) -> None:
    *_, session = talk("/system be\nkind", "hello", "/clear")
    assert (session.conversation.system, session.conversation.messages) == ("be\nkind", [])
    *_, err, session = talk("/system x", "/system", "/system none")
    assert session.conversation.system is None and err.count("System prompt: x") == 2


def test_regen_answers_again_and_warns_when_nothing_can_change(talk: Talk) -> None:
    code, out, err, session = talk("/regen", "hello", "/set seed 5", "/regen")
    assert "no answer" in err and "seed is fixed at 5" in err
    assert out == "Hello there.\n" * 2 and len(session.conversation.messages) == 2 and code == 0


def test_set_shows_changes_and_refuses(talk: Talk) -> None:
    *_, err, session = talk("/set", "/set top_p=0.5", "/set temperature 9 9", "/set top_k", "/set nose 3")
    assert "0.5  (set)" in err and session.overrides == {"top_p": 0.5}
    assert "A value is missing" in err and "no sampling setting 'nose'" in err and "temperature: '9 9' is not a number" in err


def test_show(talk: Talk) -> None:
    err = talk("/show model", "/show system", "/show last prompt", "hi", "/show last prompt", "/show params", "/show", "/show x")[2]
    assert "FakeForCausalLM" in err and "16 of 32 experts resident" in err and "No system prompt." in err
    assert "Nothing was asked yet." in err and "<user>hi\n<assistant>\n" in err and err.count("Show what?") == 2


def test_pool_and_ctx(talk: Talk) -> None:
    err = talk("/pool", "hi", "/ctx", engine=FakeEngine(context_limit=100))[2]
    bar = next(line for line in err.splitlines() if line.startswith("[E"))
    letters = bar[1 : bar.index("]")]
    assert len(letters) == 48 and [letters.count(c) for c in "EBK."] == [29, 5, 4, 10]
    assert "16 of 32 experts" in err and "50 B of it kept for reuse" in err
    assert "33 of 100 tokens (33 %)" in err and "8,192" in err


def test_memory_shows_the_ceiling_and_changes_it(talk: Talk) -> None:
    engine = FakeEngine()
    err = talk("/memory", engine=engine)[2]
    assert "memory ceiling 1.0 GiB; at least 512.0 MiB would do now" in err and "dense weights 1.0 MiB" in err
    err = talk("/memory 3GiB", engine=engine)[2]
    assert engine.memory_bytes == 3 << 30 and "The memory ceiling is 3,072 MiB now." in err and "memory ceiling 3.0 GiB" in err
    code, _, err, _ = talk("/memory 100MiB", "/memory many", "/memory 0", engine=engine)
    assert code == 0 and engine.memory_bytes == 3 << 30
    assert "at least 512 MiB" in err and "Give at least 512MiB" in err and "many" in err


def test_what_a_new_ceiling_has_to_say_is_said_once(talk: Talk) -> None:
    class Talking(FakeEngine):
        def set_memory(self, ceiling_bytes: int) -> FakeChange:
            self.notices = ("The memory ceiling allows 100 tokens.",) if ceiling_bytes < 1 << 30 else ()
            return super().set_memory(ceiling_bytes)

    *_, err, session = talk("/memory 600MiB", "/memory 700MiB", "/memory 2GiB", engine=Talking())
    assert err.count("allows 100 tokens") == 1 and session.notices == ()


def test_think_switches_only_models_that_reason(talk: Talk) -> None:
    assert "nothing to switch" in talk("/think off")[2]
    speech = FakeSpeech(can_think=True)
    *_, err, session = talk("/think off", "x", "/think default", "/think", "/think perhaps", speech=speech)
    assert speech.rendered[0][1] is False and session.think is None
    assert "Reasoning: off" in err and "as the model likes" in err and "'perhaps' is neither" in err


def test_save_and_load(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "a talk.json"
    _, _, err, session = talk(
        "hello", f"/save {file}", f"/save {file}", f"/save! {file}", "/clear", f'/load "{file}"', "/save", "/load none.json"
    )
    assert len(json.loads(file.read_text(encoding="utf-8"))["messages"]) == 2
    assert len(session.conversation.messages) == 2
    assert "exists already" in err and err.count("Saved 2") == 2 and "A file name is missing" in err and "no file none.json" in err


def test_completion_of_commands_and_arguments() -> None:
    names = tuple(slash.COMMANDS)
    assert complete_words("/re", names, slash.completions) == ["/regen"]
    assert complete_words("/set top", names, slash.completions) == ["top_k", "top_p"]
    assert complete_words("hello /re", names, slash.completions) == []
    assert complete_words("/think o", names, slash.completions) == ["on", "off"]
    assert complete_words("/set top_p 0", names, slash.completions) == []


def test_history_is_private_and_optional(tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    file = tmp_path / "data" / "history"
    assert PromptReader(file, lambda before: ()).notice is None
    if os.name == "posix":
        assert file.stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("", encoding="utf-8")
    notice = PromptReader(tmp_path / "file" / "history", lambda before: ()).notice
    assert notice is not None and "not remembered" in notice


class Terminal(io.StringIO):
    """A screen that remembers everything."""

    def isatty(self) -> bool:
        return True


def test_reading_a_long_prompt_shows_on_a_terminal_and_is_wiped_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    session = ChatSession(FakeEngine(piece_tokens=10), FakeSpeech())
    assert Repl(session, Person("hello"), Output()).run() == 0
    text = screen.getvalue()
    reading, _, rest = text.partition("Hello there.")
    assert "reading the prompt" in reading and "10 of 23" in reading
    assert reading.endswith(" \r"), "the bar is still on the line of the answer"
    assert "reading" not in rest


def test_a_prompt_of_one_step_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    Repl(ChatSession(FakeEngine(piece_tokens=23), FakeSpeech()), Person("hello"), Output()).run()
    assert "reading" not in screen.getvalue()


def test_progress_stays_out_of_pipes(talk: Talk) -> None:
    _, out, err, _ = talk("hello", engine=FakeEngine(piece_tokens=5))
    assert out == "Hello there.\n"
    assert "reading" not in err
