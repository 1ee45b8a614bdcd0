"""The gated delta rule: linear attention whose state forgets and corrects itself (Yang et al. 2024, arXiv 2412.06464).

Two forms: over a list of states, each a view, and over page entries in one pool of bytes, with nothing read on the host, so that a step
can be captured as a graph. On a GPU both run Triton kernels, in float32 for sequences of one row, and with products of the inputs'
dtype summed in float32 for longer ones; their results differ from the reference's by rounding (float32: 2e-5, half precision: 1e-2 of
the whole output's length).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rimuru_kernels.gated_delta_rule import reference
from rimuru_kernels.state_pages import check_bounds, check_entries, sequence_rows, view_pages
from rimuru_kernels.varlen import check_rows

__all__ = ["delta_gates", "gated_delta_rule", "gated_delta_rule_entries"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """What is forgotten and how strongly each token corrects: log decay -exp(a_log) softplus(a + dt_bias), and β = sigmoid(b).

    Args:
        a, b: [T, Hv], one floating dtype.
        a_log, dt_bias: [Hv] float32 (float64 for float64 models).

    Returns:
        log_decay [T, Hv] in a_log's dtype, at most 0; β [T, Hv], rounded to b's dtype and widened to a_log's.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    if a.ndim != 2 or b.shape != a.shape or a.dtype is not b.dtype or a_log.shape != a.shape[1:] or dt_bias.shape != a_log.shape:
        shapes = [tuple(t.shape) for t in (a, b, a_log, dt_bias)]
        raise ValueError(f"delta_gates: a, b, a_log, dt_bias of shapes {shapes} are not [T, Hv] twice and [Hv] twice")
    if a_log.dtype not in (torch.float32, torch.float64) or dt_bias.dtype is not a_log.dtype or not a.dtype.is_floating_point:
        raise ValueError(f"delta_gates: a_log is {a_log.dtype} and dt_bias {dt_bias.dtype}; both must be float32 (or float64)")
    if a.is_cuda and a.numel() and a_log.dtype is torch.float32 and a.dtype in _DTYPES:
        from rimuru_kernels.gated_delta_rule import kernel

        log_decay, beta = torch.empty((2, *a.shape), dtype=torch.float32, device=a.device)
        a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
        kernel.delta_gates(a, b, a_log.contiguous(), dt_bias.contiguous(), log_decay, beta)
        return log_decay, beta
    return reference.delta_gates(a, b, a_log, dt_bias)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Sequence[Tensor], cu_seqlens: Sequence[int]
) -> Tensor:
    """Each sequence's state over its rows, updated in place, and what every row reads from it.

    Per value head, with q̂ = q / sqrt(Σq² + 1e-6) / sqrt(dk), k̂ = k / sqrt(Σk² + 1e-6), S [dk, dv], row after row:

        S <- exp(log_decay) S;   u = β (v - Sᵀ k̂);   S <- S + k̂ uᵀ;   o = Sᵀ q̂

    One row takes exactly this step; more rows are computed 64 at a time in matrix products (the same values up to rounding).

    Args:
        q, k: [T, Hk, dk]; v: [T, Hv, dv]; rows of all sequences, one after the other, any strides, one floating dtype.
            Hv is a multiple of Hk; value head i reads key head i // (Hv / Hk).
        log_decay, beta: [T, Hv] from `delta_gates`, in the states' dtype.
        states: for each sequence [Hv, dk, dv], float32 (or float64), contiguous; zeros at the start of a text. Updated in place.
        cu_seqlens: 0, then the end of each sequence's rows; a sequence may have none.

    Returns:
        [T, Hv, dv] new tensor in v's dtype; computed in the states' dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    check_rows("gated_delta_rule", q, cu_seqlens, len(states))
    _check("gated_delta_rule", q, k, v, log_decay, beta)
    wide, expected = log_decay.dtype, (v.shape[1], q.shape[2], v.shape[2])
    for state in states:
        if state.shape != expected or state.dtype is not wide or state.device != q.device or not state.is_contiguous():
            raise ValueError(f"gated_delta_rule: a state is {state.dtype} {list(state.shape)}, not contiguous {wide} {list(expected)}")
    if q.is_cuda and v.numel() and wide is torch.float32 and q.dtype in _DTYPES:
        from rimuru_kernels.gated_delta_rule import launch

        out = launch.by_views(q, k, v, log_decay, beta, states, cu_seqlens)
        if out is not None:
            return out
    return reference.gated_delta_rule(q, k, v, log_decay, beta, states, cu_seqlens)


def gated_delta_rule_entries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
    single_rows: bool = True,
) -> Tensor:
    """`gated_delta_rule` over states in the pages of a pool. On a GPU nothing is read on the host.

    Args:
        q, k, v, log_decay, beta: as for `gated_delta_rule`; the gates float32, q, k, v half precision or float32.
        pool: uint8 [bytes].
        entries: int32 [S], the page of each sequence's state [Hv, dk, dv] float32, offset / 256; no page twice. Where it is negative
            no state is touched, and the sequence's rows of the result are zeros.
        cu_seqlens: int32 [S + 1]: sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1] - 1, maybe none; rows from cu_seqlens[S] on
            are left unwritten. None: one row each.
        out: [T, Hv, dv] contiguous, or None for a new tensor.
        single_rows: whether a sequence may have exactly one row; False spares a launch.

    Returns:
        [T, Hv, dv] in v's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or on a GPU keys of more than 128 elements with cu_seqlens.
    """
    name = "gated_delta_rule_entries"
    _check(name, q, k, v, log_decay, beta)
    if log_decay.dtype is not torch.float32 or q.dtype not in _DTYPES:
        raise ValueError(f"{name}: q is {q.dtype}, the gates {log_decay.dtype}; need half precision or float32, and float32")
    seqs = check_entries(name, pool, entries, (), q.device)
    check_bounds(name, cu_seqlens, seqs, len(q), q.device)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    elif out.shape != v.shape or out.dtype is not v.dtype or out.device != v.device or not out.is_contiguous():
        raise ValueError(f"{name}: out {out.dtype} {list(out.shape)} must be contiguous and like v {v.dtype} {list(v.shape)}")
    if not v.numel() or not seqs:
        return out
    if q.is_cuda:
        from rimuru_kernels.gated_delta_rule import chunk_kernel, launch

        if cu_seqlens is not None and q.shape[2] > chunk_kernel.MAX_KEY_DIM:
            raise ValueError(f"{name}: keys of {q.shape[2]} elements; on a GPU at most {chunk_kernel.MAX_KEY_DIM} with cu_seqlens")
        launch.by_entries(q, k, v, log_decay, beta, pool, entries, cu_seqlens, out, single_rows)
        return out
    shape = (v.shape[1], q.shape[2], v.shape[2])
    for entry, (start, stop) in zip(entries.tolist(), sequence_rows(cu_seqlens, seqs), strict=True):
        if entry < 0:
            out[start:stop] = 0.0
            continue
        rows, state = slice(start, stop), view_pages(pool, entry, shape, torch.float32)
        gates = log_decay[rows], beta[rows]
        out[rows] = reference.gated_delta_rule(q[rows], k[rows], v[rows], *gates, [state], (0, stop - start))
    return out


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> None:
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "log_decay": log_decay.shape, "beta": beta.shape}
    good = q.ndim == 3 and v.ndim == 3 and k.shape == q.shape and v.shape[0] == q.shape[0] and v.shape[1] % max(1, q.shape[1]) == 0
    if not good or log_decay.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(f"{name}: tensors of shapes { ({n: tuple(s) for n, s in shapes.items()}) } do not belong together")
    wide = log_decay.dtype
    if wide not in (torch.float32, torch.float64) or beta.dtype is not wide or not (q.dtype is k.dtype is v.dtype):
        raise ValueError(f"{name}: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, the gates {wide} and {beta.dtype}")
    if len({t.device for t in (q, k, v, log_decay, beta)}) > 1:
        raise ValueError(f"{name}: tensors lie on several devices")
