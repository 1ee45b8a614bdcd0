"""Quantised copies of models: made where they are wanted, found again where they were made before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from rimuru_cli.engine.tokenizer import Tokenizer
from rimuru_models.errors import RimuruError
from rimuru_models.index import CheckpointIndex, model_identity, open_index
from rimuru_models.layout import dense_bytes
from rimuru_models.quantizer.layout import Recipe, check_source
from rimuru_models.quantizer.make import finished_copy, quantize_checkpoint
from rimuru_models.readers import open_reader

CALIBRATION_TEXT = Path(__file__).with_name("calibration_text.txt")
_MOST_TOKENS = 2048

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
        store.mkdir(parents=True, exist_ok=True)
        place = hashlib.sha256(str(folder.absolute()).encode("utf-8")).hexdigest()[:16]
        try:
            with FileLock(store / f".{place}.lock", timeout=0):
                needed = 2 * dense_bytes(reader.config, 4)
                if recipe.feedback and needed > psutil.virtual_memory().available:
                    raise RimuruError(
                        f"Quantising to {recipe.name} computes with the model's dense part: about {needed / 1e9:,.1f} GB of free memory "
                        "are needed.",
                        hint="Close other programs, or take --to int8, which needs no memory to speak of.",
                    )
                tokens: list[int] = []
                if recipe.feedback:
                    text = CALIBRATION_TEXT.read_text(encoding="utf-8")
                    most = min(_MOST_TOKENS, reader.config.max_positions)
                    tokens = Tokenizer.from_dir(model).encode(text, add_special_tokens=True)[:most]
                quantize_checkpoint(reader, folder, recipe, tokens, source, progress)
        except Timeout:
            raise RimuruError(f"Another rimuru is making {folder} right now.", hint="Wait for it, then try again.") from None
    return folder, False
