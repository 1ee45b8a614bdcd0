"""Sizes for people; the hub does not know output.py."""

from __future__ import annotations


def size_in_words(num_bytes: int) -> str:
    """A number of bytes in the unit that suits it: "512 bytes", "16.2 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
