"""The tokenizer and chat template that a GGUF file carries in its metadata, as the `tokenizers` library and our templates have them.

`tokenizer.ggml.model` names the kind: "gpt2" is byte-level BPE, and `tokenizer.ggml.pre` says how text is cut before merges (`_SPLITS`; the
patterns are those of the original tokenizers, which llama.cpp's src/llama-vocab.cpp lists by these names); "llama" is SentencePiece's BPE,
whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from rimuru_models.errors import CheckpointError
from rimuru_models.gguf import GGUFHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")
_MOST_TOKENS = 1 << 22
_LONGEST_MERGED = 256  # characters; SentencePiece makes no token longer than 16 unless it is told to
_HINT = "Get another GGUF file of this model; old ones lack what is needed."
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
# Tokens that end an answer, whatever the file names: checkpoints list them in generation_config.json, which a GGUF file does not have.
_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_role|>",
    "<end_of_turn>",
    "<EOT>",
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_TAIL}"
_GPT4O = rf"{_CASED % (f'{_CONTRACTIONS}?', f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_TAIL}"


class _Split(NamedTuple):
    """How text is cut. pattern: of the pieces; None: as GPT-2 does, with single digits if `digits`. nfc: composed first.

    whole: a piece that is a token needs no merges."""

    pattern: str | None
    digits: bool = False
    nfc: bool = False
    whole: bool = False


_SPLITS: dict[str, _Split] = {
    "qwen2": _Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2, nfc=True),
    "qwen35": _Split(_QWEN35, nfc=True),
    "llama3": _Split(_LLAMA3, whole=True),
    "llama-v3": _Split(_LLAMA3, whole=True),
    "llama-bpe": _Split(_LLAMA3, whole=True),
    "smaug-bpe": _Split(_LLAMA3),
    "dbrx": _Split(_LLAMA3),
    "tekken": _Split(_TEKKEN, whole=True),
    "gpt-4o": _Split(_GPT4O),
    "gpt-2": _Split(None),
    "mpt": _Split(None, nfc=True),
    "olmo": _Split(None, nfc=True),
    "refact": _Split(None, digits=True),
    "smollm": _Split(None, digits=True),
    "starcoder": _Split(None, digits=True),
    "command-r": _Split(None, digits=True, nfc=True),
}
# What files from before there was `tokenizer.ggml.pre` mean.
_USUAL = {"qwen2moe": "qwen2", "qwen3moe": "qwen2", "qwen3next": "qwen2", "qwen35moe": "qwen35", "olmoe": "olmo"}


class GGUFTokenizer(NamedTuple):
    """What a file says about text.

    fast: the tokenizer. special_tokens: "bos_token", "eos_token", ... -> text. eos_ids: tokens that end an answer. fallback: whether
    unknown characters become bytes (SentencePiece), else all is bytes.
    """

    fast: FastTokenizer
    special_tokens: dict[str, str]
    eos_ids: frozenset[int]
    fallback: bool


class _Vocabulary(NamedTuple):
    tokens: list[str]
    kinds: list[int]


def build_tokenizer(header: GGUFHeader) -> GGUFTokenizer:
    """Make the tokenizer of a GGUF file.

    Raises:
        CheckpointError: it has none, one of another kind, or a broken one.
    """
    model = header.string("tokenizer.ggml.model")
    vocabulary = _vocabulary(header)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{header.where}: tokenizers of the kind {model[:40]!r} are not supported; 'gpt2' and 'llama' are.")
    fast = (_byte_level if model == "gpt2" else _sentencepiece)(header, vocabulary)
    special = special_tokens(header, vocabulary.tokens)
    _add_tokens(fast, vocabulary)
    # Where a file does not say, llama.cpp puts the first token in front of texts of these kinds.
    usual = model == "llama" or header.scalar("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe", "tekken")
    _surround(header, fast, special, bos_by_default=usual)
    return GGUFTokenizer(fast, special, eos_ids(header, vocabulary), model == "llama")


def _vocabulary(header: GGUFHeader) -> _Vocabulary:
    count = header.length("tokenizer.ggml.tokens")
    if not count or count > _MOST_TOKENS:
        raise CheckpointError(f"{header.where} has no tokenizer in it.", hint=_HINT)
    if "tokenizer.ggml.token_type" in header and header.length("tokenizer.ggml.token_type") != count:
        raise header.broken("its tokens and their types are not equally many")
    kinds = header.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in header else [1] * count
    return _Vocabulary(header.strings("tokenizer.ggml.tokens"), kinds)


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    """Token -> id, but for padding that only makes the matrix larger; of two equal ones the first."""
    found: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind != _UNUSED or not _PADDING.fullmatch(token):
            found.setdefault(token, number)
    return found


def _bpe(header: GGUFHeader, ids: dict[str, int], merges: list[tuple[str, str]], **options: object) -> FastTokenizer:
    from tokenizers import Tokenizer, models  # 60 ms, and `--help` must not pay for it

    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except BaseException as error:  # a bare Exception for a merge whose parts are no tokens; a panic is a BaseException
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise header.broken(f"its tokenizer cannot be used: {error}") from error


def _byte_level(header: GGUFHeader, vocabulary: _Vocabulary) -> FastTokenizer:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    name = header.string("tokenizer.ggml.pre", _USUAL.get(header.string("general.architecture", ""), ""))
    if name == "default" and header.string("general.architecture", "") in _USUAL:
        name = _USUAL[header.string("general.architecture")]
    split = _SPLITS.get(name)
    if split is None:
        what = f"cuts text in a way that is not known ({name[:40]!r})" if name else "does not say how text is cut"
        raise CheckpointError(f"{header.where}: its tokenizer {what}.", hint=f"Known: {', '.join(_SPLITS)}. {_HINT}")
    pairs: list[tuple[str, str]] = []
    for merge in header.strings("tokenizer.ggml.merges"):
        left, blank, right = merge.partition(" ")
        if not blank or not left or not right or " " in right:
            raise header.broken(f"its merge {merge[:40]!r} is not two tokens")
        pairs.append((left, right))
    fast = _bpe(header, _ids(vocabulary), pairs, ignore_merges=split.whole)
    if split.nfc:
        fast.normalizer = normalizers.NFC()
    if split.pattern is not None:
        first = pre_tokenizers.Split(Regex(split.pattern), "isolated")
        fast.pre_tokenizer = pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif split.digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        fast.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    else:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(header: GGUFHeader, vocabulary: _Vocabulary) -> FastTokenizer:
    from tokenizers import decoders, normalizers

    ids = _ids(vocabulary)
    unknown = next((token for token, kind in zip(*vocabulary, strict=True) if kind == _UNKNOWN), None)
    fast = _bpe(header, ids, _merges(header, vocabulary, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    blank = "\u2581"
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", blank)]
    ends: list[decoders.Decoder] = [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(blank))
        ends.append(decoders.Strip(" ", 1, 0))
    fast.normalizer = normalizers.Sequence(steps)
    fast.decoder = decoders.Sequence(ends)
    return fast


def _merges(header: GGUFHeader, vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others; the token with the highest score first, and of equal ones that of the lowest id."""
    if header.length("tokenizer.ggml.scores") != len(vocabulary.tokens):
        raise header.broken("its tokens and their scores are not equally many")
    scores = header.numbers("tokenizer.ggml.scores")
    ordered = [
        (number, token)
        for token, number in ids.items()
        if vocabulary.kinds[number] not in (_CONTROL, _UNKNOWN) and len(token) <= _LONGEST_MERGED
    ]
    ordered.sort(key=lambda item: (-scores[item[0]], item[0]))
    merges = []
    for _, token in ordered:
        found = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _add_tokens(fast: FastTokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are found whole in a text: control ones, which decoding leaves out, and those that users defined."""
    from tokenizers import AddedToken

    control, defined = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if token and kind in (_CONTROL, _UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif token and kind == _USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    fast.add_special_tokens(control)
    fast.add_tokens(defined)


def _surround(header: GGUFHeader, fast: FastTokenizer, special: dict[str, str], *, bos_by_default: bool) -> None:
    """What is put before and after a raw text."""
    from tokenizers import processors

    first, last = special.get("bos_token"), special.get("eos_token")
    begins = first is not None and header.flag("tokenizer.ggml.add_bos_token", bos_by_default)
    ends = last is not None and header.flag("tokenizer.ggml.add_eos_token", False)
    if not begins and not ends:
        return
    used = [token for token, wanted in ((first, begins), (last, ends)) if wanted and token is not None]
    numbers = [(token, fast.token_to_id(token)) for token in dict.fromkeys(used)]
    template = [f"{first}:0"] * begins + ["$A:0"] + [f"{last}:0"] * ends
    if all(number is not None and not re.search(r"[\s:$]", token) for token, number in numbers):
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=numbers)


def _named_id(header: GGUFHeader, name: str, count: int) -> int | None:
    """The id of a special token; None when the file names none, or one that is not there."""
    value = header.scalar(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count else None


def special_tokens(header: GGUFHeader, tokens: list[str]) -> dict[str, str]:
    """Named special tokens, which a chat template may refer to."""
    found = {name: _named_id(header, key, len(tokens)) for name, key in _SPECIAL.items()}
    return {name: tokens[number] for name, number in found.items() if number is not None}


def eos_ids(header: GGUFHeader, vocabulary: _Vocabulary | None = None) -> frozenset[int]:
    """Tokens that end an answer: those that the file names, and control tokens that mean it in every model; none without a tokenizer."""
    if "tokenizer.ggml.tokens" not in header:
        return frozenset()
    tokens, kinds = vocabulary or _vocabulary(header)
    named = {_named_id(header, name, len(tokens)) for name in ("eos", "eot", "eom")}
    known = {number for number, token in enumerate(tokens) if kinds[number] == _CONTROL and token in _ENDS}
    return frozenset(number for number in named | known if number is not None)


def chat_templates(header: GGUFHeader) -> str | dict[str, str] | None:
    """The chat template, or several by name; None when the file has none."""
    key = "tokenizer.chat_template"
    single = header.scalar(key)
    prefix = f"{key}."
    named = {
        name.removeprefix(prefix): value
        for name in header.names()
        if name.startswith(prefix) and isinstance(value := header.scalar(name), str)
    }
    if isinstance(single, str):
        return {"default": single} | named if named else single
    return named or None
