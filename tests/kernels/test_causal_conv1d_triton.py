"""The causal convolution's kernels against its sum in float64, rows of the states in a pool whose other bytes must not change."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, poisoned, relative_error

from rimuru_kernels.causal_conv1d import causal_conv1d, causal_conv1d_entries, kernel, launch
from rimuru_kernels.causal_conv1d.reference import causal_conv1d_reference

LARGE = [(8192, 4)] if ON_GPU else []
SHAPES = [(300, 4), (20, 2), (64, 5), *LARGE]  # channels, taps


class Pool(NamedTuple):
    data: Tensor
    entries: Tensor
    rows: list[list[Tensor]]

    def state(self, seq: int) -> Tensor:
        return torch.stack(self.rows[seq]).clone()


def pool_of(seqs: int, channels: int, kept: int, dtype: torch.dtype, absent: tuple[int, ...] = ()) -> Pool:
    """Random rows in shuffled pages among pages of NaN."""
    units = -(-channels * dtype.itemsize // 256) + 1
    data = torch.full(((2 * seqs * kept + 1) * units * 256,), 0xFF, dtype=torch.uint8, device=DEVICE)
    entries = (1 + 2 * torch.randperm(seqs * kept).view(seqs, kept)) * units
    rows = [[data[entry * 256 :][: channels * dtype.itemsize].view(dtype) for entry in row] for row in entries.tolist()]
    for row in (row for state in rows for row in state):
        row.copy_(torch.randn(channels))
    entries[list(absent)] = -1
    return Pool(data, entries.to(DEVICE, torch.int32), rows)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    rows, taps = torch.cat((before.double(), x.double())), weight.double()
    total = sum(rows[i : i + len(x)] * taps[i] for i in range(len(taps))) + (0.0 if bias is None else bias.double())
    return total / (1 + torch.exp(-total))


def inputs(tokens: int, channels: int, taps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a part of wider rows, weight and bias."""
    return tuple(
        t.to(DEVICE, dtype) for t in (torch.randn(tokens, channels + 16)[:, :channels], torch.randn(taps, channels), torch.randn(channels))
    )  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [None, [1], [2], [32, 33], [64, 1, 0, 3, 130]], ids=str)
@pytest.mark.parametrize(("channels", "taps"), SHAPES)
def test_against_the_sum(channels: int, taps: int, lengths: list[int] | None, dtype: torch.dtype) -> None:
    counts = lengths or [1, 1, 1]
    bounds, absent = [0, *accumulate(counts)], (1,) if len(counts) > 1 else ()
    state_dtype = torch.float32 if taps == 5 else dtype
    pool = pool_of(len(counts), channels, taps - 1, state_dtype, absent)
    x, weight, bias = inputs(bounds[-1] + 2 * (lengths is not None), channels, taps, dtype)
    added = bias if taps != 2 else None
    out, before, states = poisoned(*x.shape, dtype=dtype), pool.data.clone(), [pool.state(seq) for seq in range(len(counts))]
    cu_seqlens = None if lengths is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    launch.by_entries(x, weight, added, pool.data, pool.entries, cu_seqlens, state_dtype, out)
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        if seq in absent:
            assert not out[start:stop].any()
        elif start < stop:
            assert relative_error(out[start:stop], by_hand(x[start:stop], weight, added, states[seq])) < TOLERANCE[dtype]
            expected = torch.cat((states[seq], x[start:stop].to(state_dtype)))[1 - taps :]
            assert torch.equal(pool.state(seq), expected), f"the last rows of sequence {seq}"
            for row in pool.rows[seq]:
                first, size = row.data_ptr() - pool.data.data_ptr(), row.numel() * row.element_size()
                before[first : first + size] = pool.data[first : first + size]
    assert out[bounds[-1] :].isnan().all(), "rows of no sequence stay as they were"
    assert torch.equal(pool.data, before), "pages of no sequence, and of resting ones, stay as they were"


