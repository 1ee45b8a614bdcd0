"""Opening a model, whatever the files it lies in."""

from __future__ import annotations

from pathlib import Path

from rimuru_models.gguf import gguf_of
from rimuru_models.gguf.reader import GGUFReader
from rimuru_models.quantization.precision import notices
from rimuru_models.weights import CheckpointReader, WeightReader

Reader = CheckpointReader | GGUFReader


def open_reader(model: Path) -> Reader:
    """Open a folder with config.json and *.safetensors, a GGUF file, or a folder with one GGUF model.

    Raises:
        NotFoundError, UsageError, CheckpointError: see `CheckpointReader` and `GGUFReader`; nothing stays open then.
    """
    return CheckpointReader(model) if gguf_of(model) is None else GGUFReader(model)


def notices_of(reader: WeightReader) -> tuple[str, ...]:
    """What a person should know of how a model's files are used: sentences, most often none."""
    return (*(f"Of this checkpoint, {part} is not used." for part in reader.unused_parts), *notices(reader.formats))
