"""What a talk survives: a full disk, files that are no files, settings of two origins, half characters, controls in names."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeSpeech

from rimuru_cli.chat.conversation import Conversation, Message
from rimuru_cli.chat.line_input import PromptReader
from rimuru_cli.chat.loading import LoadedModel, opened_session, read_text_file
from rimuru_cli.chat.repl import Repl
from rimuru_cli.chat.session import ChatSession
from rimuru_cli.output import Output
from rimuru_cli.settings import Settings, resolve
from rimuru_models.errors import UsageError

GOOD = {"format": "rimuru-conversation", "version": 1, "system": None, "params": {}, "messages": []}
posix = pytest.mark.skipif(os.name != "posix", reason="there are no such files outside POSIX")


class Person:
    """Types prepared lines, then Ctrl-D."""

    def __init__(self, *lines: str) -> None:
        self.lines: Iterator[str] = iter(lines)

    def read_line(self, prompt: str) -> str:
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        return line


class FullDisk(io.StringIO):
    """A stdout that takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def document(file: Path, **changes: object) -> Path:
    file.write_text(json.dumps({**GOOD, **changes}), encoding="utf-8")
    return file


def test_an_answer_that_cannot_be_written_takes_its_question_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ChatSession(FakeEngine(), FakeSpeech())
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert Repl(session, Person("one", "two"), Output()).run() == 0
    assert session.conversation.messages == [] and not session.engine.has_work
    assert capsys.readouterr().err.count("The disk is full") == 2


@posix
def test_only_files_are_overwritten_and_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    session = ChatSession(FakeEngine(), FakeSpeech())
    for deed in (lambda: session.save(pipe, overwrite=True), lambda: session.load(pipe)):
        with pytest.raises(UsageError, match="pipe is not a regular file"):
            deed()
    assert pipe.is_fifo()
    with pytest.raises(UsageError, match="not a regular file"):
        session.load(Path("/dev/zero"))


@posix
def test_saving_over_a_link_writes_what_it_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "talk.json", tmp_path / "link.json"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    ChatSession(FakeEngine(), FakeSpeech()).save(link, overwrite=True)
    assert link.is_symlink() and json.loads(target.read_text(encoding="utf-8"))["messages"] == []


@posix
def test_an_endless_system_prompt_is_refused_before_memory_runs_out() -> None:
    with pytest.raises(UsageError, match="larger than"):
        read_text_file(Path("/dev/zero"), limit_bytes=1 << 16)


def test_a_file_that_is_too_large_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rimuru_cli.chat.conversation._MAX_FILE_BYTES", 10)
    with pytest.raises(UsageError, match="too large"):
        Conversation.load(document(tmp_path / "talk.json"))


def test_half_characters_in_a_file_do_not_spoil_the_talk(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b\udfff", "reasoning": "\ud83d"}]
    conversation, _ = Conversation.load(document(tmp_path / "talk.json", system="\udc80s", messages=said))
    assert conversation.system == "\ufffds"
    assert conversation.messages == [Message("user", "a\ufffd"), Message("assistant", "b\ufffd", "\ufffd")]


def test_half_characters_are_no_system_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    session = ChatSession(FakeEngine(), FakeSpeech(), Conversation("kind"))
    Repl(session, Person("/system be \udce9"), Output()).run()
    assert session.conversation.system == "kind"
    assert "not valid Unicode" in capsys.readouterr().err


def test_a_wrong_value_is_not_repeated_in_full(tmp_path: Path) -> None:
    for value in ("x" * 5000, [1] * 5000, 10**300):
        for name in ("temperature", "top_k"):
            if (name, value) == ("temperature", 10**300):
                continue  # a number
            with pytest.raises(UsageError) as caught:
                ChatSession(FakeEngine(), FakeSpeech()).load(document(tmp_path / "talk.json", params={name: value}))
            assert len(caught.value.what) < len(str(tmp_path)) + 200


def opened(settings: Settings) -> ChatSession:
    def load(name: str | None, settings: Settings, out: Output, *, chat: bool) -> LoadedModel:
        return LoadedModel(FakeEngine(), FakeSpeech())

    with opened_session(load, None, settings, Output()) as session:
        return session


def test_flags_of_the_command_line_win_over_a_loaded_file_and_that_is_said(tmp_path: Path) -> None:
    session = opened(resolve({"temperature": "0.25", "top_k": "7"}, file=tmp_path / "none", environ={"RIMURU_MIN_P": "0.1"}))
    file = document(tmp_path / "talk.json", params={"temperature": 0.9, "top_p": 0.5, "top_k": 7})
    told = session.load(file)
    assert session.overrides == {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
    assert len(told) == 1 and "temperature" in told[0] and "0.25" in told[0] and "0.9" in told[0] and "command line" in told[0]
    # What was set since by hand is as good as the file, and the file is newer.
    session.set_param("temperature", "0.3")
    assert session.load(file) == [] and session.overrides["temperature"] == 0.9


def test_a_flag_that_the_file_does_not_name_stays(tmp_path: Path) -> None:
    session = opened(resolve({"seed": "3"}, file=tmp_path / "none", environ={}))
    assert session.load(document(tmp_path / "talk.json")) == [] and session.overrides == {"seed": 3}


def test_clear_forgets_the_last_prompt_too(capsys: pytest.CaptureFixture[str]) -> None:
    Repl(ChatSession(FakeEngine(), FakeSpeech()), Person("secret word", "/clear", "/show last prompt"), Output()).run()
    assert "secret" not in capsys.readouterr().err


def test_a_tab_ends_the_name_of_a_command_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    session = ChatSession(FakeEngine(), FakeSpeech())
    Repl(session, Person("/set\ttop_k 4", "/set top_p\t0.5", "/"), Output()).run()
    assert session.overrides == {"top_k": 4, "top_p": 0.5}
    assert "??" not in capsys.readouterr().err


def test_a_history_that_cannot_be_written_any_more_does_not_end_the_talk(tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    file = tmp_path / "data" / "history"
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        reader = PromptReader(file, lambda before: ())
        file.unlink()
        file.mkdir()
        keys.send_text("hello\r")
        assert reader.read_line(">>> ") == "hello"
        keys.send_text("again\x1b[A\r")
        assert reader.read_line(">>> ") == "hello", "what was typed is still remembered here"


@posix
def test_ctrl_z_at_the_prompt_suspends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import Application, create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    suspended: list[object] = []
    monkeypatch.setattr(Application, "suspend_to_background", lambda self, suspend_group=True: suspended.append(self))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        reader = PromptReader(tmp_path / "history", lambda before: ())
        keys.send_text("hel\x1alo\r")
        assert reader.read_line(">>> ") == "hello" and len(suspended) == 1
