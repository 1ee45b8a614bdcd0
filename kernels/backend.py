"""Which implementation of the ops runs here, decided once and with the reason that the banner shows."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Backend(NamedTuple):
    """name: "torch" (plain torch on the CPU); reason: why this one, a phrase to show to a person."""

    name: str
    reason: str


@cache
def select_backend() -> Backend:
    """The backend of this process; the same answer each time."""
    if torch.cuda.is_available():
        return Backend("torch", "CUDA device present, but this version computes on the CPU")
    return Backend("torch", "no CUDA device found")
