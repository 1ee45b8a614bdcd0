"""The Mamba-2 step with its tensors as the kernel takes them. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.mamba2 import kernel
from rimuru_kernels.state_pages import Places, places_in_pool, places_of


def by_views(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Sequence[Tensor]) -> Tensor | None:
    """`state_space` of one row a sequence by the kernel, or None where it does not take these states."""
    places = places_of(states)
    if places is None:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, dt, a_log, b, c, d, places, out)
    return out


def by_entries(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, entries: Tensor, out: Tensor) -> None:
    """`state_space_step` by the kernel; arguments are taken as checked."""
    _launch(x, dt, a_log, b, c, d, places_in_pool(pool, entries, torch.float32), out)


def _launch(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, places: Places, out: Tensor) -> None:
    x, b, c = (t if t.stride(2) == 1 else t.contiguous() for t in (x, b, c))
    kernel.step(x, dt.contiguous(), a_log.contiguous(), b, c, d.contiguous(), places, out)
