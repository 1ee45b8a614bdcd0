"""Which implementation of the ops runs here, decided once and with the reason that the banner shows."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal, NamedTuple

OLDEST_CAPABILITY = (8, 0)
"""The kernels use bfloat16 matrix units, which GPUs have from this compute capability on."""


class Backend(NamedTuple):
    """name: "triton" (kernels on a CUDA device) or "torch" (plain torch on the CPU); reason: why, a phrase to show to a person."""

    name: Literal["triton", "torch"]
    reason: str


@cache
def select_backend() -> Backend:
    """The backend of this process; the same answer each time."""
    import torch  # here, so that OLDEST_CAPABILITY can be read without it

    if not torch.cuda.is_available():
        return Backend("torch", "no CUDA device found")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    version = ".".join(map(str, capability))
    if capability < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        return Backend("torch", f"{name} has compute capability {version}, and the kernels need {needed}")
    if importlib.util.find_spec("triton") is None:
        return Backend("torch", f"{name} is here, but the package triton is not installed")
    return Backend("triton", f"{name}, compute capability {version}")
