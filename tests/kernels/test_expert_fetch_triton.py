"""Residency decided by the Triton kernels: equal to the rules in plain Python, step after step; and the copies themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, ON_GPU, TOLERANCE, relative_error

from rimuru_kernels.expert_fetch import FetchPlan, LayerResidency, ResolvePolicy, fetch, kernel, predict, reference, resolve, route

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
    assert not plan.tally.any()


CASES = [  # tokens, experts, top_k, pages, resident, scratch
    pytest.param(1, 16, 2, 3, 4, 0, id="one-token"),
    pytest.param(1, 128, 8, 3, 16, 0, id="at-the-floor"),
    pytest.param(1, 60, 4, 6, 60, 0, id="all-resident"),
    pytest.param(1, 8, 2, 3, 0, 0, id="none-resident"),
    pytest.param(5, 40, 3, 3, 22, 0, id="five-tokens"),
    pytest.param(9, 12, 4, 3, 7, 0, id="too-few-victims"),
    pytest.param(1, 16, 4, 3, 8, 2, id="scratch"),
    pytest.param(3, 16, 4, 3, 9, 16, id="much-scratch"),
    # From here on the selections are added up in memory.
    pytest.param(64, 128, 8, 3, 128, 0, id="64-tokens-all-resident"),
    pytest.param(17, 60, 4, 3, 50, 0, id="seventeen-tokens"),
    pytest.param(33, 40, 6, 3, 30, 4, id="memory-and-scratch"),
    pytest.param(1, 512, 10, 3, 500, 4, id="512-experts"),
]
if ON_GPU:
    CASES += [
        pytest.param(64, 128, 8, 3, 60, 0, id="64-tokens"),
        pytest.param(64, 1024, 16, 3, 700, 0, id="most"),
        pytest.param(64, 8, 8, 3, 8, 0, id="few-experts"),
    ]


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


@pytest.mark.parametrize("lendable", [0, 2, 6])
def test_scratch_serves_where_no_resident_can_make_room(lendable: int) -> None:
    """Not before: a miss of no great worth still evicts. Rows of -1 are not there, as when a captured graph outlives what was lent."""
    rows = torch.full((6, 3), -1, dtype=torch.int32)
    rows[:lendable] = 100_000 + torch.arange(lendable * 3, dtype=torch.int32).view(lendable, 3)
    want_state = make_state(16, 3, 7)
    want_state.scores[want_state.entries[:, 0] >= 0] += 100.0
    want_plan = FetchPlan.create(16, 3, 16, torch.device("cpu"), rows)
    state, plan = to_device(want_state), to_device(want_plan)
    ids = torch.stack([torch.randperm(16)[:4].sort().values for _ in range(3)])
    ids[1:] = torch.arange(8).view(2, 4) + int(ids[0, 0]) % 8  # at least eight different ones, seven of which find residents' pages
    weights = torch.rand(3, 4)
    reference.resolve(ids, weights, want_state, want_plan, ResolvePolicy(), None)
    kernel.resolve(ids.to(DEVICE), weights.to(DEVICE), state, plan, ResolvePolicy(), None)
    compare(state, plan, want_state, want_plan, ids.unique())
    selected = len(ids.unique())
    assert int(state.counters[3]) == max(0, selected - 7 - lendable)
    assert int((plan.entries[ids.unique()] >= 100_000).all(1).sum()) == min(lendable, selected - 7)
    assert int((state.entries[:, 0] >= 0).sum()) == 7


def test_an_expert_that_the_device_cannot_read_again_is_never_evicted() -> None:
    want_state = make_state(12, 3, 6)
    lowest = int(torch.where(want_state.entries[:, 0] >= 0, want_state.scores, torch.inf).argmin())
    want_state.host[lowest] = 0
    want_plan = FetchPlan.create(12, 3, 4, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    kept = want_state.entries[lowest].clone()
    for _ in range(6):
        ids, weights = random_routing(1, 12, 4)
        reference.resolve(ids, weights, want_state, want_plan, ResolvePolicy(), None)
        kernel.resolve(ids.to(DEVICE), weights.to(DEVICE), state, plan, ResolvePolicy(), None)
        compare(state, plan, want_state, want_plan, ids.unique())
    assert torch.equal(state.entries[lowest].cpu(), kept)


@pytest.mark.parametrize("tokens", [2, 40], ids=["compared", "in-memory"])
def test_weights_that_are_no_shares_add_nothing(tokens: int) -> None:
    """NaN from a router that went wrong must neither hide an expert that is used nor stay in its score."""
    want_state = make_state(32, 3, 24)
    want_plan = FetchPlan.create(32, 3, 32, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    ids, weights = random_routing(tokens, 32, 4)
    weights[0] = float("nan")
    weights[1] = torch.tensor([0.0, 0.0, 0.0, 0.0])
    reference.resolve(ids, weights, want_state, want_plan, ResolvePolicy(), None)
    kernel.resolve(ids.to(DEVICE), weights.to(DEVICE), state, plan, ResolvePolicy(), None)
    assert state.scores.isfinite().all()
    compare(state, plan, want_state, want_plan, ids.unique())


@pytest.mark.parametrize("tokens", [2, 40], ids=["compared", "in-memory"])
def test_a_token_may_name_an_expert_twice(tokens: int) -> None:
    want_state = make_state(32, 3, 32)
    want_plan = FetchPlan.create(32, 3, 32, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    ids, weights = torch.randint(-1, 6, (tokens, 4)), torch.rand(tokens, 4)
    reference.resolve(ids, weights, want_state, want_plan, ResolvePolicy(), None)
    kernel.resolve(ids.to(DEVICE), weights.to(DEVICE), state, plan, ResolvePolicy(), None)
    compare(state, plan, want_state, want_plan, ids[ids >= 0].unique())


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


def test_a_given_routing_is_resolved_instead_of_the_routers() -> None:
    x, residual, router = torch.randn(2, 48), torch.randn(2, 48), torch.randn(16, 48)
    norm, policy = torch.rand(48) + 0.5, ResolvePolicy()
    given = random_routing(2, 16, 4)
    want_state = make_state(16, 3, 8)
    want_plan = FetchPlan.create(16, 3, 8, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    hidden, normed, weights, ids = route(x, residual.clone(), norm, 1e-6, router, 4, True, want_state, want_plan, policy, given=given)
    assert torch.equal(ids, given[0]) and torch.equal(weights, given[1])
    outs = [torch.full((2, 48), float("nan"), device=DEVICE) for _ in range(2)]
    own_ids, own_weights = torch.full((2, 4), -5, device=DEVICE), torch.full((2, 4), float("nan"), device=DEVICE)
    kernel.route(
        x.to(DEVICE), residual.to(DEVICE), norm.to(DEVICE), 1e-6, router.to(DEVICE), True, outs[1], outs[0], own_ids, own_weights,
        state, plan, policy, None, (given[0].to(DEVICE), given[1].to(DEVICE)),
    )  # fmt: skip
    compare(state, plan, want_state, want_plan, given[0].unique())
    assert relative_error(outs[0], hidden) < TOLERANCE[torch.float32] and relative_error(outs[1], normed) < TOLERANCE[torch.float32]
    assert (own_ids >= 0).all() and own_weights.isfinite().all(), "the router's own choice is made all the same"
    with pytest.raises(ValueError, match="a given routing"):
        route(x, residual, norm, 1e-6, router, 4, True, want_state, want_plan, policy, given=(given[0][:1], given[1][:1]))


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize(("experts", "top_k", "hidden", "resident"), [(16, 4, 48, 8), (60, 4, 64, 20), (12, 3, 40, 12), (8, 8, 16, 4)])
def test_predict_follows_the_rules(experts: int, top_k: int, hidden: int, resident: int, limit: int) -> None:
    copied = 0
    want_state, policy = make_state(experts, 3, resident), ResolvePolicy(decay=0.9)
    want_state.host[3] = 0
    want_plan = FetchPlan.create(experts, 3, experts, torch.device("cpu"))
    state, plan = to_device(want_state), to_device(want_plan)
    for step in range(8):
        x, router = torch.randn(1, hidden), torch.randn(experts, hidden)
        if step > 4:
            want_state.scores.mul_(20.0)  # now a guess hardly ever outranks a resident
            state.scores.copy_(want_state.scores)
        before = want_state.scores.clone()
        predict(x, router, top_k, want_state, want_plan, policy, limit=limit)
        kernel.predict(x.to(DEVICE), router.to(DEVICE), top_k, state, plan, policy, limit)
        compare(state, plan, want_state, want_plan, torch.zeros(0, dtype=torch.int64))
        assert int(want_plan.count) <= limit and torch.equal(want_state.scores, before) and int(plan.arrived) == 0
        copied += int(want_plan.count)
    assert state.counters.tolist() == [0, 0, copied, 0]
    assert int((state.entries[:, 0] >= 0).sum()) == resident
    assert (copied > 0) == (top_k < experts and resident < experts)


def test_a_guess_never_takes_the_place_of_a_better_expert() -> None:
    state = make_state(4, 3, 2)
    state.entries.fill_(-1)
    state.entries[:2] = torch.arange(6, dtype=torch.int32).view(2, 3)
    router = torch.eye(4)
    plan = FetchPlan.create(4, 3, 4, torch.device("cpu"))
    for scores, taken in (([2.0, 2.0, 0.5, 0.0], False), ([2.0, 1.0, 0.5, 0.0], True), ([2.0, 0.2, 0.0, 0.0], True)):
        own = dataclasses.replace(state, scores=torch.tensor(scores), entries=state.entries.clone())
        predict(torch.tensor([[0.0, 0.0, 30.0, 0.0]]), router, 1, own, plan, ResolvePolicy(decay=0.9))
        assert (int(plan.count) == 1) is taken
        assert (int(own.entries[1, 0]) < 0) is taken, "expert 1 is the worst resident"
    with pytest.raises(ValueError, match="predict"):
        predict(torch.zeros(2, 4), router, 1, state, plan)
    with pytest.raises(ValueError, match="one dtype"):
        predict(torch.zeros(1, 4), router.double(), 1, state, plan)


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
    fetch(plan, pool, page_bytes, (0, 2))
    third = [int(entry) for entry in plan.pages[:count, 2]]
    assert all(torch.equal(pool[entry * 256 :][:page_bytes], before[entry * 256 :][:page_bytes]) for entry in third)
    fetch(plan, pool, page_bytes, (2, 3))
    again = pool.clone()
    fetch(plan, pool, page_bytes)
    assert torch.equal(pool, again)
    flat = rows.flatten()
    for e in range(4, 4 + count):
        source = flat[start + e * stride :][: 3 * page_bytes].view(3, page_bytes)
        for page, entry in enumerate(state.entries[e].tolist()):
            assert torch.equal(pool[entry * 256 :][:page_bytes].cpu(), source[page])
            before[entry * 256 :][:page_bytes] = pool[entry * 256 :][:page_bytes]
    assert torch.equal(pool, before)  # nothing else was touched


def test_fetch_copies_what_pages_hold() -> None:
    content = _host_rows(1, 3 * 512)[0]
    start = -content.data_ptr() % 16
    plan = FetchPlan.create(4, 3, 1, DEVICE)
    plan.sources[0], plan.count[0] = content.data_ptr() + start, 1
    plan.pages[0] = torch.tensor([2, 0, -1], dtype=torch.int32)  # this layer's experts have two pages
    pool = torch.full((2048,), 0x77, dtype=torch.uint8, device=DEVICE)
    fetch(plan, pool, 512, (0, 2), copied=400)
    host, got = content[start:], pool.cpu()
    assert torch.equal(got[512:912], host[:400]) and torch.equal(got[:400], host[512:912])
    assert bool((got[400:512] == 0x77).all()) and bool((got[912:] == 0x77).all())


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU or torch.cuda.mem_get_info()[0] < 20 << 30, reason="needs an NVIDIA GPU with 20 GiB free")
def test_fetch_into_pages_beyond_two_to_the_31_words() -> None:
    """An entry whose offset in 8-byte words has 32 bits and more."""
    page_bytes, far = 4096, (17 << 30) // 256
    pool = torch.empty((17 << 30) + 3 * page_bytes, dtype=torch.uint8, device=DEVICE)
    content = torch.randint(0, 256, (3 * page_bytes,), dtype=torch.uint8).pin_memory()
    plan = FetchPlan.create(4, 3, 1, DEVICE)
    plan.sources[0], plan.count[0] = content.data_ptr(), 1
    plan.pages[0] = far + torch.tensor([2, 0, 1], dtype=torch.int32) * (page_bytes // 256)
    fetch(plan, pool, page_bytes)
    got = pool[17 << 30 :].view(3, page_bytes)[[2, 0, 1]].cpu()
    assert torch.equal(got.flatten(), content)


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
    with pytest.raises(ValueError, match="columns"):
        fetch(plan, torch.zeros(512, dtype=torch.uint8, device=DEVICE), 16, (2, 2))
    for copied in (0, 24, 48):
        with pytest.raises(ValueError, match="bytes of pages of 32"):
            fetch(plan, torch.zeros(512, dtype=torch.uint8, device=DEVICE), 32, copied=copied)
