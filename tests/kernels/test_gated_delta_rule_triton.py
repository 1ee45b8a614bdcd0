"""The gated delta rule's kernels against its recurrence in float64, states in a pool whose other bytes must not change."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, poisoned, relative_error

from rimuru_kernels.gated_delta_rule import chunk_kernel, delta_gates, gated_delta_rule, gated_delta_rule_entries, kernel, launch, reference

# One row: only the inputs and the output are rounded. More: w, u and S too, in the inputs' dtype; and the state takes that up.
ROW = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ROWS = {torch.float32: 2e-5 if ON_GPU else 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LARGE = [(32, 16, 128, 128)] if ON_GPU else []  # the interpreter takes seconds a case
SHAPES = [(2, 1, 16, 32), (2, 2, 20, 17), *LARGE]  # value heads, key heads, dk, dv


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


class Pool(NamedTuple):
    data: Tensor
    entries: Tensor
    states: list[Tensor]


def inputs(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """Rows as the model gives them: q, k and v parts of one matrix."""
    heads, key_heads, dk, dv = shape
    mixed = (2 * torch.randn(tokens, 2 * key_heads * dk + heads * dv) + 0.5).to(DEVICE, dtype)
    q, k, v = mixed.split([key_heads * dk, key_heads * dk, heads * dv], 1)
    decay = -2 * torch.rand(tokens, heads) ** 4
    parts = q.unflatten(1, (key_heads, dk)), k.unflatten(1, (key_heads, dk)), v.unflatten(1, (heads, dv))
    return Inputs(*parts, decay.to(DEVICE), torch.rand(tokens, heads).to(DEVICE))


def pool_of(seqs: int, shape: tuple[int, int, int, int], absent: tuple[int, ...] = ()) -> Pool:
    """Random states in shuffled pages among pages of NaN."""
    heads, _, dk, dv = shape
    units = -(-heads * dk * dv * 4 // 256) + 1
    data = torch.full(((2 * seqs + 1) * units * 256,), 0xFF, dtype=torch.uint8, device=DEVICE)
    entries = (1 + 2 * torch.randperm(seqs)) * units
    states = []
    for seq, entry in enumerate(entries.tolist()):
        state = data[entry * 256 :].view(torch.float32)[: heads * dk * dv].view(heads, dk, dv)
        state.copy_(torch.randn(heads, dk, dv))
        states.append(state)
        if seq in absent:
            entries[seq] = -1
    return Pool(data, entries.to(DEVICE, torch.int32), states)


def by_hand(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state, in float64, row after row."""
    x = Inputs(*(t.double().cpu() for t in x))
    end, out = state.double().cpu().clone(), torch.empty(x.v.shape, dtype=torch.float64)
    ratio, dk = x.v.shape[1] // x.q.shape[1], x.q.shape[2]
    for t in range(len(x.v)):
        q, k = (u[t].repeat_interleave(ratio, 0) for u in (x.q, x.k))
        q = q / (q.square().sum(1, keepdim=True) + 1e-6).sqrt() / math.sqrt(dk)
        k = k / (k.square().sum(1, keepdim=True) + 1e-6).sqrt()
        end *= x.log_decay[t].exp()[:, None, None]
        u = x.beta[t][:, None] * (x.v[t] - torch.einsum("hkv,hk->hv", end, k))
        end += k[:, :, None] * u[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", end, q)
    return out, end


def run_and_compare(x: Inputs, pool: Pool, lengths: list[int] | None, tolerance: float) -> None:
    """Run by page entries; compare outputs and states, and that nothing else of the pool changed."""
    counts = lengths or [1] * len(pool.states)
    bounds = [0, *accumulate(counts)]
    expected = [by_hand(Inputs(*(t[a:b] for t in x)), s) for (a, b), s in zip(pairwise(bounds), pool.states, strict=True)]
    out, before = poisoned(*x.v.shape, dtype=x.v.dtype), pool.data.clone()
    cu_seqlens = None if lengths is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    launch.by_entries(*x, pool.data, pool.entries, cu_seqlens, out)
    for seq, ((a, b), (rows, end)) in enumerate(zip(pairwise(bounds), expected, strict=True)):
        if pool.entries[seq] < 0:
            assert not out[a:b].any(), f"sequence {seq} has no state, so its rows are zeros"
        elif a < b:
            assert relative_error(out[a:b], rows) < tolerance, f"outputs of sequence {seq}"
            assert relative_error(pool.states[seq], end) < tolerance, f"state of sequence {seq}"
            state = pool.states[seq]
            first = state.data_ptr() - pool.data.data_ptr()
            before[first : first + state.numel() * 4] = pool.data[first : first + state.numel() * 4]
    assert out[bounds[-1] :].isnan().all(), "rows of no sequence stay as they were"
    assert torch.equal(pool.data, before), "pages of no sequence, and of resting ones, stay as they were"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seqs", [1, 3])
def test_one_row_each(seqs: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    run_and_compare(inputs(seqs, shape, dtype), pool_of(seqs, shape), None, ROW[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[1], [2], [63], [64], [65], [130], [5, 0, 1, 66, 1]], ids=str)
def test_several_rows(lengths: list[int], dtype: torch.dtype) -> None:
    for shape in [SHAPES[len(lengths) % 2], *LARGE]:
        run_and_compare(inputs(sum(lengths) + 3, shape, dtype), pool_of(len(lengths), shape), lengths, ROWS[dtype])


@pytest.mark.parametrize("lengths", [None, [1, 66, 1, 3]], ids=str)
def test_sequences_without_a_page_touch_nothing(lengths: list[int] | None) -> None:
    pool = pool_of(4, SHAPES[0], absent=(0, 1))
    run_and_compare(inputs(sum(lengths or [4]), SHAPES[0], torch.float32), pool, lengths, ROWS[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_keys_that_are_never_forgotten(dtype: torch.dtype) -> None:
    """The hardest system: all of its entries below the diagonal are 1; a series of its powers would lose every digit."""
    shape = SHAPES[0]
    x = inputs(64, shape, dtype)
    x = x._replace(k=x.k[:1].expand_as(x.k).contiguous(), log_decay=torch.zeros_like(x.log_decay), beta=torch.ones_like(x.beta))
    run_and_compare(x, pool_of(1, shape), [64], 4 * ROWS[dtype])


def test_strong_decay_does_not_overflow() -> None:
    x = inputs(64, SHAPES[0], torch.float32)  # sums of decays near -1000 keep fewer digits of their differences
    run_and_compare(x._replace(log_decay=x.log_decay * 40), pool_of(1, SHAPES[0]), [64], 10 * ROWS[torch.float32])


def test_float16_saturates_beside_keys_of_nothing() -> None:
    x = inputs(4, SHAPES[0], torch.float16)
    x.k[1], x.v[1], x.beta[1], x.log_decay[:] = 0.0, 100.0, 1.0, 0.0  # the norm's inverse is 1000, and float16 ends at 65504
    run_and_compare(x, pool_of(1, SHAPES[0]), [4], 2e-3)


@pytest.mark.parametrize("cu_seqlens", [(0, 1, 2, 3), (0, 1, 1, 4), (0, 0, 1, 1), (0, 2, 3, 69)], ids=str)
def test_views_anywhere_in_memory(cu_seqlens: tuple[int, ...]) -> None:
    heads, _, dk, dv = shape = SHAPES[0]
    x = inputs(cu_seqlens[-1], shape, torch.float32)
    states = [torch.randn(heads, dk, dv, device=DEVICE), *torch.randn(2, heads, dk, dv, device=DEVICE)]
    copies = [state.clone() for state in states]
    expected = reference.gated_delta_rule(*x, copies, cu_seqlens)
    out = launch.by_views(*x, states, cu_seqlens)
    assert out is not None and relative_error(out, expected) < ROWS[torch.float32]
    for state, copy in zip(states, copies, strict=True):
        assert relative_error(state, copy) < ROWS[torch.float32]
    skewed = torch.randn(heads * dk * dv + 1, device=DEVICE)[1:].view(heads, dk, dv)
    assert launch.by_views(*(t[:1] for t in x), [skewed], (0, 1)) is None, "not aligned: the reference's"
    wide = torch.randn(2, 1, 2 * chunk_kernel.MAX_KEY_DIM, device=DEVICE)
    state = torch.randn(1, wide.shape[2], dv, device=DEVICE)
    gates = torch.rand(2, 1, device=DEVICE)
    assert launch.by_views(wide, wide, x.v[:2, :1], -gates, gates, [state], (0, 2)) is None, "keys too long: the reference's"


def test_a_row_does_not_depend_on_the_batch() -> None:
    shape = SHAPES[0]
    x, pool = inputs(4, shape, torch.float16), pool_of(2, shape)
    alone, state = poisoned(1, *x.v.shape[1:], dtype=torch.float16), pool.states[0].clone()
    kernel.step(*(t[:1] for t in x), launch.places_of([state]), None, alone)  # type: ignore[arg-type]
    together = gated_delta_rule(*x, pool.states, (0, 1, 4)) if ON_GPU else launch.by_views(*x, pool.states, (0, 1, 4))
    assert together is not None and torch.equal(together[:1], alone) and torch.equal(pool.states[0], state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(dtype: torch.dtype) -> None:
    both = 3 * torch.randn(5, 12)
    both[0, 0], both[1, 1], both[2, 2] = 60.0, -30.0, -6.0
    both = both.to(DEVICE, dtype)
    a, b, a_log, dt_bias = both[:, :6], both[:, 6:], (3 * torch.rand(6)).to(DEVICE), torch.randn(6).to(DEVICE)
    log_decay, beta = poisoned(5, 6, dtype=torch.float32), poisoned(5, 6, dtype=torch.float32)
    kernel.delta_gates(a, b, a_log, dt_bias, log_decay, beta)
    wide = torch.nn.functional.softplus(a.double() + dt_bias.double(), threshold=1e9) * -a_log.double().exp()
    torch.testing.assert_close(log_decay.double(), wide, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(beta, reference.delta_gates(a, b, a_log, dt_bias)[1], rtol=2**-7 if dtype.itemsize < 4 else 1e-6, atol=0.0)
    assert torch.equal(beta.to(dtype).float(), beta)
    torch.testing.assert_close(delta_gates(a, b, a_log, dt_bias)[0], log_decay, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, [3, 0, 1]], ids=str)
def test_the_op_by_entries_agrees_with_the_kernels(lengths: list[int] | None) -> None:
    shape, tokens = SHAPES[0], 3 if lengths is None else 4
    x, pool = inputs(tokens, shape, torch.float32), pool_of(3, shape, absent=(2,) if lengths is None else ())
    bounds = None if lengths is None else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    data, out = pool.data.clone(), poisoned(*x.v.shape, dtype=torch.float32)
    launch.by_entries(*x, data, pool.entries, bounds, out)
    assert relative_error(gated_delta_rule_entries(*x, pool.data, pool.entries, bounds), out) < ROWS[torch.float32]
    where = ~data.view(torch.float32).isnan()
    assert relative_error(pool.data.view(torch.float32)[where], data.view(torch.float32)[where]) < ROWS[torch.float32]


def test_no_sequences_and_no_rows() -> None:
    x, pool = inputs(0, SHAPES[0], torch.float32), pool_of(2, SHAPES[0])
    before = pool.data.clone()
    assert gated_delta_rule_entries(*x, pool.data, pool.entries[:0]).shape == x.v.shape
    assert gated_delta_rule_entries(*x, pool.data, pool.entries, torch.zeros(3, dtype=torch.int32, device=DEVICE)).shape == x.v.shape
    assert gated_delta_rule(*x, pool.states, (0, 0, 0)).shape == x.v.shape
    assert torch.equal(pool.data, before)


def test_what_does_not_go_together() -> None:
    x, pool = inputs(2, SHAPES[0], torch.float32), pool_of(2, SHAPES[0])
    data, entries, bounds = pool.data, pool.entries, torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    for call in [
        (*x, data.view(torch.float32), entries, None),
        (*x, data[1:], entries, None),
        (*x, data, entries.long(), None),
        (*x, data, entries[:1], None),
        (*x, data, entries[0], None),
        (*x, data, entries, bounds[:2]),
        (*x, data, entries, bounds.long()),
        (*x._replace(beta=x.beta.double(), log_decay=x.log_decay.double()), data, entries, None),
        (*x._replace(k=x.k[:1]), data, entries, None),
    ]:
        with pytest.raises(ValueError, match="gated_delta_rule_entries"):
            gated_delta_rule_entries(*call)
    with pytest.raises(ValueError, match="out"):
        gated_delta_rule_entries(*x, data, entries, out=x.v[:1])
    if not ON_GPU:
        with pytest.raises(ValueError, match="ends behind the pool"):
            gated_delta_rule_entries(*x, data, entries + 1000)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("cu_seqlens", [(0, 1, 2), (0, 1, 131)], ids=str)
def test_views_on_a_gpu_agree_with_the_cpu(cu_seqlens: tuple[int, ...]) -> None:
    x, states = inputs(cu_seqlens[-1], LARGE[0], torch.bfloat16), list(torch.randn(2, 32, 128, 128, device=DEVICE))
    copies = [state.cpu() for state in states]
    expected = gated_delta_rule(*(t.cpu() for t in x), copies, cu_seqlens)
    assert relative_error(gated_delta_rule(*x, states, cu_seqlens), expected) < 1e-2
    assert all(relative_error(state, copy) < 1e-2 for state, copy in zip(states, copies, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_a_captured_graph_replays_both_forms() -> None:
    shape, lengths = SHAPES[0], (1, 70)
    x, pool = inputs(71, shape, torch.float32), pool_of(2, shape)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    warm = pool.data.clone()
    gated_delta_rule_entries(*x, warm, pool.entries, bounds)
    graph, out = torch.cuda.CUDAGraph(), poisoned(*x.v.shape, dtype=torch.float32)
    with torch.cuda.graph(graph):
        gated_delta_rule_entries(*x, pool.data, pool.entries, bounds, out=out)
    states = [state.clone() for state in pool.states]
    for part, fresh in zip(x, inputs(71, shape, torch.float32), strict=True):
        part.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    for (a, b), before, state in zip(((0, 1), (1, 71)), states, pool.states, strict=True):
        rows, end = by_hand(Inputs(*(t[a:b] for t in x)), before)
        assert relative_error(out[a:b], rows) < 2e-5 and relative_error(state, end) < 2e-5


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_pages_beyond_eight_gibibytes() -> None:
    shape = (2, 1, 16, 32)
    data = torch.empty((9 << 30) + 8192, dtype=torch.uint8, device=DEVICE)
    entries = torch.tensor([9 << 22, (9 << 22) + 16], dtype=torch.int32, device=DEVICE)
    states = [data[int(entry) * 256 :].view(torch.float32)[:1024].view(2, 16, 32) for entry in entries]
    for lengths in (None, [1, 70]):
        for state in states:
            state.copy_(torch.randn(2, 16, 32))
        x = inputs(sum(lengths or [2]), shape, torch.bfloat16)
        bounds = [0, *accumulate(lengths or [1, 1])]
        expected = [by_hand(Inputs(*(t[a:b] for t in x)), s) for (a, b), s in zip(pairwise(bounds), states, strict=True)]
        cu_seqlens = None if lengths is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        out = gated_delta_rule_entries(*x, data, entries, cu_seqlens)
        for (a, b), state, (rows, end) in zip(pairwise(bounds), states, expected, strict=True):
            assert relative_error(out[a:b], rows) < 1e-2 and relative_error(state, end) < 1e-2


def test_no_single_rows_need_no_step() -> None:
    x, pool = inputs(5, SHAPES[0], torch.float32), pool_of(2, SHAPES[0])
    bounds, twin = torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE), pool.data.clone()
    outs = [poisoned(*x.v.shape, dtype=torch.float32) for _ in range(2)]
    launch.by_entries(*x, pool.data, pool.entries, bounds, outs[0])
    launch.by_entries(*x, twin, pool.entries, bounds, outs[1], steps=False)
    assert torch.equal(*outs) and torch.equal(pool.data, twin)
