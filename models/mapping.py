"""Files with weights as memory. The mapping is private (copy on write), because torch wants writable memory; nothing ever writes to it."""

from __future__ import annotations

import mmap
from pathlib import Path

from rimuru_models.errors import CheckpointError


def map_file(path: Path, promised: int) -> mmap.mmap:
    """Map a whole file; its pages stay page cache that the system can drop and read again.

    Args:
        promised: bytes that its header was found to need.

    Raises:
        CheckpointError: it cannot be mapped, or has become shorter than that, so that touching it would fault.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}.") from None
    if len(mapping) < promised:
        raise CheckpointError(f"{path} shrank from {promised} to {len(mapping)} bytes while it was in use.")
    return mapping
