"""Which kernels of the gated delta rule a call needs, with its tensors as the kernels take them. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rimuru_kernels.gated_delta_rule import chunk_kernel, kernel
from rimuru_kernels.state_pages import Places, places_in_pool, places_of


def by_views(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Sequence[Tensor], cu_seqlens: Sequence[int]
) -> Tensor | None:
    """`gated_delta_rule` by the kernels, or None where they do not take these tensors."""
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    several = max(lengths) > 1
    places = None if several and q.shape[2] > chunk_kernel.MAX_KEY_DIM else places_of(states)
    if places is None:
        return None
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    bounds = None if min(lengths) == max(lengths) == 1 else torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    _launch(q, k, v, log_decay, beta, places, bounds, out, steps=1 in lengths, chunks=several)
    return out


def by_entries(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, pool: Tensor, entries: Tensor, cu_seqlens: Tensor | None, out: Tensor,
    steps: bool = True,
) -> None:  # fmt: skip
    """`gated_delta_rule_entries` by the kernels; arguments are taken as checked."""
    _launch(
        q,
        k,
        v,
        log_decay,
        beta,
        places_in_pool(pool, entries, torch.float32),
        cu_seqlens,
        out,
        steps or cu_seqlens is None,
        cu_seqlens is not None,
    )


def _launch(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, places: Places, cu_seqlens: Tensor | None, out: Tensor,
    steps: bool, chunks: bool,
) -> None:  # fmt: skip
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    if steps:
        kernel.step(q, k, v, log_decay, beta, places, cu_seqlens, out)
    if chunks:
        assert cu_seqlens is not None, "sequences of several rows have bounds"
        chunk_kernel.chunks(q, k, v, log_decay, beta, places, cu_seqlens, out)
