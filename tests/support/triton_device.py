"""Where Triton tests run: on the GPU if there is one, else in Triton's interpreter on the CPU. Import this before triton or any kernel."""

from __future__ import annotations

import os
import sys

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Read when triton and the kernel modules are imported: too late once another module brought triton in.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set, so its kernels cannot be interpreted in this process")
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs triton, which torch brings on Linux")

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

# The interpreter computes bfloat16 products wrongly (Triton 3.9), so bfloat16 is tested on the GPU alone.
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if ON_GPU else (torch.float32, torch.float16)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""Largest accepted ‖out − expected‖ / ‖expected‖ by dtype."""


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖ in float64; NaN anywhere gives NaN, which no comparison accepts."""
    out, expected = out.double().cpu(), expected.double().cpu()
    return float((out - expected).norm() / expected.norm())


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor full of NaN, for outputs that must be written in full."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
