"""Quantised copies of models: made where they are wanted, found again where they were made before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from rimuru_cli.engine.tokenizer import Tokenizer
from rimuru_models.config import ModelConfig
from rimuru_models.errors import CheckpointError, RimuruError
from rimuru_models.index import CheckpointIndex, model_identity, open_index
from rimuru_models.layout import dense_bytes
from rimuru_models.quantizer.layout import Recipe, check_source
from rimuru_models.quantizer.make import finished_copy, quantize_checkpoint
from rimuru_models.readers import open_reader

CALIBRATION_TEXT = Path(__file__).with_name("calibration_text.txt")
_MOST_TOKENS = 2048
_LONGEST_NAME = 120  # bytes; file systems allow 255

Progress = Callable[[str, int, int], None]


def source_of(index: CheckpointIndex) -> str:
    """What tells one original from another without reading its weights: names, sizes and times of its files, and its headers."""
    files = []
    for path in sorted(index.headers):
        status = path.resolve().stat()
        files.append([path.name, status.st_size, status.st_mtime_ns])
    text = json.dumps([model_identity(index.model_dir), files])
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def copy_folder(store: Path, name: str, source: str, recipe: Recipe) -> Path:
    """Where the copy of a model of this name lies below `store`."""
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name.rsplit("/", 1)[-1]).strip("-.") or "model"
    plain = plain.encode("utf-8")[:_LONGEST_NAME].decode("utf-8", "ignore")
    return store / f"{plain}-{recipe.name}-g{recipe.group}-{source[:8]}"


def quantized_copy(
    model: Path, name: str, recipe: Recipe, *, store: Path, out: Path | None = None, progress: Progress | None = None
) -> tuple[Path, bool]:
    """The folder of the quantised copy, made now if need be, and whether it was there already.

    Args:
        model: the original.
        name: to call it by below `store`.
        store: where copies are kept that nobody chose a place for.
        out: a place that somebody did choose.

    Raises:
        UsageError: the original cannot be quantised, or `out` holds something else.
        NoSpaceError: the disk is too full.
        NotFoundError, CheckpointError: of the original.
        RimuruError: another process is making this very copy.
    """
    with open_reader(model) as opened:
        reader = check_source(opened, model)
        source = source_of(open_index(model))
        folder = out or copy_folder(store, name, source, recipe)
        if finished_copy(reader, folder, recipe, source):
            return folder, True
        with _alone(folder, None if out is None else out.parent, store):
            if finished_copy(reader, folder, recipe, source):  # by another process, just now
                return folder, True
            tokens = _calibration(model, reader.config) if recipe.feedback else []
            quantize_checkpoint(reader, folder, recipe, tokens, source, progress)
    return folder, False


def _calibration(model: Path, config: ModelConfig) -> list[int]:
    """Tokens of the calibration text, if there is memory to read them with."""
    needed = 2 * dense_bytes(config, 4)
    if needed > psutil.virtual_memory().available:
        raise RimuruError(
            f"Quantising to int4 computes with the model's dense part: about {needed / 1e9:,.1f} GB of free memory are needed.",
            hint="Close other programs, or take int8, which needs no memory to speak of.",
        )
    text = CALIBRATION_TEXT.read_text(encoding="utf-8")
    tokens = Tokenizer.from_dir(model).encode(text, add_special_tokens=True)[: min(_MOST_TOKENS, config.max_positions)]
    if not tokens or max(tokens) >= config.vocab_size:
        raise CheckpointError(
            f"{model}: its tokenizer does not fit the model, which knows {config.vocab_size} tokens.",
            hint="Get the tokenizer of this model, or quantise to int8, which reads no text.",
        )
    return tokens


@contextmanager
def _alone(folder: Path, beside: Path | None, store: Path) -> Iterator[None]:
    """Keep other processes from making the same copy: the lock lies in `store`, or where somebody chose the folder, beside it."""
    place = beside or store
    name = hashlib.sha256(str(folder.absolute()).encode("utf-8")).hexdigest()[:16]
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / f".{name}.lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise RimuruError(f"Another rimuru is making {folder} right now.", hint="Wait for it, then try again.") from None
    except OSError as error:
        hint = "Name another folder with --out." if beside else "Name a folder with rimuru quantize --out, or set RIMURU_HOME to one."
        raise RimuruError(f"{place} cannot be written to: {error.strerror or error}.", hint=hint) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no file that is open
            Path(lock.lock_file).unlink()
        lock.release()
