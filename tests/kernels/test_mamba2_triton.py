"""The Mamba-2 step's kernel against the recurrence in float64, states in a pool whose other bytes must not change."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.mamba2 import kernel, launch, reference, state_space, state_space_entries, time_steps

SHAPES = [(4, 2, 16, 32), (2, 2, 40, 20), *([(128, 1, 64, 128)] if ON_GPU else [])]  # heads, groups, P, N


def inputs(seqs: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """x, dt, a_log, b, c, d; x, b and c are parts of one matrix, as the model gives them."""
    heads, groups, p, n = shape
    mixed = torch.randn(seqs, heads * p + 2 * groups * n).to(DEVICE, dtype)
    x, b, c = mixed.split([heads * p, groups * n, groups * n], 1)
    wide = [torch.rand(seqs, heads), torch.rand(heads), torch.randn(heads)]
    dt, a_log, d = (t.to(DEVICE) for t in wide)
    return [x.unflatten(1, (heads, p)), dt, a_log, b.unflatten(1, (groups, n)), c.unflatten(1, (groups, n)), d]


def pool_of(seqs: int, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Random states in shuffled pages among pages of NaN: pool, entries, views."""
    heads, _, p, n = shape
    units = -(-heads * p * n * 4 // 256) + 1
    data = torch.full(((2 * seqs + 1) * units * 256,), 0xFF, dtype=torch.uint8, device=DEVICE)
    entries = (1 + 2 * torch.randperm(seqs)) * units
    states = [data[entry * 256 :].view(torch.float32)[: heads * p * n].view(heads, p, n) for entry in entries.tolist()]
    for state in states:
        state.copy_(torch.randn(heads, p, n))
    return data, entries.to(DEVICE, torch.int32), states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_row_each(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, dt, a_log, b, c, d = inputs(3, shape, dtype)
    data, entries, states = pool_of(3, shape)
    entries[1] = -1
    ratio = shape[0] // shape[1]
    wide = [t.double() for t in (x, dt, a_log, b.repeat_interleave(ratio, 1), c.repeat_interleave(ratio, 1), d)]
    rows, lengths, logs, writes, reads, skip = wide
    ends = torch.stack(states).double() * torch.exp(-logs.exp() * lengths)[:, :, None, None]
    ends += (lengths[:, :, None] * rows)[..., None] * writes[:, :, None]
    expected = torch.einsum("shpn,shn->shp", ends, reads) + skip[:, None] * rows
    out, before = poisoned(*x.shape, dtype=dtype), data.clone()
    launch.by_entries(x, dt, a_log, b, c, d, data, entries, None, out)
    assert not out[1].any(), "no state, so zeros"
    for seq in (0, 2):
        assert relative_error(out[seq], expected[seq]) < TOLERANCE[dtype]
        assert relative_error(states[seq], ends[seq]) < 1e-6, "the state is updated in float32"
        first = states[seq].data_ptr() - data.data_ptr()
        before[first : first + states[seq].numel() * 4] = data[first : first + states[seq].numel() * 4]
    assert torch.equal(data, before), "pages of no sequence, and of absent ones, stay as they were"


def by_hand(parts: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state, in float64, row after row."""
    x, dt, a_log, b, c, d = (t.double().cpu() for t in parts)
    ratio, end = x.shape[1] // b.shape[1], state.double().cpu().clone()
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        write, read = (u[t].repeat_interleave(ratio, 0) for u in (b, c))
        end = end * torch.exp(-a_log.exp() * dt[t])[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * write[:, None, :]
        out[t] = torch.einsum("hpn,hn->hp", end, read) + d[:, None] * x[t]
    return out, end


def cut(parts: list[Tensor], rows: slice) -> list[Tensor]:
    """The rows' x, dt, b and c."""
    x, dt, a_log, b, c, d = parts
    return [x[rows], dt[rows], a_log, b[rows], c[rows], d]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[2], [64], [65], [130], [5, 0, 1, 66, 1]], ids=str)
def test_several_rows(lengths: list[int], dtype: torch.dtype) -> None:
    for shape in [SHAPES[len(lengths) % 2], *SHAPES[2:]]:
        parts, (data, entries, states) = inputs(sum(lengths) + 3, shape, dtype), pool_of(len(lengths), shape)
        if len(lengths) > 1:
            entries[3] = -1
        bounds = [0, *accumulate(lengths)]
        expected = [by_hand(cut(parts, slice(a, b)), s) for (a, b), s in zip(pairwise(bounds), states, strict=True)]
        out, before = poisoned(*parts[0].shape, dtype=dtype), data.clone()
        launch.by_entries(*parts, data, entries, torch.tensor(bounds, dtype=torch.int32, device=DEVICE), out)  # type: ignore[arg-type]
        for seq, ((a, b), (rows, end)) in enumerate(zip(pairwise(bounds), expected, strict=True)):
            if entries[seq] < 0:
                assert not out[a:b].any(), "no state, so zeros"
            elif a < b:
                tolerance = 2e-5 if dtype is torch.float32 else 1e-2
                assert relative_error(out[a:b], rows) < tolerance and relative_error(states[seq], end) < tolerance
                first = states[seq].data_ptr() - data.data_ptr()
                before[first : first + states[seq].numel() * 4] = data[first : first + states[seq].numel() * 4]
        assert out[bounds[-1] :].isnan().all(), "rows of no sequence stay as they were"
        assert torch.equal(data, before), "pages of no sequence, and of resting ones, stay as they were"


def test_the_op_by_entries_agrees_with_the_kernels_over_several_rows() -> None:
    shape, bounds = SHAPES[0], torch.tensor([0, 3, 3, 4], dtype=torch.int32, device=DEVICE)
    parts, (data, entries, _) = inputs(4, shape, torch.float32), pool_of(3, shape)
    twin, out = data.clone(), poisoned(4, *shape[::2], dtype=torch.float32)
    launch.by_entries(*parts, twin, entries, bounds, out)  # type: ignore[arg-type]
    assert relative_error(state_space_entries(*parts, data, entries, bounds), out) < 2e-5
    where = ~twin.view(torch.float32).isnan()
    assert relative_error(data.view(torch.float32)[where], twin.view(torch.float32)[where]) < 2e-5


def test_strong_decay_does_not_overflow() -> None:
    parts = inputs(70, SHAPES[0], torch.float32)
    parts[1] *= 60.0
    data, entries, states = pool_of(1, SHAPES[0])
    rows, end = by_hand(parts, states[0])
    out = poisoned(*parts[0].shape, dtype=torch.float32)
    launch.by_entries(*parts, data, entries, torch.tensor([0, 70], dtype=torch.int32, device=DEVICE), out)  # type: ignore[arg-type]
    assert relative_error(out, rows) < 2e-4 and relative_error(states[0], end) < 2e-4


def test_the_op_agrees_with_the_kernel() -> None:
    shape = SHAPES[0]
    parts = inputs(3, shape, torch.float32)
    data, entries, _ = pool_of(3, shape)
    entries[0] = -1
    twin = data.clone()
    out = poisoned(3, *shape[::2], dtype=torch.float32)
    launch.by_entries(*parts, twin, entries, None, out)  # type: ignore[arg-type]
    assert relative_error(state_space_entries(*parts, data, entries), out) < 2e-6
    where = ~twin.view(torch.float32).isnan()
    assert relative_error(data.view(torch.float32)[where], twin.view(torch.float32)[where]) < 1e-6


def test_views_anywhere_in_memory() -> None:
    shape = SHAPES[0]
    parts = inputs(2, shape, torch.float32)
    states = [torch.randn(4, 16, 32, device=DEVICE) for _ in range(2)]
    copies = [state.clone() for state in states]
    expected = reference.state_space(*parts, copies, (0, 1, 2))  # type: ignore[arg-type]
    out = launch.by_views(*parts, states, (0, 1, 2))  # type: ignore[arg-type]
    assert out is not None and relative_error(out, expected) < 2e-6
    assert all(relative_error(state, copy) < 1e-6 for state, copy in zip(states, copies, strict=True))


def test_no_sequences_and_what_does_not_go_together() -> None:
    shape = SHAPES[0]
    x, dt, a_log, b, c, d = inputs(2, shape, torch.float32)
    data, entries, _ = pool_of(2, shape)
    assert state_space_entries(x[:0], dt[:0], a_log, b[:0], c[:0], d, data, entries[:0]).shape == (0, 4, 16)
    for call in [
        (x, dt, a_log, b, c, d, data, entries[:1]),
        (x, dt, a_log, b, c, d, data, entries.long()),
        (x, dt, a_log, b, c, d, data[1:], entries),
        (x, dt, a_log, b[:, :, :3], c, d, data, entries),
        (x, dt.double(), a_log.double(), b, c, d.double(), data, entries),
    ]:
        with pytest.raises(ValueError, match="state_space_entries"):
            state_space_entries(*call)
    with pytest.raises(ValueError, match="out"):
        state_space_entries(x, dt, a_log, b, c, d, data, entries, out=x[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("cu_seqlens", [(0, 1, 2), (0, 1, 70)], ids=str)
def test_views_on_a_gpu_agree_with_the_cpu(cu_seqlens: tuple[int, ...]) -> None:
    parts, states = inputs(cu_seqlens[-1], SHAPES[-1], torch.bfloat16), list(torch.randn(2, 128, 64, 128, device=DEVICE))
    copies = [state.cpu() for state in states]
    expected = state_space(*(t.cpu() for t in parts), copies, cu_seqlens)  # type: ignore[arg-type]
    assert relative_error(state_space(*parts, states, cu_seqlens), expected) < 1e-2  # type: ignore[arg-type]
    assert all(relative_error(state, copy) < 1e-2 for state, copy in zip(states, copies, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.05, 1.5)], ids=str)
def test_lengths_of_steps(limits: tuple[float, float], dtype: torch.dtype) -> None:
    dt = 4 * torch.randn(7, 20)
    dt[0, 0], dt[1, 1], dt[2, 2] = 60.0, -30.0, -6.0
    dt = dt.to(DEVICE, dtype)[:, 4:16]
    bias, out = torch.randn(12).to(DEVICE), poisoned(7, 12, dtype=torch.float32)
    kernel.time_steps(dt, bias, limits, out)
    wide = torch.nn.functional.softplus(dt.double() + bias.double(), threshold=1e9).clamp(*limits)
    torch.testing.assert_close(out.double(), wide, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(time_steps(dt, bias, limits), out, rtol=1e-5, atol=1e-6)


def test_no_single_rows_need_no_step() -> None:
    parts, (data, entries, _) = inputs(5, SHAPES[0], torch.float32), pool_of(2, SHAPES[0])
    bounds, twin = torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE), data.clone()
    outs = [poisoned(5, *SHAPES[0][::2], dtype=torch.float32) for _ in range(2)]
    launch.by_entries(*parts, data, entries, bounds, outs[0])  # type: ignore[arg-type]
    launch.by_entries(*parts, twin, entries, bounds, outs[1], steps=False)  # type: ignore[arg-type]
    assert torch.equal(*outs) and torch.equal(data, twin)
