"""Residency decided by the Triton kernels: equal to the rules in plain Python, step after step; and the copies themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, ON_GPU, TOLERANCE, relative_error

from rimuru_kernels.expert_fetch import FetchPlan, LayerResidency, ResolvePolicy, fetch, kernel, reference, resolve, route

PAGE_UNITS = 2  # entries per page: pages of 512 bytes


def make_state(experts: int, pages: int, resident: int) -> LayerResidency:
    entries = torch.full((experts, pages), -1, dtype=torch.int32)
    slots = torch.randperm(resident * pages, dtype=torch.int32).view(resident, pages) * PAGE_UNITS
    entries[torch.randperm(experts)[:resident]] = slots
    host = 16 * (1 + torch.arange(experts))
    return LayerResidency(entries, torch.rand(experts), host, torch.zeros(4, dtype=torch.int64))


def to_device(value: LayerResidency | FetchPlan) -> LayerResidency | FetchPlan:
    moved = {field.name: getattr(value, field.name).clone().to(DEVICE) for field in dataclasses.fields(value)}
    return type(value)(**moved)


def random_routing(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(experts)[:top_k].sort().values for _ in range(tokens)])
    return ids, torch.rand(tokens, top_k)


def compare(state: LayerResidency, plan: FetchPlan, want_state: LayerResidency, want_plan: FetchPlan, selected: Tensor) -> None:
    torch.testing.assert_close(state.scores.cpu(), want_state.scores, rtol=1e-5, atol=1e-7)
    assert torch.equal(state.entries.cpu(), want_state.entries)
    assert state.counters.tolist() == want_state.counters.tolist()
    count = int(want_plan.count)
    assert int(plan.count) == count
    assert torch.equal(plan.sources[:count].cpu(), want_plan.sources[:count])
    assert torch.equal(plan.pages[:count].cpu(), want_plan.pages[:count])
    assert torch.equal(plan.entries[selected].cpu(), want_plan.entries[selected])


CASES = [  # tokens, experts, top_k, pages, resident, scratch
    pytest.param(1, 16, 2, 3, 4, 0, id="one-token"),
    pytest.param(1, 128, 8, 3, 16, 0, id="at-the-floor"),
    pytest.param(1, 60, 4, 6, 60, 0, id="all-resident"),
    pytest.param(1, 8, 2, 3, 0, 0, id="none-resident"),
    pytest.param(5, 40, 3, 3, 22, 0, id="five-tokens"),
    pytest.param(9, 12, 4, 3, 7, 0, id="too-few-victims"),
    pytest.param(1, 16, 4, 3, 8, 2, id="scratch"),
    pytest.param(3, 16, 4, 3, 9, 16, id="much-scratch"),
]
if ON_GPU:
    CASES += [pytest.param(64, 128, 8, 3, 60, 0, id="64-tokens"), pytest.param(1, 512, 10, 3, 100, 4, id="512-experts")]


@pytest.mark.parametrize(("tokens", "experts", "top_k", "pages", "resident", "scratch"), CASES)
def test_resolve_follows_the_rules(tokens: int, experts: int, top_k: int, pages: int, resident: int, scratch: int) -> None:
    want_state = make_state(experts, pages, resident)
    rows = 100_000 + torch.arange(scratch * pages, dtype=torch.int32).view(scratch, pages)
    want_plan = FetchPlan.create(experts, pages, tokens * top_k, torch.device("cpu"), rows)
    state, plan = to_device(want_state), to_device(want_plan)
    policy = ResolvePolicy(decay=0.9, never_evict_better=scratch > 0)
    for step in range(4):
        ids, weights = random_routing(tokens, experts, top_k)
        if step == 3:
            ids[-1, : top_k // 2] = -1
        reference.resolve(ids, weights, want_state, want_plan, policy, None)
        kernel.resolve(ids.to(DEVICE), weights.to(DEVICE), state, plan, policy, None)
        compare(state, plan, want_state, want_plan, ids[ids >= 0].unique())
        state = to_device(dataclasses.replace(state, scores=want_state.scores))  # do not let roundings drift apart
    owned = state.entries[state.entries[:, 0] >= 0].flatten().tolist()
    assert len(owned) == len(set(owned)) == resident * pages


def test_equal_scores_go_to_the_lower_expert() -> None:
    state = to_device(make_state(16, 3, 8))
    state.entries.fill_(-1)
    state.entries[4:12] = torch.arange(24, dtype=torch.int32, device=DEVICE).view(8, 3)
    state.scores.fill_(0.0)
    plan = FetchPlan.create(16, 3, 2, DEVICE)
    ids = torch.tensor([[1, 14]], device=DEVICE)
    kernel.resolve(ids, torch.full((1, 2), 0.5, device=DEVICE), state, plan, ResolvePolicy(), None)
    assert plan.sources.tolist() == [32, 240]  # experts 1, then 14
    assert plan.pages.tolist() == [[0, 1, 2], [3, 4, 5]]  # from experts 4, then 5
    assert [e for e in range(16) if state.entries[e, 0] < 0] == [0, 2, 3, 4, 5, 12, 13, 15]


def test_experts_that_the_device_cannot_read_are_not_placed() -> None:
    state = to_device(make_state(8, 3, 4))
    before = state.entries.clone()
    state.host.zero_()
    plan = FetchPlan.create(8, 3, 8, DEVICE)
    kernel.resolve(torch.arange(8, device=DEVICE)[None, :], torch.ones(1, 8, device=DEVICE), state, plan, ResolvePolicy(), None)
    assert torch.equal(state.entries, before)
    assert state.counters.tolist() == [8, 4, 0, 4]
    assert ((plan.entries >= 0) == (before >= 0)).all()


def test_padding_counts_for_nothing() -> None:
    want_state = make_state(16, 3, 8)
    want_plan = FetchPlan.create(16, 3, 12, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    ids, weights = random_routing(4, 16, 3)
    reference.resolve(ids[:2], weights[:2], want_state, want_plan, ResolvePolicy(), None)
    tokens = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    kernel.resolve(ids.to(DEVICE), weights.to(DEVICE), state, plan, ResolvePolicy(), tokens)
    compare(state, plan, want_state, want_plan, ids[:2].unique())


@pytest.mark.parametrize("valid", [None, 1], ids=["full", "padded"])
@pytest.mark.parametrize(("tokens", "hidden", "experts", "top_k"), [(1, 48, 16, 4), (3, 64, 12, 3)])
def test_route_equals_its_parts(tokens: int, hidden: int, experts: int, top_k: int, valid: int | None) -> None:
    x, residual, router = torch.randn(tokens, hidden), torch.randn(tokens, hidden), torch.randn(experts, hidden)
    norm = torch.rand(hidden) + 0.5
    want_state, policy = make_state(experts, 3, 2 * top_k), ResolvePolicy()
    want_plan = FetchPlan.create(experts, 3, tokens * top_k, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    for _ in range(2):
        limit = None if valid is None else torch.tensor([valid], dtype=torch.int32)
        want = route(x, residual.clone(), norm, 1e-6, router, top_k, True, want_state, want_plan, policy, num_tokens=limit)
        residual_out, hidden_out = (torch.full((tokens, hidden), float("nan"), device=DEVICE) for _ in range(2))
        ids = torch.full((tokens, top_k), 99, device=DEVICE)
        weights = torch.full((tokens, top_k), float("nan"), device=DEVICE)
        kernel.route(
            x.to(DEVICE), residual.to(DEVICE), norm.to(DEVICE), 1e-6, router.to(DEVICE), True, hidden_out, residual_out, ids, weights,
            state, plan, policy, None if limit is None else limit.to(DEVICE),
        )  # fmt: skip
        exact = residual.double() + x.double()
        exact_norm = norm.double() * exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert relative_error(residual_out, exact) < TOLERANCE[torch.float32]
        assert relative_error(hidden_out, exact_norm) < TOLERANCE[torch.float32]
        assert torch.equal(ids.cpu(), want[3])
        torch.testing.assert_close(weights.cpu(), want[2], rtol=1e-4, atol=1e-6)
        compare(state, plan, want_state, want_plan, want[3][want[3] >= 0].unique())
        assert int(plan.arrived) == 0


def _host_rows(experts: int, expert_bytes: int) -> Tensor:
    rows = torch.randint(0, 256, (experts, expert_bytes + 64), dtype=torch.uint8)
    return rows.pin_memory() if ON_GPU else rows


@pytest.mark.skipif(not ON_GPU, reason="the interpreter cannot follow addresses stored in a tensor")
@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("page_bytes", [512, 3 << 20, 16400])
def test_fetch_copies_what_was_missing_on_the_gpu(count: int, page_bytes: int) -> None:
    _check_fetch(count, page_bytes)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fetch_in_plain_torch(count: int) -> None:
    if not ON_GPU:
        _check_fetch(count, 512)


def _check_fetch(count: int, page_bytes: int) -> None:
    experts, units = 8, -(-page_bytes // 256)
    rows = _host_rows(experts, 3 * page_bytes)
    start = -rows.data_ptr() % 16
    stride = rows.stride(0)
    host = torch.tensor([rows.data_ptr() + start + e * stride for e in range(experts)])
    assert stride % 16 == 0
    pool = torch.full((256 * units * 20,), 0xFF, dtype=torch.uint8, device=DEVICE)
    state = to_device(make_state(experts, 3, 4))
    state.entries.fill_(-1)
    state.entries[:4] = torch.randperm(20)[:12].to(DEVICE, torch.int32).view(4, 3) * units
    state.host.copy_(host)
    plan = FetchPlan.create(experts, 3, 4, DEVICE)
    ids = torch.tensor([[0, 1, 2, 3]], device=DEVICE)
    ids[0, 4 - count :] = 4 + torch.arange(count, device=DEVICE)
    resolve(ids, torch.full((1, 4), 0.25, device=DEVICE), state, plan)
    before = pool.clone()
    fetch(plan, pool, page_bytes)
    flat = rows.flatten()
    for e in range(4, 4 + count):
        source = flat[start + e * stride :][: 3 * page_bytes].view(3, page_bytes)
        for page, entry in enumerate(state.entries[e].tolist()):
            assert torch.equal(pool[entry * 256 :][:page_bytes].cpu(), source[page])
            before[entry * 256 :][:page_bytes] = pool[entry * 256 :][:page_bytes]
    assert torch.equal(pool, before)  # nothing else was touched


def test_tensors_that_do_not_belong_together() -> None:
    state = to_device(make_state(8, 3, 4))
    plan = FetchPlan.create(8, 3, 2, DEVICE)
    ids, weights = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    resolve(ids, weights, state, plan)
    with pytest.raises(ValueError, match="too small"):
        resolve(ids.repeat(2, 1), weights.repeat(2, 1), state, plan)
    with pytest.raises(ValueError, match=r"state\.scores"):
        resolve(ids, weights, dataclasses.replace(state, scores=state.scores.double()), plan)
    with pytest.raises(ValueError, match="weights"):
        resolve(ids, weights.double(), state, plan)
    with pytest.raises(ValueError, match="64 tokens"):
        resolve(ids.repeat(65, 1), weights.repeat(65, 1), state, plan)
    with pytest.raises(ValueError, match="multiple of 16"):
        fetch(plan, torch.zeros(512, dtype=torch.uint8, device=DEVICE), 24)
