"""A conversation's state: what a turn keeps, what an error or a Ctrl-C takes back, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeSpeech

from rimuru_cli.chat.conversation import Conversation, Message, write_whole
from rimuru_cli.chat.session import ChatSession
from rimuru_models.errors import DoesNotFitError, NotFoundError, UsageError


def new_session(**engine: object) -> ChatSession:
    return ChatSession(FakeEngine(**engine), FakeSpeech())  # type: ignore[arg-type]


def never() -> bool:
    return False


def ask(session: ChatSession, question: str) -> str:
    turn = session.ask(question, never)
    for _ in session.pieces(turn):
        pass
    return session.settle(turn).text


def test_the_second_turn_extends_the_first() -> None:
    session = new_session()
    assert ask(session, "one") == "Hello there."
    ask(session, "two")
    first, second = (text for text, _ in session.engine.submitted)  # type: ignore[attr-defined]
    assert second == first + "Hello there.\n<user>two\n<assistant>"
    assert [m.role for m in session.conversation.messages] == ["user", "assistant"] * 2


def test_system_prompt_and_thinking_reach_the_template() -> None:
    session = ChatSession(FakeEngine(), FakeSpeech(can_think=True), Conversation("be brief"), think=False)
    ask(session, "x")
    messages, think = session.speech.rendered[0]  # type: ignore[attr-defined]
    assert messages[0] == {"role": "system", "content": "be brief"} and think is False


def test_reasoning_is_kept_apart() -> None:
    session = new_session(reply=lambda prompt: "<think>hm</think>Yes.")
    assert ask(session, "x") == "Yes."
    assert session.conversation.messages[1] == Message("assistant", "Yes.", "hm")
    assert session.conversation.prompt()[1]["reasoning_content"] == "hm"


def test_stopping_keeps_the_part_that_came_and_cancels_the_request() -> None:
    session = new_session()
    engine = session.engine
    turn = session.ask("x", lambda: engine.steps >= 5)  # type: ignore[attr-defined]
    assert "".join(piece.text for piece in session.pieces(turn)) == "Hello"
    assert session.settle(turn).finish_reason == "cancelled"
    assert session.conversation.messages[-1] == Message("assistant", "Hello", stopped=True)
    assert len(engine.cancelled) == 1 and not engine.has_work  # type: ignore[attr-defined]


def test_stopping_before_the_first_word_takes_the_question_back() -> None:
    session = new_session()
    turn = session.ask("x", lambda: True)
    assert list(session.pieces(turn)) == []
    session.settle(turn)
    assert session.conversation.messages == [] and not session.engine.has_work


def test_a_failing_engine_leaves_the_conversation_as_it_was() -> None:
    session = new_session(fail_at=15)
    ask(session, "one")
    before = list(session.conversation.messages)
    with pytest.raises(RuntimeError, match="broke"):
        ask(session, "two")
    assert session.conversation.messages == before and not session.engine.has_work


def test_too_long_a_conversation_says_the_numbers_and_changes_nothing() -> None:
    session = new_session(context_limit=60)
    ask(session, "one")
    before = list(session.conversation.messages)
    with pytest.raises(DoesNotFitError, match=r"\d+ tokens.*60") as caught:
        ask(session, "x" * 100)
    assert "/clear" in (caught.value.hint or "")
    assert session.conversation.messages == before


def test_a_template_that_refuses_changes_nothing() -> None:
    session = ChatSession(FakeEngine(), FakeSpeech(refuses_system=True), Conversation("be nice"))
    with pytest.raises(UsageError, match="system role"):
        ask(session, "x")
    assert session.conversation.messages == []


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(UsageError):
        new_session().ask("  \n", never)


def test_regenerate_asks_the_last_question_again_and_restores_on_stop() -> None:
    session = new_session()
    with pytest.raises(UsageError):
        session.regenerate(never)
    ask(session, "one")
    before = list(session.conversation.messages)
    turn = session.regenerate(lambda: True)
    list(session.pieces(turn))
    session.settle(turn)
    assert session.conversation.messages == before
    turn = session.regenerate(never)
    list(session.pieces(turn))
    session.settle(turn)
    texts = [text for text, _ in session.engine.submitted]  # type: ignore[attr-defined]
    assert texts[0] == texts[-1] and len(session.conversation.messages) == 2


def test_stop_strings_end_the_answer_and_are_not_part_of_it() -> None:
    session = new_session()
    session.stop = (" there", "zzz")
    assert ask(session, "x") == "Hello"
    assert session.last_answer is not None and session.last_answer.finish_reason == "stop"
    assert not session.engine.has_work, "the request behind the stop string is ended"


def test_sampling_settings_override_the_models_own() -> None:
    session = new_session()
    session.set_param("top-k", "5")
    session.set_param("temperature", "0")
    params = session.params()
    assert (params.top_k, params.temperature, params.top_p) == (5, 0.0, 0.9)
    session.set_param("temperature", "default")
    assert session.params().temperature == 0.7
    for name, value in (("top_p", "3"), ("memory", "5"), ("nonsense", "1"), ("seed", "x")):
        with pytest.raises(UsageError):
            session.set_param(name, value)
    assert session.overrides == {"top_k": 5}


def test_used_tokens_counts_the_rendered_conversation() -> None:
    session = new_session()
    assert session.used_tokens() == 0
    ask(session, "hi")
    assert session.used_tokens() == len("<user>hi\n<assistant>Hello there.\n")


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    session = new_session(reply=lambda prompt: "<think>a</think>bü\ud800".encode("utf-8", "replace").decode())
    session.conversation.system = "sys"
    session.set_param("seed", "3")
    ask(session, "q\nüñ")
    file = tmp_path / "talk.json"
    session.save(file, overwrite=False)
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["format"], document["version"], document["model"]) == ("rimuru-conversation", 1, "fake-model")
    assert document["saved_at"].endswith("+00:00")
    other = new_session()
    assert other.load(file) == []
    assert (other.conversation, other.overrides) == (session.conversation, {"seed": 3})


def test_saving_never_overwrites_unasked_and_leaves_no_partial_file(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("precious", encoding="utf-8")
    session = new_session()
    with pytest.raises(UsageError, match="exists") as caught:
        session.save(file, overwrite=False)
    assert "/save!" in (caught.value.hint or "") and file.read_text(encoding="utf-8") == "precious"
    session.save(file, overwrite=True)
    assert json.loads(file.read_text(encoding="utf-8"))["messages"] == []
    with pytest.raises(UsageError, match="folder"):
        session.save(tmp_path, overwrite=True)
    with pytest.raises(UsageError, match="no folder"):
        session.save(tmp_path / "none" / "x.json", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text("old", encoding="utf-8")

    def interrupted(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rimuru_cli.chat.conversation.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text(encoding="utf-8") == "old" and len(list(tmp_path.iterdir())) == 1


GOOD = {"format": "rimuru-conversation", "version": 1, "system": None, "params": {}, "messages": []}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        json.dumps({**GOOD, "format": "x"}).encode(),
        json.dumps({**GOOD, "version": 2}).encode(),
        json.dumps({**GOOD, "system": 3}).encode(),
        json.dumps({**GOOD, "params": []}).encode(),
        json.dumps({**GOOD, "params": {"top_p": 9}}).encode(),
        json.dumps({**GOOD, "messages": "x"}).encode(),
        json.dumps({**GOOD, "messages": ["x"]}).encode(),
        json.dumps({**GOOD, "messages": [USER, USER]}).encode(),
        json.dumps({**GOOD, "messages": [USER]}).encode(),
        json.dumps({**GOOD, "messages": [{"role": "assistant", "content": "x"}]}).encode(),
        json.dumps({**GOOD, "messages": [{"role": "user", "content": 1}]}).encode(),
    ],
)
def test_a_wrong_file_changes_nothing(content: bytes, tmp_path: Path) -> None:
    session = new_session()
    ask(session, "one")
    before = list(session.conversation.messages)
    file = tmp_path / "talk.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"talk\.json"):
        session.load(file)
    assert session.conversation.messages == before


def test_loading_what_is_not_there_and_unknown_settings(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        new_session().load(tmp_path / "none.json")
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({**GOOD, "params": {"mirostat": 2, "top_k": 4}}), encoding="utf-8")
    session = new_session()
    assert "mirostat" in session.load(file)[0] and session.overrides == {"top_k": 4}
