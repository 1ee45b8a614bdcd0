"""Quantised checkpoints: which formats are read, how each keeps the parts of a matrix, and what that is in a page.

`table.py` lists the formats; a new one is a file beside it and a row there. Nothing here imports torch before weights are read.
"""

from __future__ import annotations
