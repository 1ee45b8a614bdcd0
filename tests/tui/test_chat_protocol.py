"""What window and engine say to each other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_cli.chat import protocol

MESSAGES = [
    protocol.Start({"memory": "8GiB", "seed": 3}, "system.txt", ("a", "b")),
    protocol.Say("héllo\n\ud800"),
    protocol.Stop(),
    protocol.Leave(),
    protocol.Progress("Loading", 1, 2),
    protocol.Note("x", "yellow"),
    protocol.Ready("m", 1, {"/set": ["seed"]}),
    protocol.Begun("q"),
    protocol.Reading(512, 4000),
    protocol.Piece("content", "日本"),
    protocol.Answered("stop", ("a", "b")),
    protocol.Spoken((("user", "q", ""), ("assistant", "a", "r"))),
    protocol.Failed("what", None, 6, True),
    protocol.Idle(5, 10),
    protocol.Left(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_line(message: protocol.ToEngine) -> None:
    line = protocol.encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and line.isascii()
    assert protocol.decode(line) == message


def test_all_kinds_of_messages_are_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(protocol._TYPES.values())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"[1]\n",
        b"{}\n",
        b'{"type": "nonsense"}\n',
        b'{"type": "say"}\n',
        b'{"type": "say", "text": "x", "more": 1}\n',
        b'{"type": ["say"]}\n',
        b"[" * 100_000,
        b"\xff\xfe\n",
    ],
)
def test_anything_else_is_an_error(line: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.decode(line)


@given(st.text())
def test_any_text_fits_on_a_line(text: str) -> None:
    assert protocol.decode(protocol.encode(protocol.Say(text))) == protocol.Say(text)


def test_json_names_its_type() -> None:
    assert json.loads(protocol.encode(protocol.Idle(3, 7))) == {"type": "idle", "used_tokens": 3, "context_limit": 7}
