"""Text to token ids and back, from the files of a checkpoint, without transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rimuru_cli.engine.json_files import read_json_object
from rimuru_models.errors import CheckpointError, NotFoundError, UsageError
from rimuru_models.gguf import gguf_of, open_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

MAX_TOKENIZER_BYTES = 128 * 2**20

#: How pieces become text; decides what the stream decoder has to hold back.
#: byte_level: pieces are bytes; byte_fallback: some pieces are single bytes ("<0x0A>"); plain: pieces are whole characters.
DecoderKind = Literal["byte_level", "byte_fallback", "plain"]

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one checkpoint.

    Attributes:
        eos_ids: ids that end an answer: those of generation_config.json (else config.json) and the tokenizer's own.
        special_tokens: "bos_token", "eos_token", ... -> text; what a chat template may refer to.
        special_ids: ids that never appear in decoded text.
        vocab_size: highest id + 1, added tokens included (a model may have more rows than that, never fewer).
        decoder_kind: see DecoderKind.
    """

    def __init__(self, fast: FastTokenizer, *, special_tokens: dict[str, str], eos_ids: Iterable[int], decoder_kind: DecoderKind) -> None:
        self._fast = fast
        self.special_tokens = special_tokens
        self.decoder_kind: DecoderKind = decoder_kind
        self.special_ids = frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = max(fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < self.vocab_size)

    @classmethod
    def from_dir(cls, model_dir: Path) -> Tokenizer:
        """Load tokenizer.json and what the JSON files around it say about special tokens; or what a GGUF file says.

        Raises:
            NotFoundError: the folder does not exist.
            CheckpointError: no tokenizer.json, a broken one, or broken files beside it.
        """
        gguf = gguf_of(model_dir)
        if gguf is not None:
            return cls._from_gguf(gguf)
        if not model_dir.is_dir():
            raise NotFoundError(f"There is no model folder {model_dir}.")
        path = model_dir / "tokenizer.json"
        description = read_json_object(path, max_bytes=MAX_TOKENIZER_BYTES)
        if description is None:
            raise _no_tokenizer_json(model_dir)
        fast = _load_fast(path)
        config = read_json_object(model_dir / "tokenizer_config.json") or {}
        special = read_special_tokens(model_dir, config)
        eos = config_eos_ids(model_dir)
        own_eos = fast.token_to_id(special["eos_token"]) if "eos_token" in special else None
        if own_eos is not None:
            eos.add(own_eos)
        return cls(fast, special_tokens=special, eos_ids=eos, decoder_kind=_decoder_kind(description.get("decoder")))

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from rimuru_cli.engine.gguf_tokenizer import build_tokenizer

        made = build_tokenizer(open_gguf(path).main)
        kind: DecoderKind = "byte_fallback" if made.fallback else "byte_level"
        return cls(made.fast, special_tokens=made.special_tokens, eos_ids=made.eos_ids, decoder_kind=kind)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` runs the post-processor of tokenizer.json (a leading <s>, say): True for raw prompts, False for rendered
        templates, which spell these tokens out themselves. Special tokens written out in the text become special tokens, whoever wrote
        them; transformers does the same, and equal ids are the contract here.
        """
        try:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:  # lone surrogates; the library says TypeError for some
            raise UsageError("The text is not valid Unicode (it contains half of a surrogate pair).") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids without a piece vanish."""
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token_id: int) -> str | None:
        """The vocabulary entry as stored ("Ġhello", "<0x0A>"), None when there is none."""
        return self._fast.id_to_token(token_id)

    def piece_to_id(self, piece: str) -> int | None:
        """Id of a vocabulary entry, None when there is none."""
        return self._fast.token_to_id(piece)


def read_special_tokens(model_dir: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens: tokenizer_config.json first, then special_tokens_map.json for what it leaves out."""
    found: dict[str, str] = {}
    for source in (tokenizer_config, read_json_object(model_dir / "special_tokens_map.json") or {}):
        for name in SPECIAL_TOKEN_NAMES:
            value = source.get(name)
            if isinstance(value, dict):  # an AddedToken written out
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _load_fast(path: Path) -> FastTokenizer:
    from tokenizers import Tokenizer as FastTokenizer  # 60 ms, and `--help` must not pay for it

    try:
        fast = FastTokenizer.from_file(str(path))
    except BaseException as error:  # a panic in the library is a BaseException
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}.", hint="Download the model again.") from error
    # The file may carry the settings of the training run; a prompt must never be cut or padded silently.
    fast.no_truncation()
    fast.no_padding()
    return fast


def _no_tokenizer_json(model_dir: Path) -> CheckpointError:
    others = [n for n in ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model") if (model_dir / n).is_file()]
    if others:
        return CheckpointError(
            f"{model_dir} has {others[0]} but no tokenizer.json, and only tokenizer.json can be read.",
            hint="Look for a newer revision of the model, or save it once with transformers' AutoTokenizer, which writes tokenizer.json.",
        )
    return CheckpointError(f"{model_dir} has no tokenizer.json.", hint="Download the model again, with its tokenizer files.")


def config_eos_ids(model_dir: Path) -> set[int]:
    """End-of-answer ids of generation_config.json, or of config.json where the first names none or is broken (a notice says so elsewhere).

    A multimodal config.json names them in its text model's part. Entries of other types are skipped. A GGUF file names its own.
    """
    gguf = gguf_of(model_dir)
    if gguf is not None:
        from rimuru_cli.engine.gguf_tokenizer import eos_ids

        return set(eos_ids(open_gguf(gguf).main))
    for name in ("generation_config.json", "config.json"):
        try:
            values = read_json_object(model_dir / name) or {}
        except CheckpointError:
            if name == "config.json":
                raise
            continue
        text, value = values.get("text_config"), values.get("eos_token_id")
        if value is None and isinstance(text, dict):
            value = text.get("eos_token_id")
        ids = {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int) and not isinstance(v, bool)}
        if ids:
            return ids
    return set()


def _decoder_kind(decoder: object) -> DecoderKind:
    kinds: set[str] = set()
    if isinstance(decoder, dict):
        steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
        kinds = {str(s.get("type")) for s in steps if isinstance(s, dict)} if isinstance(steps, list) else set()
    if "ByteFallback" in kinds:
        return "byte_fallback"
    return "byte_level" if "ByteLevel" in kinds else "plain"
