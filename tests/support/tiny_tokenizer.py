"""A byte-level tokenizer of 259 tokens with a ChatML template, for tests that need real files but no real vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

IM_START = 256
IM_END = 257
END_OF_TEXT = 258
VOCAB_SIZE = 259
SPECIALS = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|endoftext|>": END_OF_TEXT}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE uses for each of the 256 byte values."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in plain}
    for i, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + i)
    return [table[b] for b in range(256)]


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json into `folder`.

    Token id = byte value for 0..255, then <|im_start|> 256, <|im_end|> 257 (end of answer), <|endoftext|> 258.
    The folder is made if missing; other files in it stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    added = [
        {"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for s, i in SPECIALS.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {c: b for b, c in enumerate(byte_alphabet())},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    special_map = {k: v for k, v in config.items() if k.endswith("_token")}
    generation = {"bos_token_id": IM_START, "eos_token_id": IM_END, "pad_token_id": IM_END}
    for name, content in {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "special_tokens_map.json": special_map,
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
