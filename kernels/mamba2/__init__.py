"""Mamba-2's state space: a linear recurrence whose steps the input chooses (Dao & Gu 2024, arXiv 2405.21060).

Two forms: over a list of states, each a view, and over page entries in one pool of bytes, with nothing read on the host, so that a step
can be captured as a graph. On a GPU both run Triton kernels, in float32 for sequences of one row, and with products of the inputs' dtype
summed in float32 for longer ones; their results differ from the reference's by rounding (float32: 2e-5, half precision: 1e-2 of the whole
output's length).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.mamba2 import reference
from rimuru_kernels.state_pages import check_bounds, check_entries, sequence_rows, view_pages
from rimuru_kernels.varlen import check_rows

__all__ = ["state_space", "state_space_entries", "time_steps"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def time_steps(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Length of each step: softplus(dt + dt_bias), clamped to the limits.

    Args:
        dt: [T, H] floating point; dt_bias: [H] float32 (or float64).
        limits: least and largest step; the largest may be infinite.

    Returns:
        [T, H] in dt_bias's dtype.

    Raises:
        ValueError: shapes or dtypes that do not go together, or limits that exclude every step.
    """
    if dt.ndim != 2 or dt_bias.shape != dt.shape[1:] or not dt.dtype.is_floating_point:
        raise ValueError(f"time_steps: dt {dt.dtype} {list(dt.shape)} and dt_bias {list(dt_bias.shape)} are not [T, H] and [H]")
    if dt_bias.dtype not in (torch.float32, torch.float64) or not 0.0 <= limits[0] <= limits[1]:
        raise ValueError(f"time_steps: dt_bias is {dt_bias.dtype}, limits are {limits}; need float32 and 0 <= least <= largest")
    if dt.is_cuda and dt.numel() and dt_bias.dtype is torch.float32 and dt.dtype in _DTYPES:
        from rimuru_kernels.mamba2 import kernel

        out = torch.empty(dt.shape, dtype=torch.float32, device=dt.device)
        kernel.time_steps(dt if dt.stride(1) == 1 else dt.contiguous(), dt_bias.contiguous(), limits, out)
        return out
    return reference.time_steps(dt, dt_bias, limits)


def state_space(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    states: Sequence[Tensor],
    cu_seqlens: Sequence[int],
) -> Tensor:
    """Each sequence's state over its rows, updated in place, and what every row reads from it.

    Per head, with A = -exp(a_log), S [P, N], row after row:

        S <- exp(dt A) S + dt x bᵀ;   y = S c + D x

    One row takes exactly this step; more rows are computed 64 at a time in matrix products (the same values up to rounding).

    Args:
        x: [T, H, P]; b, c: [T, G, N]; rows of all sequences, one after the other, any strides, one floating dtype. H is a multiple of G;
            head i reads group i // (H / G).
        dt: [T, H] from `time_steps`, in the states' dtype.
        a_log, d: [H] in the states' dtype; D is the skip connection.
        states: for each sequence [H, P, N], float32 (or float64), contiguous; zeros at the start of a text. Updated in place.
        cu_seqlens: 0, then the end of each sequence's rows; a sequence may have none.

    Returns:
        [T, H, P] new tensor in x's dtype; computed in the states' dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    check_rows("state_space", x, cu_seqlens, len(states))
    _check("state_space", x, dt, a_log, b, c, d)
    wide, expected = dt.dtype, (*x.shape[1:], b.shape[2])
    for state in states:
        if state.shape != expected or state.dtype is not wide or state.device != x.device or not state.is_contiguous():
            raise ValueError(f"state_space: a state is {state.dtype} {list(state.shape)}, not contiguous {wide} {list(expected)}")
    if x.is_cuda and x.numel() and wide is torch.float32 and x.dtype in _DTYPES:
        from rimuru_kernels.mamba2 import launch

        out = launch.by_views(x, dt, a_log, b, c, d, states, cu_seqlens)
        if out is not None:
            return out
    return reference.state_space(x, dt, a_log, b, c, d, states, cu_seqlens)


def state_space_entries(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    pool: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
    single_rows: bool = True,
) -> Tensor:
    """`state_space` over states in the pages of a pool. On a GPU nothing is read on the host.

    Args:
        x, dt, a_log, b, c, d: as for `state_space`; dt, a_log, d float32, x, b, c half precision or float32.
        pool: uint8 [bytes].
        entries: int32 [S], the page of each sequence's state [H, P, N] float32, offset / 256; no page twice. Where it is negative no
            state is touched, and the sequence's rows of the result are zeros.
        cu_seqlens: int32 [S + 1]: sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1] - 1, maybe none; rows from cu_seqlens[S] on
            are left unwritten. None: one row each.
        out: [T, H, P] contiguous, or None for a new tensor.
        single_rows: whether a sequence may have exactly one row; False spares a launch.

    Returns:
        [T, H, P] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or on a GPU states of more than 256 elements with cu_seqlens.
    """
    name = "state_space_entries"
    _check(name, x, dt, a_log, b, c, d)
    if dt.dtype is not torch.float32 or x.dtype not in _DTYPES:
        raise ValueError(f"{name}: x is {x.dtype}, dt {dt.dtype}; need half precision or float32, and float32")
    seqs = check_entries(name, pool, entries, (), x.device)
    check_bounds(name, cu_seqlens, seqs, len(x), x.device)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.shape != x.shape or out.dtype is not x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(f"{name}: out {out.dtype} {list(out.shape)} must be contiguous and like x {x.dtype} {list(x.shape)}")
    if not x.numel() or not seqs:
        return out
    if x.is_cuda:
        from rimuru_kernels.mamba2 import chunk_kernel, launch

        if cu_seqlens is not None and b.shape[2] > chunk_kernel.MAX_STATE:
            raise ValueError(f"{name}: states of {b.shape[2]} elements; on a GPU at most {chunk_kernel.MAX_STATE} with cu_seqlens")
        launch.by_entries(x, dt, a_log, b, c, d, pool, entries, cu_seqlens, out, single_rows)
        return out
    shape = (*x.shape[1:], b.shape[2])
    for entry, (start, stop) in zip(entries.tolist(), sequence_rows(cu_seqlens, seqs), strict=True):
        if entry < 0:
            out[start:stop] = 0.0
            continue
        rows, state = slice(start, stop), view_pages(pool, entry, shape, torch.float32)
        out[rows] = reference.state_space(x[rows], dt[rows], a_log, b[rows], c[rows], d, [state], (0, stop - start))
    return out


def _check(name: str, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    shapes = {"x": x.shape, "dt": dt.shape, "a_log": a_log.shape, "b": b.shape, "c": c.shape, "d": d.shape}
    good = x.ndim == 3 and b.ndim == 3 and c.shape == b.shape and b.shape[0] == x.shape[0] and x.shape[1] % max(1, b.shape[1]) == 0
    if not good or dt.shape != x.shape[:2] or a_log.shape != x.shape[1:2] or d.shape != a_log.shape:
        raise ValueError(f"{name}: tensors of shapes { ({n: tuple(s) for n, s in shapes.items()}) } do not belong together")
    wide = dt.dtype
    if wide not in (torch.float32, torch.float64) or not (a_log.dtype is d.dtype is wide) or not (x.dtype is b.dtype is c.dtype):
        raise ValueError(f"{name}: x, b, c are {x.dtype}, {b.dtype}, {c.dtype}; dt, a_log, d are {wide}, {a_log.dtype}, {d.dtype}")
    if len({t.device for t in (x, dt, a_log, b, c, d)}) > 1:
        raise ValueError(f"{name}: tensors lie on several devices")
