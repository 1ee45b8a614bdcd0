from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_cli.engine.reasoning import ReasoningParser, TextDelta, opens_thinking


def parse(chunks: list[str], start: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(start)
    deltas: list[TextDelta] = []
    for chunk in chunks:
        deltas += parser.feed(chunk)
    deltas += parser.finish()
    assert all(d.text for d in deltas)
    kinds = [d.kind for d in deltas]
    assert kinds == sorted(kinds, reverse=True)  # reasoning first
    return tuple("".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("hello", False, ("", "hello")),
        ("  hello\n", False, ("", "  hello\n")),
        ("", False, ("", "")),
        ("<think>\nwhy?\n\nbecause\n</think>\n\nhello", False, ("why?\n\nbecause", "hello")),
        (" \n<think>a</think>b", False, ("a", "b")),
        ("<think>\n\n</think>\n\nhello", False, ("", "hello")),
        ("why?\n</think>\n\nhello", True, ("why?", "hello")),
        ("\n\nwhy?", True, ("why?", "")),
        ("never ends\n\n", True, ("never ends", "")),
        ("<think>a</thi", False, ("a</thi", "")),
        ("<thi", False, ("", "<thi")),
        ("<tho", False, ("", "<tho")),
        ("the tag <think> is x</think>", False, ("", "the tag <think> is x</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("a\n\n</thi\n</think>\n  b", True, ("a\n\n</thi", "  b")),
    ],
)
def test_split(text: str, start: bool, expected: tuple[str, str]) -> None:
    assert parse([text], start) == expected
    assert parse(list(text), start) == expected


PIECES = st.sampled_from(["<think>", "</think>", "<thi", "</th", "nk>", "\n", " ", "a", "<", "</", ">", "😀"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join), st.booleans(), st.data())
def test_any_chunking_gives_the_same_parse(text: str, start: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in pairwise(bounds)]
    assert parse(chunks, start) == parse([text], start)


def test_deltas_are_not_held_back_needlessly() -> None:
    parser = ReasoningParser()
    assert parser.feed("<think>\nab") == [TextDelta("reasoning", "ab")]
    assert parser.in_reasoning
    assert parser.feed(" c") == [TextDelta("reasoning", " c")]
    assert parser.feed("</think>") == []
    assert parser.feed("\n\n") == []
    assert not parser.in_reasoning
    assert parser.feed("d") == [TextDelta("content", "d")]


def test_prompts_that_open_the_reasoning() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert opens_thinking("x<think>")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thinking("<|im_start|>assistant\n")
