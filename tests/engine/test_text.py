from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import IM_END, IM_START, write_tiny_tokenizer

from rimuru_cli.engine.chat_template import ChatTemplate
from rimuru_cli.engine.request import SamplingParams
from rimuru_cli.engine.text import StopStrings, TextDelta, TextStream, render_prompt
from rimuru_cli.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_dir(folder)


def cut(chunks: list[str], stop: list[str]) -> tuple[str, bool]:
    stops = StopStrings(stop)
    text = "".join(stops.feed(c) for c in chunks)
    return text + stops.finish(), stops.stopped


def expected_cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """Independent definition: the first end at which any stop string is complete, and the longest of those that end there."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello", [], ("hello", False)),
        ("hello###world", ["###"], ("hello", True)),
        ("hello##", ["###"], ("hello##", False)),
        ("abcd", ["bcd", "c"], ("ab", True)),
        ("xabc", ["bc", "abc"], ("x", True)),
        ("aaab", ["aab"], ("a", True)),
    ],
)
def test_stop_strings(text: str, stop: list[str], expected: tuple[str, bool]) -> None:
    assert cut([text], stop) == expected
    assert cut(list(text), stop) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab\n", max_size=14),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 14), max_size=5),
)
def test_any_chunking_stops_at_the_same_place(text: str, stop: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(bounds)]
    assert cut(chunks, stop) == expected_cut(text, stop)


def test_only_possible_stop_strings_are_held_back() -> None:
    stops = StopStrings(["###"])
    assert stops.feed("ab#") == "ab"
    assert stops.feed("c##") == "#c"
    assert stops.feed("##x") == ""
    assert stops.stopped
    assert stops.feed("more") == ""


def run(stream: TextStream, text: bytes) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    for token in text:
        deltas += stream.feed(token)
        if stream.stopped:
            break
    return deltas + stream.finish()


def test_plain_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(), reasoning=False, prompt_text="")
    deltas = run(stream, "<think>né😀</think>\xff".encode()[:-1])
    assert {d.kind for d in deltas} == {"content"}
    assert stream.text == "".join(d.text for d in deltas) == "<think>né😀</think>\ufffd"
    assert stream.reasoning_text == ""


def test_reasoning_and_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("\n\n", "END")), reasoning=True, prompt_text="")
    deltas = run(stream, b"<think>\nfirst\n\nEND second\n</think>\n\nanswer\n\nmore")
    assert stream.stopped
    assert stream.reasoning_text == "first\n\nEND second"
    assert stream.text == "answer"
    assert [d for d in deltas if not d.text] == []


def test_prompt_that_opened_the_reasoning(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(), reasoning=True, prompt_text="<|im_start|>assistant\n<think>\n")
    run(stream, b"why</think>yes")
    assert (stream.reasoning_text, stream.text) == ("why", "yes")


def test_text_held_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("###",)), reasoning=True, prompt_text="")
    assert "".join(d.text for d in run(stream, b"a##")) == stream.text == "a##"
    assert not stream.stopped


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for i, tag in enumerate(("<think>", "</think>")):
        content["added_tokens"].append({**content["added_tokens"][0], "id": 259 + i, "content": tag})
    path.write_text(json.dumps(content), encoding="utf-8")
    stream = TextStream(Tokenizer.from_dir(tmp_path), SamplingParams(), reasoning=True, prompt_text="")
    for token in [259, *b"why", 260, *b"yes"]:
        stream.feed(token)
    stream.finish()
    assert (stream.reasoning_text, stream.text) == ("why", "yes")


def test_render_prompt(folder: Path, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_dir(folder)
    ids = render_prompt(tokenizer, template, [{"role": "user", "content": "hi"}])
    assert ids == [IM_START, *b"user\nhi", IM_END, 10, IM_START, *b"assistant\n"]
    assert render_prompt(tokenizer, template, [{"role": "user", "content": "hi"}], add_generation_prompt=False) == ids[:10]