@pytest.mark.parametrize("cu_seqlens", [(0, 1, 2, 3), (0, 0, 2, 40)], ids=str)
def test_views_anywhere_in_memory(cu_seqlens: tuple[int, ...]) -> None:
    x, weight, bias = inputs(cu_seqlens[-1], 64, 4, torch.float16)
    pages = torch.randn(3, 4, 64).to(DEVICE, torch.float16)
    states = [torch.randn(3, 64).to(DEVICE, torch.float16), pages[:, 0], pages[:, 2]]
    copies = [state.clone() for state in states]
    expected = causal_conv1d_reference(x, weight, bias, copies, cu_seqlens)
    out = launch.by_views(x, weight, bias, states, cu_seqlens)
    assert out is not None and relative_error(out, expected) < 2e-3
    assert all(torch.equal(state, copy) for state, copy in zip(states, copies, strict=True))
    skewed = torch.randn(3, 65).to(DEVICE, torch.float16)[:, 1:]
    assert launch.by_views(x[:1], weight, bias, [skewed], (0, 1)) is None, "not aligned: the reference's"
    across = torch.randn(64, 3).to(DEVICE, torch.float16).t()
    assert launch.by_views(x[:1], weight, bias, [across], (0, 1)) is None, "channels apart: the reference's"


@pytest.mark.parametrize("lengths", [None, [3, 0, 7]], ids=str)
def test_the_op_by_entries_agrees_with_the_kernels(lengths: list[int] | None) -> None:
    pool = pool_of(3, 40, 3, torch.float32, absent=(0,))
    x, weight, bias = inputs(sum(lengths or [3]), 40, 4, torch.float32)
    bounds = None if lengths is None else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    data, out = pool.data.clone(), poisoned(*x.shape, dtype=torch.float32)
    launch.by_entries(x, weight, bias, data, pool.entries, bounds, torch.float32, out)
    assert relative_error(causal_conv1d_entries(x, weight, bias, pool.data, pool.entries, bounds), out) < 2e-6
    assert torch.equal(pool.data, data)


def test_no_sequences_no_rows_and_what_does_not_go_together() -> None:
    pool = pool_of(2, 16, 3, torch.float32)
    x, weight, bias = inputs(2, 16, 4, torch.float32)
    none = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert causal_conv1d_entries(x[:0], weight, bias, pool.data, pool.entries, none).shape == (0, 16)
    assert causal_conv1d_entries(x[:0], weight, bias, pool.data, pool.entries[:0]).shape == (0, 16)
    for call in [
        (x, weight, bias, pool.data, pool.entries[:, :2]),
        (x, weight, bias, pool.data, pool.entries.long()),
        (x, weight, bias, pool.data.view(torch.float32), pool.entries),
        (x, weight, bias, pool.data, pool.entries, none[:2]),
        (x[:1], weight, bias, pool.data, pool.entries),
        (x, weight[:1], bias, pool.data, pool.entries[:, :0]),
        (x.double(), weight.double(), None, pool.data, pool.entries),
    ]:
        with pytest.raises(ValueError, match="causal_conv1d_entries"):
            causal_conv1d_entries(*call)
    with pytest.raises(ValueError, match="out"):
        causal_conv1d_entries(x, weight, bias, pool.data, pool.entries, out=x[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("cu_seqlens", [(0, 1, 2), (0, 1, 131)], ids=str)
def test_views_on_a_gpu_agree_with_the_cpu(cu_seqlens: tuple[int, ...]) -> None:
    x, weight, bias = inputs(cu_seqlens[-1], 8192, 4, torch.bfloat16)
    states = list(torch.randn(2, 3, 8192, device=DEVICE))
    copies = [state.cpu() for state in states]
    expected = causal_conv1d(x.cpu(), weight.cpu(), bias.cpu(), copies, cu_seqlens)
    assert relative_error(causal_conv1d(x, weight, bias, states, cu_seqlens), expected) < 1e-2
    assert all(torch.equal(state.cpu(), copy) for state, copy in zip(states, copies, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_pages_beyond_eight_gibibytes() -> None:
    data = torch.empty((9 << 30) + 4096, dtype=torch.uint8, device=DEVICE)
    entries = (9 << 22) + torch.tensor([[0, 2, 1]], dtype=torch.int32, device=DEVICE)
    pages = [data[entry * 256 :][:128].view(torch.bfloat16) for entry in entries[0].tolist()]
    for tokens in (1, 2, 40):
        for page in pages:
            page.copy_(torch.randn(64))
        state = torch.stack(pages)
        x, weight, bias = inputs(tokens, 64, 4, torch.bfloat16)
        bounds = None if tokens == 1 else torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
        out = causal_conv1d_entries(x, weight, bias, data, entries, bounds)
        assert relative_error(out, by_hand(x, weight, bias, state)) < 1e-2
        assert torch.equal(torch.stack(pages), torch.cat((state, x))[-3:])
    assert kernel.TILE_ROWS < 40
