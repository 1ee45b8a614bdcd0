"""Which kernels of Mamba-2 a call needs, with its tensors as the kernels take them. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rimuru_kernels.mamba2 import chunk_kernel, kernel
from rimuru_kernels.state_pages import Places, places_in_pool, places_of


def by_views(
    x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Sequence[Tensor], cu_seqlens: Sequence[int]
) -> Tensor | None:
    """`state_space` by the kernels, or None where they do not take these tensors."""
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    several = max(lengths) > 1
    places = None if several and b.shape[2] > chunk_kernel.MAX_STATE else places_of(states)
    if places is None:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bounds = None if min(lengths) == max(lengths) == 1 else torch.tensor(cu_seqlens, dtype=torch.int32, device=x.device)
    _launch(x, dt, a_log, b, c, d, places, bounds, out, steps=1 in lengths, chunks=several)
    return out


def by_entries(
    x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, entries: Tensor, cu_seqlens: Tensor | None,
    out: Tensor, steps: bool = True,
) -> None:  # fmt: skip
    """`state_space_entries` by the kernels; arguments are taken as checked."""
    _launch(
        x,
        dt,
        a_log,
        b,
        c,
        d,
        places_in_pool(pool, entries, torch.float32),
        cu_seqlens,
        out,
        steps or cu_seqlens is None,
        cu_seqlens is not None,
    )


def _launch(
    x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, places: Places, cu_seqlens: Tensor | None, out: Tensor,
    steps: bool, chunks: bool,
) -> None:  # fmt: skip
    x, b, c = (t if t.stride(2) == 1 else t.contiguous() for t in (x, b, c))
    dt, a_log, d = dt.contiguous(), a_log.contiguous(), d.contiguous()
    if steps:
        kernel.step(x, dt, a_log, b, c, d, places, cu_seqlens, out)
    if chunks:
        assert cu_seqlens is not None, "sequences of several rows have bounds"
        chunk_kernel.chunks(x, dt, a_log, b, c, d, places, cu_seqlens, out)
