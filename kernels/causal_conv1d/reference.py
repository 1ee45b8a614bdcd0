"""Plain torch causal convolution: K shifted multiply-adds over the rows, channels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def causal_conv1d_reference(x: Tensor, weight: Tensor, bias: Tensor | None, states: Sequence[Tensor], cu_seqlens: Sequence[int]) -> Tensor:
    """See `rimuru_kernels.causal_conv1d.causal_conv1d`; arguments are taken as checked."""
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = len(weight) - 1
    for state, (start, stop) in zip(states, pairwise(cu_seqlens), strict=True):
        if start == stop:
            continue
        rows = torch.cat((state.to(wide), x[start:stop].to(wide)))
        total = rows[kept:] * taps[kept]
        for i in range(kept):
            total.addcmul_(rows[i : i + stop - start], taps[i])
        if bias is not None:
            total += bias.to(wide)
        out[start:stop] = torch.nn.functional.silu(total, inplace=True)
        state.copy_(rows[-kept:])
    return out
