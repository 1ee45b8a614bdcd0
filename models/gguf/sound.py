"""Whether blocks of GGUF can mean anything: their scales must be finite numbers. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru_models.gguf.kinds import BY_NAME

_EXPONENT = np.uint16(0x7C00)
"""All of these bits set: an infinite float16, or no number."""
_HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where in a block of each type the float16 scales and minima are (see `blocks.py`)."""


def wild_scales(kind: str, rows: NDArray[Any]) -> bool:
    """Whether any block of uint8 [N, bytes of a row], contiguous rows as they lie in a file, has a scale that is not a finite number."""
    if kind == "MXFP4":
        return bool((rows.reshape(-1, BY_NAME[kind].num_bytes)[:, 0] == 0xFF).any())
    if kind not in _HALVES:
        return False
    blocks = rows.reshape(-1, BY_NAME[kind].num_bytes)
    return any(bool(((blocks[:, at : at + 2].view("<u2") & _EXPONENT) == _EXPONENT).any()) for at in _HALVES[kind])
