from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizer import END_OF_TEXT, IM_END, IM_START, VOCAB_SIZE, write_tiny_tokenizer

from rimuru_cli.engine.tokenizer import Tokenizer, config_eos_ids
from rimuru_models.errors import CheckpointError, NotFoundError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_encodes_bytes_and_specials(folder: Path) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    ids = tokenizer.encode("<|im_start|>né😀", add_special_tokens=False)
    assert ids == [IM_START, *"né😀".encode()]
    assert tokenizer.decode(ids) == "né😀"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>né😀"
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.special_ids == {IM_START, IM_END, END_OF_TEXT}
    assert tokenizer.id_to_piece(ord("A")) == "A"
    assert tokenizer.id_to_piece(VOCAB_SIZE) is None
    assert tokenizer.piece_to_id("<|im_end|>") == IM_END
    assert tokenizer.decoder_kind == "byte_level"


def test_equals_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_dir(folder)
    text = "<|im_start|>user\nTell me <|im_end|> a naïve story\t…  ok<|endoftext|>"
    for special in (False, True):
        assert ours.encode(text, add_special_tokens=special) == theirs(text, add_special_tokens=special)["input_ids"]
    assert ours.special_tokens == theirs.special_tokens_map


def test_raw_prompts_follow_the_post_processor(folder: Path) -> None:
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}},
    }
    template["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    edit(folder / "tokenizer.json", post_processor=template)
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.encode("a", add_special_tokens=True) == [IM_START, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_truncation_of_the_file_is_not_used(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    )
    assert len(Tokenizer.from_dir(folder).encode("abcdefg", add_special_tokens=True)) == 7


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (IM_END, None, {IM_END}),
        ([IM_END, END_OF_TEXT], 5, {IM_END, END_OF_TEXT}),
        (None, END_OF_TEXT, {IM_END, END_OF_TEXT}),
        (["x", True, 9999, -1], None, {IM_END}),
    ],
)
def test_eos_is_a_union(folder: Path, generation: object, config: object, expected: set[int]) -> None:
    edit(folder / "generation_config.json", eos_token_id=generation)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config}), encoding="utf-8")
    assert Tokenizer.from_dir(folder).eos_ids == expected
    assert config_eos_ids(folder) >= expected - {IM_END}


def test_a_multimodal_config_names_the_end_in_its_text_model(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    for top, nested, expected in [(None, [7, 9], {7, 9}), (5, 7, {5}), (None, None, set())]:
        config = {"eos_token_id": top, "text_config": {"eos_token_id": nested}}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert config_eos_ids(folder) == expected
    (folder / "config.json").write_text(json.dumps({"text_config": 3}), encoding="utf-8")
    assert config_eos_ids(folder) == set()


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"{", b"[]", b""])
def test_a_broken_generation_config_leaves_the_end_to_the_others(broken: bytes, folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(broken)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END_OF_TEXT}), encoding="utf-8")
    assert Tokenizer.from_dir(folder).eos_ids == {IM_END, END_OF_TEXT}


def test_special_tokens_from_either_file(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True}, bos_token=None)
    edit(folder / "special_tokens_map.json", eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"


def test_missing_and_broken_files(folder: Path) -> None:
    with pytest.raises(NotFoundError):
        Tokenizer.from_dir(folder / "nothing")
    path = folder / "tokenizer.json"
    good = path.read_bytes()
    for bad in (b"", b"{", b"[]", b"{}", b"\xff\xfe", good[: len(good) // 2], b'{"model": 1}', b"[" * 100_000):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.from_dir(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(folder)
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        Tokenizer.from_dir(folder)


def test_broken_neighbours_are_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(folder)


def test_huge_file_is_refused_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rimuru_cli.engine.tokenizer.MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        Tokenizer.from_dir(folder)


def test_half_a_surrogate_pair_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="Unicode"):
        Tokenizer.from_dir(folder).encode("a\ud800b", add_special_tokens=False)
