"""Short causal convolution over the tokens of each sequence, channel by channel, with silu: what feeds a recurrent layer.

Two forms: over a list of states, each a view, and over page entries in one pool of bytes, with nothing read on the host, so that a step
can be captured as a graph. On a GPU both run Triton kernels; their sums in float32 are taken in another order than the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.causal_conv1d.reference import causal_conv1d_reference
from rimuru_kernels.state_pages import check_bounds, check_entries, sequence_rows, view_pages
from rimuru_kernels.varlen import check_rows

__all__ = ["causal_conv1d", "causal_conv1d_entries"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, states: Sequence[Tensor], cu_seqlens: Sequence[int]) -> Tensor:
    """silu( bias[c] + Σ_i weight[i, c] · x[t - m + i, c] ), i = 0 .. m, m = K - 1; rows before the step come from the state.

    Decode (one row a sequence) and prefill (many) are the same call.

    Args:
        x: [T, C] floating point, rows of all sequences, one after the other; may be strided.
        weight: [K, C] in x's dtype, the newest row last.
        bias: [C] in x's dtype, or None.
        states: for each sequence the m rows [m, C] of x before its first row (zeros at the start of a text), of any floating dtype, maybe
            strided. Overwritten with the last m rows of x.
        cu_seqlens: 0, then the end of each sequence's rows in x; a sequence may have none.

    Returns:
        [T, C] new tensor in x's dtype; sums in float32 at least.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    check_rows("causal_conv1d", x, cu_seqlens, len(states))
    kernel, channels = _check("causal_conv1d", x, weight, bias)
    for state in states:
        if state.shape != (kernel - 1, channels) or state.device != x.device or not state.dtype.is_floating_point:
            raise ValueError(
                f"causal_conv1d: a state is {state.dtype} {list(state.shape)} on {state.device}, not [{kernel - 1}, {channels}]"
            )
    if x.is_cuda and x.numel() and x.dtype in _DTYPES and all(state.dtype in _DTYPES for state in states):
        from rimuru_kernels.causal_conv1d import launch

        out = launch.by_views(x, weight, bias, states, cu_seqlens)
        if out is not None:
            return out
    return causal_conv1d_reference(x, weight, bias, states, cu_seqlens)


def causal_conv1d_entries(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    state_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d` over states in the pages of a pool, one page a row. On a GPU nothing is read on the host.

    Args:
        x, weight, bias: as for `causal_conv1d`, half precision or float32.
        pool: uint8 [bytes].
        entries: int32 [S, K - 1], the pages of the rows of each sequence's state, [C] each, oldest first, offset / 256; no page twice.
            Where they are negative (all of a sequence or none) no state is touched, and the sequence's rows of the result are zeros.
        cu_seqlens: int32 [S + 1]: sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1] - 1, maybe none; rows from cu_seqlens[S] on
            are left unwritten. None: one row each.
        state_dtype: of the pages; None: x's.
        out: [T, C] contiguous, or None for a new tensor.

    Returns:
        [T, C] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    name = "causal_conv1d_entries"
    kernel, channels = _check(name, x, weight, bias)
    dtype = x.dtype if state_dtype is None else state_dtype
    if x.dtype not in _DTYPES or dtype not in _DTYPES:
        raise ValueError(f"{name}: x is {x.dtype}, the states {dtype}; need half precision or float32")
    seqs = check_entries(name, pool, entries, (kernel - 1,), x.device)
    check_bounds(name, cu_seqlens, seqs, len(x), x.device)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.shape != x.shape or out.dtype is not x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(f"{name}: out {out.dtype} {list(out.shape)} must be contiguous and like x {x.dtype} {list(x.shape)}")
    if not x.numel() or not seqs:
        return out
    if x.is_cuda:
        from rimuru_kernels.causal_conv1d import launch

        launch.by_entries(x, weight, bias, pool, entries, cu_seqlens, dtype, out)
        return out
    for row, (start, stop) in zip(entries.tolist(), sequence_rows(cu_seqlens, seqs), strict=True):
        if row[0] < 0:
            out[start:stop] = 0.0
        elif start < stop:
            pages = [view_pages(pool, entry, (channels,), dtype) for entry in row]
            state = torch.stack(pages)
            out[start:stop] = causal_conv1d_reference(x[start:stop], weight, bias, [state], (0, stop - start))
            for page, values in zip(pages, state, strict=True):
                page.copy_(values)
    return out


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    kernel, channels = weight.shape if weight.ndim == 2 else (0, 0)
    if kernel < 2 or x.ndim != 2 or x.shape[1] != channels or (bias is not None and bias.shape != (channels,)):
        shapes = [tuple(t.shape) for t in (x, weight, *(() if bias is None else (bias,)))]
        raise ValueError(f"{name}: x, weight and bias of shapes {shapes} are not [T, C], [K >= 2, C] and [C]")
    parts = [x, weight] if bias is None else [x, weight, bias]
    if not x.dtype.is_floating_point or any(t.dtype is not x.dtype or t.device != x.device for t in parts):
        raise ValueError(f"{name}: x is {x.dtype} on {x.device}; weight and bias must have one floating dtype and device with it")
    return kernel, channels
