from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import IM_END, write_tiny_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from rimuru_cli.engine.detokenizer import StreamDecoder
from rimuru_cli.engine.tokenizer import Tokenizer

TEXT = ["The naïve cat — “hello” 😀 你好 world, the cat sat. " * 3, "hello there the hello cat  two  spaces"]


@cache
def build(kind: str) -> Tokenizer:
    """One small tokenizer of each way in which pieces become text."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "tiny":
            write_tiny_tokenizer(folder)
            return Tokenizer.from_dir(folder)
        if kind == "byte_level":
            fast = Fast(models.BPE())
            fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            fast.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
            fast.train_from_iterator(TEXT, trainer)
        else:
            pieces = ["▁", "▁the", "▁cat", "the", "cat", "s", "▁▁", "é", "😀", ".", "\n", "\ufffd", "▁hello"]
            byte_pieces = [f"<0x{b:02X}>" for b in range(256)] if kind == "llama" else []
            vocab = {p: i for i, p in enumerate(["<unk>", *byte_pieces, *pieces])}
            fast = Fast(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=bool(byte_pieces)))
            if kind == "llama":
                steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
                fast.decoder = decoders.Sequence(steps)
            else:
                fast.decoder = decoders.Metaspace()
        fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
        fast.add_tokens([AddedToken("<tool>", special=False), AddedToken(" spaced é", special=False)])
        fast.save(str(folder / "tokenizer.json"))
        return Tokenizer.from_dir(folder)


KINDS = ["tiny", "byte_level", "llama", "metaspace"]


def stream(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    decoder = StreamDecoder(tokenizer, prompt)
    return [*(decoder.feed(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sum_equals_decoding_everything(kind: str, data: st.DataObject) -> None:
    tokenizer = build(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0x80, 0x82, 0xAC, 0xE2, 0xC3, 0xF0, 0x9F, 0x98, 0xFF, 0x41, IM_END]), max_size=120))
@example([0x80] * 100)
@example([0xE2, 0x82] * 40)
@example([0xF0, 0x9F, 0x98] * 20 + [0x80])
def test_long_invalid_runs(ids: list[int]) -> None:
    tokenizer = build("tiny")
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["llama"])
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*"né😀€ ".encode(), 0xFF, 0x80]), max_size=30))
def test_byte_fallback_runs(kind: str, values: list[int]) -> None:
    tokenizer = build(kind)
    word = tokenizer.piece_to_id("▁cat")
    assert word is not None
    ids = [1 + v if v != 0x20 else word for v in values]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_valid_text_never_shows_half_characters(text: str) -> None:
    text = text.replace("\ufffd", "").encode("utf-8", "ignore").decode()
    parts = stream(build("tiny"), list(text.encode()))
    assert "".join(parts) == text
    assert not any("\ufffd" in p for p in parts)


def test_characters_arrive_as_soon_as_they_are_complete() -> None:
    assert stream(build("tiny"), list("aé😀".encode())) == ["a", "", "é", "", "", "", "😀", ""]


def test_flush_shows_what_was_incomplete_and_only_once() -> None:
    decoder = StreamDecoder(build("tiny"))
    assert [decoder.feed(i) for i in (0x41, 0xE2, 0x82)] == ["A", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_special_tokens_between_words_keep_the_space() -> None:
    tokenizer = build("metaspace")
    the, cat, end = (tokenizer.piece_to_id(p) for p in ("▁the", "▁cat", "</s>"))
    assert the is not None and cat is not None and end is not None
    assert "".join(stream(tokenizer, [the, end, cat, end, cat])) == "the cat cat"


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_prompt_gives_the_first_word_its_space(kind: str) -> None:
    tokenizer = build(kind)
    the, cat = tokenizer.piece_to_id("▁the"), tokenizer.piece_to_id("▁cat")
    assert the is not None and cat is not None
    assert "".join(stream(tokenizer, [cat, the], (the,))) == " cat the"
    assert "".join(stream(tokenizer, [cat, the])) == "cat the"


@pytest.mark.parametrize("kind", ["tiny", "llama"])
def test_prompt_ending_in_half_a_character_does_not_leak(kind: str) -> None:
    tokenizer = build(kind)
    shift = 0 if kind == "tiny" else 1
    prompt = tuple(shift + b for b in b"secret\xf0\x9f")
    parts = stream(tokenizer, [shift + ord("A"), shift + ord("B")], prompt)
    assert "".join(parts) == "AB"


def test_work_for_a_long_answer_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build("tiny")
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    for ids in ([0x41] * 400, [0x80] * 400, list("é😀".encode()) * 60):
        decoded.clear()
        stream(tokenizer, ids)
        assert sum(decoded) < 50 * len(ids)
        assert max(decoded) < 50
    decoded.clear()
    assert "".join(stream(tokenizer, [IM_END] * 400)) == ""
    assert decoded == []
