"""Which kernels of the causal convolution a call needs, with its tensors as the kernels take them. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rimuru_kernels.causal_conv1d import kernel
from rimuru_kernels.state_pages import Places, places_in_pool, places_of


def by_views(x: Tensor, weight: Tensor, bias: Tensor | None, states: Sequence[Tensor], cu_seqlens: Sequence[int]) -> Tensor | None:
    """`causal_conv1d` by the kernels, or None where they do not take these tensors."""
    if any(state.stride(1) != 1 for state in states):
        return None
    places = places_of([row for state in states for row in state.unbind()])
    if places is None:
        return None
    lengths = {stop - start for start, stop in pairwise(cu_seqlens)}
    bounds = None if lengths == {1} else torch.tensor(cu_seqlens, dtype=torch.int32, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, places, bounds, out)
    return out


def by_entries(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    out: Tensor,
) -> None:
    """`causal_conv1d_entries` by the kernels; arguments are taken as checked."""
    _launch(x, weight, bias, places_in_pool(pool, entries, dtype), cu_seqlens, out)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, cu_seqlens: Tensor | None, out: Tensor) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if cu_seqlens is None:
        kernel.step(x, weight, bias, places, out)
    else:
        kernel.rows(x, weight, bias, places, cu_seqlens, out)
