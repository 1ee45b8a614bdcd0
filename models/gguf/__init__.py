"""GGUF files: reading them as if a stranger had written them, and what llama.cpp's names and arrangements mean here.

Headers, names and configurations need no torch; `reader.py` and `blocks.py` do.
"""

from __future__ import annotations

from rimuru_models.gguf.files import GGUFFiles, find_gguf, gguf_of, is_gguf, open_gguf
from rimuru_models.gguf.header import GGUFHeader, GGUFTensor, read_gguf_header

__all__ = ["GGUFFiles", "GGUFHeader", "GGUFTensor", "find_gguf", "gguf_of", "is_gguf", "open_gguf", "read_gguf_header"]
