"""Reads the small JSON files of a checkpoint, which are untrusted: size limit, type check, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rimuru_models.errors import CheckpointError

MAX_JSON_BYTES = 16 * 2**20


def read_text_file(path: Path, *, max_bytes: int) -> str | None:
    """Text of a UTF-8 file, None when there is no such file. CheckpointError when it is too large or unreadable."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than {max_bytes} bytes; a file of this kind never is.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start}).", hint="Download the model again.") from error


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """The JSON object in `path`, None when there is no such file. CheckpointError when it is anything else."""
    text = read_text_file(path, max_bytes=max_bytes)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{path} is not valid JSON: {reason}.", hint="Download the model again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
